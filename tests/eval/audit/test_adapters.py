"""Adapters of low rank: what their upper matrices alone tell, and weights into which they were merged."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hyperleak
from attacks.base import NotApplicable, build
from eval.audit.captured_files import CapturedUpdate, load_pair
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.audit.tensor_names import with_model_names
from eval.audit.update_sanity import find_inconsistency
from eval.federations.screening import Screener
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

SHAPE, RANK = (1, 8, 8), 4
STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


class Adapted(nn.Module):
    """A linear layer with an adapter, under the names that PEFT gives its parts."""

    def __init__(self, base: nn.Linear, *, moving: bool) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base.out_features, bias=False)})
        for part, spread in ((self.lora_A, 0.2), (self.lora_B, 0.2 if moving else 0.0)):
            part["default"].weight.data.normal_(0, 1, generator=stream(0, "adapter")).mul_(spread)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    def merged(self) -> Tensor:
        return self.base_layer.weight + self.lora_B["default"].weight @ self.lora_A["default"].weight


def plain() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for value in model.parameters():
        value.data.normal_(0, 0.2, generator=stream(0, "adapted"))
    return model


def adapted(*, moving: bool) -> nn.Module:
    first, second, third, last = plain()
    return nn.Sequential(first, Adapted(second, moving=moving), third, last.requires_grad_(False))


def picture() -> Tensor:
    return torch.rand(1, *SHAPE, generator=stream(0, "picture"))


def step(model: nn.Module, count: int = 1) -> nn.Module:
    trained = copy.deepcopy(model)
    rule = torch.optim.SGD([value for value in trained.parameters() if value.requires_grad], lr=0.1)
    for _ in range(count):
        rule.zero_grad()
        nn.functional.cross_entropy(trained(picture()), torch.tensor([3])).backward()
        rule.step()
    return trained


@pytest.mark.parametrize("attack", ["analytic", "cascade"])
def test_the_upper_matrix_alone_is_refused_by_how_many_numbers_it_tells(attack: str) -> None:
    view, _ = from_batch(adapted(moving=False), picture(), torch.tensor([3]), method=STEP)
    result = build(attack)(view)
    assert isinstance(result, NotApplicable)
    assert not result.limit
    assert "only the upper matrices of adapters moved (1.lora_B.default.weight)" in result.reason
    assert f"they tell {RANK} numbers of 64" in result.reason
    both, _ = from_batch(adapted(moving=True), picture(), torch.tensor([3]), method=STEP)
    assert "upper matrices" not in getattr(build(attack)(both), "reason", "")


def test_an_audit_that_tried_nothing_is_not_decided() -> None:
    report = hyperleak.audit(
        adapted(moving=False), picture(), torch.tensor([3]), attacks=["analytic", "rconv", "cascade"]
    )
    assert any("no attack says anything" in one.what for one in report.open_questions({}))


@pytest.mark.parametrize(("moving", "count"), [(False, 1), (True, 1), (True, 3)])
def test_weights_with_a_merged_adapter_are_named(moving: bool, count: int) -> None:
    base, start = plain(), adapted(moving=moving)
    ends = [model.get_submodule("1").merged().detach() for model in (start, step(start, count))]
    states = [{**base.state_dict(), "1.weight": end} for end in ends]
    update = {name: states[0][name] - states[1][name] for name in states[0]}
    view = from_update(base, update, input_shape=SHAPE, method=STEP)
    said = find_inconsistency(view)
    assert "only matrices moved (1.weight), by a rank of" in said
    assert "merge_and_unload" in said
    result = build("analytic")(view)
    assert not getattr(result, "verified", None)


def test_a_step_on_all_weights_is_no_merged_adapter() -> None:
    base = plain()
    after = step(base).state_dict()
    update = {name: value - after[name] for name, value in base.state_dict().items()}
    assert find_inconsistency(from_update(base, update, input_shape=SHAPE, method=STEP)) == ""
    wide = {name: torch.zeros_like(value) if value.ndim == 1 else value for name, value in update.items()}
    wide["1.weight"] = torch.randn(32, 64, generator=stream(0, "wide"))
    assert "only matrices moved" not in find_inconsistency(from_update(base, wide, input_shape=SHAPE, method=STEP))


def test_merged_weights_for_a_model_with_its_adapter_are_refused() -> None:
    base, start = plain(), adapted(moving=True)
    wrapped = nn.Module()
    wrapped.base_model = nn.Module()
    wrapped.base_model.model = start
    state = base.state_dict()
    with pytest.raises(
        ValueError, match=r"got those of the model without .* can't be told; give the adapter's tensors"
    ):
        with_model_names(load_pair(state, state), wrapped)


def test_rows_that_were_sent_alone_are_no_merged_adapter() -> None:
    model = plain()
    loss = nn.functional.cross_entropy(model(picture()), torch.tensor([1]))
    found = torch.autograd.grad(loss, list(model.parameters()))
    grads = dict(zip(dict(model.named_parameters()), found, strict=True))
    name = next(name for name, value in grads.items() if value.ndim == 2)
    row = int(grads[name].abs().sum(1).argmax())
    update = {n: torch.zeros_like(value) for n, value in grads.items()}
    update[name][row] = grads[name][row]
    said = hyperleak.audit(model, update=update, input_shape=tuple(picture().shape[1:]), attacks=["analytic"]).mismatch
    assert "adapters" not in said


# ---- names of PEFT's models and of its files -------------------------------------------------------------------------
class AsPeft(nn.Module):
    """A network with adapters, under the names of PEFT's models."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = adapted(moving=True)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base_model.model(x)
        return logits


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def whole(model: nn.Module) -> dict[str, Tensor]:
    return state(model)


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in state(model).items() if "lora_" in name}


def file(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace(".default", ""): value for name, value in adapters(model).items()}


def shorter(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("base_model.model."): value for name, value in file(model).items()}


def wrapped(model: nn.Module) -> dict[str, Tensor]:
    return {f"module.{name}": value for name, value in file(model).items()}


@pytest.mark.parametrize("sent", [whole, adapters, file, shorter, wrapped])
@pytest.mark.parametrize("back", [whole, adapters, file, shorter, wrapped])
def test_adapters_before_and_after_are_matched_by_name_however_each_is_called(sent, back) -> None:
    model = AsPeft()
    trained = step(model)
    found = with_model_names(load_pair(sent(model), back(trained)), model)
    made = adapters(trained)
    assert found.update.keys() == made.keys()
    assert all(torch.equal(found.update[name], value - made[name]) for name, value in adapters(model).items())


@pytest.mark.parametrize(("sent", "back"), [(whole, file), (file, whole), (shorter, adapters), (whole, wrapped)])
def test_a_screening_matches_the_names_of_adapters(sent, back) -> None:
    model = AsPeft()
    facts = TrainingFacts(optimizer="sgd", lr=0.1, steps=1, examples=1)
    recorded = RecordedUpdate(before=sent(model), after=back(step(model)), training=facts)
    alike = RecordedUpdate(before=adapters(model), after=adapters(step(model)), training=facts)
    screen = Screener(model=lambda: model, input_shape=SHAPE, seconds=3)
    found, expected = screen(recorded), screen(alike)
    assert (found.verdict, found.reason) == (expected.verdict, expected.reason)
    assert found.verdict == "leaked"
    other = replace(recorded, after={"elsewhere": torch.zeros(2)})
    assert "give both by the names of model.state_dict()" in screen(other).reason


def test_short_names_that_several_parts_have_are_not_given_to_one_of_them() -> None:
    model = nn.ModuleDict({"user": nn.Linear(4, 3), "item": nn.Linear(4, 3)})
    update = CapturedUpdate({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"any of several of its parts \(item\., user\.\): put the right one's"):
        with_model_names(update, model)
    twins = nn.ModuleDict({"user": adapted(moving=True), "item": adapted(moving=True)})
    short = {name.removeprefix("user."): v for name, v in file(twins).items() if name.startswith("user.")}
    with pytest.raises(ValueError, match="any of several of its parts"):
        with_model_names(CapturedUpdate(short), twins)
