"""A screening shows what it can prove within its time, and never more."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import recorded as support
from torch import Tensor, nn

from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.prefix_inversion import confirm_whole
from attacks.search_control import SearchControl, StoppedError
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.round_report import RoundReports
from eval.federations.screening import Screener, Screening
from fl.seeds import stream
from fl.view import ServerView

pytestmark = pytest.mark.usefixtures("own_time")

ADAM = TrainingFacts(optimizer="adam", lr=1e-3, steps=1)


def screener(model: nn.Module, **settings: object) -> Screener:
    return Screener(model=lambda: model, input_shape=support.SHAPE, **settings)  # type: ignore[arg-type]


def kinds(found: Screening) -> set[str]:
    return {exposure.kind for exposure in found.exposures}


def test_one_image_in_a_dense_network_is_proved() -> None:
    model = support.dense_network()
    found = screener(model)(support.recorded(model))
    assert (found.verdict, kinds(found)) == ("leaked", {"images", "labels"})
    assert found.must_not_leave
    assert "an image is recovered" in found.reason


def test_what_the_first_dense_layer_takes_is_proved_behind_a_convolution() -> None:
    model = support.network()
    found = screener(model, seconds=2)(support.recorded(model))
    assert found.verdict == "leaked"
    assert "features" in kinds(found)
    allowed = screener(model, seconds=2, allowed="images")(support.recorded(model))
    assert (allowed.verdict, allowed.must_not_leave) == ("not shown to leak", False)


@pytest.mark.parametrize(
    ("count", "facts", "verdict"),
    [
        (8, ADAM, "not shown to leak"),
        (1, replace(ADAM, steps=20), "not decided"),
        (1, TrainingFacts(optimizer="sgd", lr=0.1, steps=20), "not decided"),
    ],
)
def test_what_is_not_proved_is_not_said(count: int, facts: TrainingFacts, verdict: str) -> None:
    model = support.network()
    found = screener(model)(support.recorded(model, count, facts))
    assert (found.verdict, kinds(found)) == (verdict, set())
    assert found.tried


def test_an_unknown_optimizer_proves_nothing_by_layers_alone() -> None:
    """Adam's first step is of rank one, too: what a layer then seems to take is no feature, but for its signs."""
    model = support.network()
    update = replace(support.recorded(model, 1, ADAM), training=TrainingFacts(examples=1))
    found = screener(model)(update)
    (shown,) = found.exposures
    assert shown.words.startswith("which of the 100 numbers that 4 takes are above, at or below zero is recovered")
    other = screener(model, seconds=2)(replace(support.recorded(model, noise=1e-2), training=update.training))
    assert (other.verdict, other.exposures) == ("not decided", ())
    assert "how the client trained is not known; say optimizer, steps and lr" in other.reason
    assert any("how the client trained is not known" in note for note in found.notes)


def test_a_noisy_update_shows_no_exposure() -> None:
    model = support.network()
    found = screener(model)(support.recorded(model, noise=1e-3))
    assert kinds(found) == set()


def test_an_error_inside_is_a_verdict() -> None:
    found = screener(support.dense_network())(support.recorded(support.network()))
    assert (found.verdict, found.must_not_leave) == ("failed", True)
    assert found.reason.startswith("the screening failed: ValueError: ")

    def broken() -> nn.Module:
        raise RuntimeError("no weights")

    found = Screener(model=broken, input_shape=support.SHAPE)(support.recorded(support.network()))
    assert found.reason == "the screening failed: RuntimeError: no weights"


@pytest.mark.parametrize("error", [Exception("no luck"), NameError("no luck"), SystemExit("no luck")])
def test_any_error_of_the_model_is_a_verdict(error: BaseException) -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    def build() -> nn.Module:
        raise error

    for make in (build, lambda: nn.Sequential(nn.Flatten(), Failing(196, 10))):
        found = Screener(model=make, input_shape=support.SHAPE)(support.recorded(support.dense_network()))
        assert found.verdict == "failed"
        assert "no luck" in found.reason or "names" in found.reason


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_reported(number: float, tmp_path: Path) -> None:
    model, update = support.network(), support.recorded(support.network())
    for halves in (
        {"before": update.before, "after": {n: v * number for n, v in update.after.items()}},
        {"before": {n: v * number for n, v in update.before.items()}, "after": update.after},
    ):
        odd = replace(update, **halves)
        found = screener(model)(odd)
        assert found.must_not_leave
        page = RoundReports(folder=tmp_path, record=True).add(odd, found, "withheld")
        assert "finite" in page.read_text()


def test_numbers_that_are_not_finite_are_never_shown() -> None:
    model = support.network()
    update = support.recorded(model)
    broken = {name: value * float("nan") for name, value in update.after.items()}
    found = screener(model)(replace(update, after=broken))
    assert found.verdict in {"failed", "not shown to leak"}
    assert not found.exposures


def test_once_the_time_is_up_no_attack_begins() -> None:
    model = support.dense_network()
    found = screener(model, seconds=1e-9)(support.recorded(model))
    assert set(found.tried.values()) == {"not begun before the time limit"}
    assert (found.verdict, found.must_not_leave) == ("failed", True)
    assert found.reason == "no attack came to an end within 1e-09 seconds: give more (seconds)"


@pytest.mark.parametrize("count", [1, 3])
def test_what_could_not_be_checked_in_time_is_not_decided(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Of several images nothing else keeps it from leaving: all that was found were they."""
    model = support.dense_network()
    update = support.recorded(model, count, replace(support.PLAIN, batch_size=count))
    assert screener(model)(update).verdict == "leaked"

    def ended(attack: Attack, view: ServerView, above: ServerView | None, result: Result) -> Result:
        if isinstance(result, Reconstruction):
            raise StoppedError("the time limit")
        return confirm_whole(attack, view, above, result)

    monkeypatch.setattr("attacks.checked_run.confirm_whole", ended)
    found = screener(model)(update)
    assert (found.verdict, found.must_not_leave) == ("not decided", True)
    assert not found.exposures
    assert count == 1 or "what was found could not be held to the update" in found.reason


def test_reading_the_update_takes_a_tenth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def note(self: Screener, view: ServerView, control: SearchControl) -> None:
        left.append(control.seconds_left)

    monkeypatch.setattr(Screener, "_read_compressed", note)
    model = support.dense_network()
    for slow in (0, 500):
        screener(model, seconds=1000)._screen(support.recorded(model), time.monotonic() - slow)
    quick, late = left
    assert 700 < quick <= 750
    assert 645 < late <= 650


def test_guesses_that_took_all_the_time_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_begun(_: Screener, __: object, attacks: Mapping[str, Attack], *___: object) -> dict[str, Result]:
        return {name: NotApplicable("not begun before it", cut_short="the time limit") for name in attacks}

    monkeypatch.setattr(Screener, "_attack", not_begun)
    model = support.dense_network()
    found = screener(model)(support.recorded(model, 2))
    assert found.tried["analytic, where it is that of one step on one example"].startswith("images, not confirmed")
    assert (found.verdict, found.must_not_leave) == ("failed", True)


def test_a_mean_of_features_that_two_outputs_take_for_one_is_no_leak() -> None:
    """Whatever a layer of two outputs was given, its update has one direction: only its size tells one from several."""
    model = support.network()[:4].append(nn.Linear(100, 2))
    for count, kind in ((1, {"features", "labels"}), (4, set())):
        update = one_step(model, support.examples(count)[0], two_classes)
        assert kinds(screener(model, seconds=2)(update)) == kind


def two_classes(outputs: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, torch.ones(len(outputs), dtype=torch.int64))


@pytest.mark.parametrize("settings", [{"seconds": 0}, {"allowed": "everything"}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        screener(support.network(), **settings)


def trained(
    model: nn.Module, count: int = 1, *, loss: Callable[..., Tensor] = nn.functional.cross_entropy, **settings: Any
) -> RecordedUpdate:
    """What a client sends that takes one step of SGD otherwise than `support.PLAIN` says."""
    (inputs, labels), after = support.examples(count), copy.deepcopy(model)
    optimizer = torch.optim.SGD(after.parameters(), **{"lr": 0.1, **settings})
    loss(after(inputs), labels).backward()
    optimizer.step()
    states = [{name: value.clone() for name, value in one.state_dict().items()} for one in (model, after)]
    return RecordedUpdate(before=states[0], after=states[1], training=replace(support.PLAIN, examples=count))


@pytest.mark.parametrize(
    ("used", "stated", "note"),
    [
        (0.01, {}, "weight decay of 0.01 was read off the update and taken off it, which was not stated"),
        (0.0, {"weight_decay": 0.01}, "no weight decay shows, where 0.01 was stated"),
        (0.01, {"lr": None, "weight_decay": 0.5}, "weight decay by 0.001 of the weights was read off the update"),
    ],
)
def test_another_weight_decay_than_stated_hides_nothing(used: float, stated: dict[str, Any], note: str) -> None:
    for model, kind in ((support.dense_network(), "images"), (support.network(), "features")):
        update = trained(model, weight_decay=used)
        found = screener(model)(replace(update, training=replace(update.training, **stated)))
        assert kind in kinds(found)
        assert any(one.startswith(note) for one in found.notes)


def test_label_smoothing_that_was_not_stated_hides_nothing() -> None:
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    model = support.dense_network()
    found = screener(model)(trained(model, loss=smoothed))
    assert kinds(found) == {"images", "labels"}
    assert "label smoothing 0.1, which was not stated" in found.tried["analytic"]
    stated = screener(model, loss=smoothed)(trained(model))
    assert kinds(stated) == {"images"}  # under another loss than the client's no label is told
    right = screener(model, loss=smoothed)(trained(model, loss=smoothed))
    assert kinds(right) == {"images", "labels"}


def test_a_batch_that_another_loss_explains_is_not_said_to_be_safe() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(196, 96), nn.ReLU(), nn.Linear(96, 10))
    (inputs, labels), client = support.examples(2), copy.deepcopy(model)
    nn.functional.cross_entropy(client(inputs), labels, label_smoothing=0.1).backward()
    torch.optim.SGD(client.parameters(), lr=0.1).step()
    facts = replace(support.PLAIN, examples=2, batch_size=2)
    found = screener(model)(replace(support.recorded(model, 2, facts), after={**client.state_dict()}))
    assert (found.verdict, found.exposures) == ("not decided", ())
    assert "makes all of the update under another loss than stated (cross-entropy)" in found.reason
    for attack in ("analytic", "spear"):
        assert "that was trained with" in found.tried[attack]


def test_what_facts_contradict_is_not_said_to_be_safe() -> None:
    """Biases that move further than weights leave the first layer an outer product, of a picture that is too dark."""
    model = support.dense_network()
    update = support.recorded(model)
    after = {
        name: update.before[name] - (1.3 if name.endswith("bias") else 1.0) * (update.before[name] - value)
        for name, value in update.after.items()
    }
    found = screener(model)(replace(update, after=after))
    assert (found.verdict, found.must_not_leave, found.exposures) == ("not decided", True, ())
    assert found.reason.startswith("nobody can say what it shows: what a layer was given stands in its update exactly")
    assert "weight decay in a part of the weights" in found.tried["analytic"]


@pytest.mark.parametrize("build", [support.dense_network, support.network])
def test_an_update_computed_in_half_precision_is_not_called_safe(build: Callable[[], nn.Module]) -> None:
    model = build()
    (inputs, labels), after = support.examples(1), copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = after(inputs)
    nn.functional.cross_entropy(outputs.float(), labels).backward()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    update = replace(support.recorded(model), after={name: value.clone() for name, value in after.state_dict().items()})
    found = screener(model, seconds=2)(update)
    assert (found.verdict, found.exposures) == ("not decided", ())
    assert "of a layer's update is that of one input, as where a client computed in half precision" in found.reason
    several = screener(model, seconds=2)(replace(support.recorded(model, 30), training=support.PLAIN))
    assert not several.exposures
    assert "half precision" not in several.reason


def test_what_nothing_being_shown_rests_on_is_said() -> None:
    model = support.network()
    found = screener(model, seconds=2)(support.recorded(model, 8, replace(support.PLAIN, batch_size=8)))
    (rests,) = [note for note in found.notes if note.startswith("that no more is shown rests on")]
    for fact in ("loss cross-entropy", "optimizer sgd", "lr 0.1", "weight_decay 0", "steps 1", "examples 8"):
        assert fact in rests
    unknown = screener(model, seconds=2)(replace(support.recorded(model, 8), training=TrainingFacts(examples=8)))
    assert any("optimizer not known, lr not known" in note for note in unknown.notes)
    leaking = screener(model, seconds=2)(support.recorded(model))
    assert not any("rests on" in note for note in leaking.notes)


def test_what_the_loader_does_to_pixels_counts() -> None:
    model = support.dense_network()
    update = support.recorded(nn.Sequential(_Loader(), *model))
    bare = {half: _without_loader(getattr(update, half)) for half in ("before", "after")}
    found = screener(model, mean=(0.5,), std=(0.25,))(replace(update, **bare))
    assert "images" in kinds(found)


def test_pixels_of_a_loader_that_nobody_stated_leak_as_features() -> None:
    model = support.dense_network()
    update = support.recorded(nn.Sequential(_Loader(), *model))
    bare = {half: _without_loader(getattr(update, half)) for half in ("before", "after")}
    found = screener(model, seconds=2)(replace(update, **bare))
    assert kinds(found) == {"features", "labels"}
    assert "a loader may normalize pixels: state its mean and std" in found.tried["analytic"]


class _Loader(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.5) / 0.25


def _without_loader(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that they have where the first module is not there."""
    parts = {name: name.split(".", 1) for name in state}
    return {f"{int(first) - 1}.{rest}": state[name] for name, (first, rest) in parts.items()}


@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-5])
def test_small_steps_leak_as_well_although_rounding_is_a_larger_share(lr: float) -> None:
    model = support.network()
    facts = replace(support.PLAIN, lr=lr)
    assert "features" in kinds(screener(model)(support.recorded(model, 1, facts)))
    two = replace(support.recorded(model, 2, facts), training=replace(facts, examples=1))
    assert not kinds(screener(model)(two))


def test_one_step_of_adam_shows_one_image_and_no_more() -> None:
    model, facts = support.dense_network(), replace(ADAM, lr=1e-2)
    found = screener(model)(support.recorded(model, 1, facts))
    assert "images" in kinds(found)
    assert "with a standard error of 8.1% of its size" in found.reason
    for count, noise in ((2, 0.0), (1, 1e-5)):
        update = support.recorded(model, count, facts, noise=noise)
        one = replace(update, training=replace(facts, examples=1))
        assert not kinds(screener(model)(one)) - {"labels"}, (count, noise)


@pytest.mark.parametrize("count", [1, 2])
def test_a_picture_that_rounding_hides_is_none(count: int) -> None:
    """At this step size the misfit says nothing: the errors of the sizes are as large as the sizes."""
    model = support.dense_network()
    for lr in (1e-4, 1e-3):
        update = support.recorded(model, count, replace(ADAM, lr=lr))
        found = screener(model)(replace(update, training=replace(update.training, examples=1)))
        assert not kinds(found)


def test_features_that_the_layers_above_contradict_do_not_count() -> None:
    """Step sizes by tensor leave a layer's update an outer product, of an input that is off by a factor."""
    model = support.network()
    update = support.recorded(model, noise=1e-6)
    for factor in (1.0, 2.0):
        after = {
            name: update.before[name] - (factor if name.endswith("bias") else 1.0) * (update.before[name] - value)
            for name, value in update.after.items()
        }
        found = screener(model, seconds=30)(replace(update, after=after))
        assert [one.attack for one in found.exposures if one.kind == "features"] == (["cascade"] if factor == 1 else [])


@pytest.mark.parametrize("facts", [support.PLAIN, replace(ADAM, lr=1e-2)])
def test_one_picture_is_found_whatever_number_is_stated(facts: TrainingFacts) -> None:
    model = support.dense_network()
    update = support.recorded(model, 1, facts)
    for stated in ({"examples": 32}, {"examples": 1, "steps": 32}, {"examples": 64, "epochs": 2, "steps": None}):
        found = screener(model)(replace(update, training=replace(facts, **stated)))  # type: ignore[arg-type]
        assert "images" in kinds(found)
        assert "whatever was stated, it is that of one step on one example" in found.notes
    eight = screener(model)(support.recorded(model, 8, facts))
    assert not any("it is that of one step" in note for note in eight.notes)
    assert any(name.endswith(", where it is that of one step on one example") for name in eight.tried)


def sent(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> RecordedUpdate:
    """One step on a batch of which the number is stated rightly."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    loss(trained(inputs), targets).backward()
    optimizer.step()
    states = [{name: value.clone() for name, value in one.state_dict().items()} for one in (model, trained)]
    return RecordedUpdate(before=states[0], after=states[1], training=replace(support.PLAIN, examples=len(inputs)))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_batch_of_rows_under_linear_regression_is_no_example_that_is_proved(layers: int) -> None:
    rows = 5 * torch.rand(8, 6, generator=stream(0, "rows"))
    targets = rows.sum(1, keepdim=True)
    for start in range(3):
        with torch.random.fork_rng():
            torch.random.default_generator.manual_seed(start)
            model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)) if layers == 2 else nn.Sequential(nn.Linear(6, 1))
        update = sent(model, rows, targets, nn.functional.mse_loss)
        found = Screener(model=lambda: model, input_shape=(6,), loss="mse", input_range=(0.0, 5.0))(update)  # noqa: B023
        assert (found.verdict, found.exposures) == ("not shown to leak", ()), found.reason


def test_what_all_of_a_batch_sends_back_alike_proves_no_feature_of_one_example() -> None:
    """A new head that starts at zero, and a client of one class: the layer's update is the mean's, of rank one."""
    model = support.network()
    head = model.get_submodule("6")
    assert isinstance(head, nn.Linear)
    for value in head.parameters():
        value.data.zero_()
    pictures = support.examples(8)[0]
    found = screener(model)(sent(model, pictures, torch.full((8,), 4), nn.functional.cross_entropy))
    assert (found.verdict, kinds(found)) == ("not shown to leak", set()), found.reason


@pytest.mark.parametrize(
    "loss", [nn.functional.cross_entropy, "torch.nn.functional:cross_entropy", lambda a, b: nn.CrossEntropyLoss()(a, b)]
)
def test_a_loss_given_as_a_function_hides_no_batch(loss: Any) -> None:
    model = support.dense_network()
    found = screener(model, loss=loss)(support.recorded(model, 4))
    assert (found.verdict, kinds(found)) == ("leaked", {"images", "labels"}), found.reason


@pytest.mark.parametrize("loss", ["mse", nn.functional.l1_loss])
def test_pictures_that_nobody_can_ask_the_update_for_are_not_called_safe(loss: Any) -> None:
    """Numbers as targets of a batch are told by nothing; what a layer gives away is there all the same."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(196, 96), nn.ReLU(), nn.Linear(96, 3))
    made = nn.functional.mse_loss if loss == "mse" else loss
    update = sent(model, support.examples(3)[0], torch.rand(3, 3, generator=stream(0, "numbers")), made)
    found = screener(model, loss=loss)(update)
    assert (found.verdict, found.must_not_leave, found.exposures) == ("not decided", True, ())
    assert "nothing tells the targets under this loss" in found.reason
    assert found.reason.endswith("(spear)")


def test_batch_norm_that_takes_no_single_example_is_screened_as_stated() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)).train()
    found = screener(model)(support.recorded(model, 4))
    assert found.verdict == "not shown to leak"


def test_a_head_above_frozen_layers_shows_what_it_takes() -> None:
    model = support.network()
    update = support.recorded(model)
    frozen = {name: value if name.startswith("6.") else update.before[name] for name, value in update.after.items()}
    found = screener(model, seconds=2)(replace(update, after=frozen))
    assert found.reason == "what the first fully connected layer takes is recovered: 24 numbers (analytic)"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_model_of_half_precision_confirms_no_picture_that_is_too_dark(kind: torch.dtype) -> None:
    model = support.dense_network()
    update = support.recorded(model)
    after = {
        name: update.before[name] - (1.3 if name.endswith("bias") else 1.0) * (update.before[name] - value)
        for name, value in update.after.items()
    }
    halves = {"before": update.before, "after": after}
    rounded = {half: {name: value.to(kind) for name, value in state.items()} for half, state in halves.items()}
    assert not kinds(screener(copy.deepcopy(model).to(kind), seconds=2)(replace(update, **rounded)))


class Named(nn.Module):
    """A network that returns several things by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = support.dense_network()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"size": x.mean(), "scores": self.inner(x)}


def one_step(model: nn.Module, inputs: Tensor, loss: Callable[[Any], Tensor]) -> RecordedUpdate:
    """An update of one step of SGD on a loss of what the model returns."""
    trained = copy.deepcopy(model)
    loss(trained(inputs)).backward()
    after = {name: (value - 0.1 * value.grad).detach() for name, value in trained.named_parameters()}
    return RecordedUpdate(before=dict(model.state_dict()), after=after, training=support.PLAIN)


def single_output() -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), nn.Linear(24, 1))


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], dict[str, Any]]] = {
    "bce": (
        single_output,
        lambda out: nn.functional.binary_cross_entropy_with_logits(out, torch.ones(1, 1)),
        {"loss": "bce"},
    ),
    "mse": (single_output, lambda out: nn.functional.mse_loss(out, torch.ones(1, 1)), {"loss": {"name": "mse"}}),
    "named": (
        Named,
        lambda out: nn.functional.cross_entropy(out["scores"], torch.tensor([3])),
        {"output": "scores"},
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_outputs_are_stated_as_to_other_audits(kind: str) -> None:
    build, loss, stated = LOSSES[kind]
    model, inputs = build(), support.examples(1)[0]
    update = one_step(model, inputs, loss)
    assert "images" in kinds(screener(model, **stated)(update))
    silent = screener(model)(update)
    assert silent.must_not_leave or kind == "mse"
    assert next(iter(stated)) + "=" in silent.reason
    assert "--" not in silent.reason


def test_a_table_of_numbers_in_a_stated_range_is_an_example() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, 3))
    row = 6 * torch.rand(1, 14, generator=stream(0, "row")) - 3
    update = one_step(model, row, lambda out: nn.functional.cross_entropy(out, torch.tensor([1])))
    stated = {"input_shape": (14,), "input_range": (-3, 3)}
    found = Screener(model=lambda: model, **stated)(update)  # type: ignore[arg-type]
    assert found.reason == "an example is recovered, and the update confirms it (analytic)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "hinge"}, "unknown loss 'hinge'"),
        ({"mean": (0.5,), "input_range": (-1, 1)}, "mean and std .* or input_range, got both"),
        ({"mean": (0.5,), "input_shape": (14,)}, r"with images \(C, H, W\) alone"),
        ({"mean": (0.5, 0.5)}, "mean with a number for each of the 1 channels .*, got 2"),
        ({"mean": (0.5,), "std": (0.1, 0.2, 0.3)}, "std with a number for each of the 1 channels .*, got 3"),
        ({"std": (0.5,), "input_shape": (3, 14, 14)}, "std with a number for each of the 3 channels .*, got 1"),
        ({"input_range": (1, 0)}, r"input_range \(low, high\) with low < high"),
        ({"input_range": (0.5, 0.5)}, r"input_range \(low, high\) with low < high"),
        ({"input_range": ((0, 2), 1)}, r"input_range \(low, high\) with low < high"),
        ({"input_range": ((0, 0), (1, 1, 1))}, "as many least as largest numbers, got 2 and 3"),
        ({"input_range": (0, float("inf"))}, "input_range as finite numbers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Screener(**{"model": support.network, "input_shape": support.SHAPE, **settings})


def test_arrays_of_numpy_are_taken() -> None:
    model = support.dense_network()
    update = support.recorded(model)
    halves = [{name: value.numpy() for name, value in half.items()} for half in (update.before, update.after)]
    halves[0]["1.weight"].setflags(write=False)
    halves[1]["3.weight"] = halves[1]["3.weight"].astype(">f4")
    found = screener(model)(replace(update, before=halves[0], after=halves[1]))
    assert (found.verdict, kinds(found)) == ("leaked", {"images", "labels"})


@pytest.mark.parametrize("half", ["before", "after"])
@pytest.mark.parametrize("value", [[1.0, 2.0], np.array(["a"]), np.array([None]), None])
def test_what_is_neither_tensor_nor_array_of_numbers_is_named(half: str, value: object) -> None:
    update = support.recorded(support.dense_network())
    with pytest.raises(ValueError, match=f"{half} of '3.bias'"):
        replace(update, **{half: {**getattr(update, half), "3.bias": value}})
    with pytest.raises(ValueError, match=f"expected {half} as tensors by their names, got list"):
        replace(update, **{half: [value]})


@pytest.mark.parametrize("build", [support.dense_network, support.network])
def test_a_step_size_that_nobody_stated_takes_nothing_from_what_has_no_size(build: Callable[[], nn.Module]) -> None:
    model = build()
    update = support.recorded(model)
    found = screener(model)(replace(update, training=replace(update.training, lr=None)))
    assert found.verdict == "leaked"
    assert not any("lr" in note for note in found.notes)


def test_what_only_a_step_size_could_confirm_asks_for_it() -> None:
    """Of one layer with two outputs every batch looks like one picture, of some size."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 2))
    inputs = support.examples(1)[0]
    update = one_step(model, inputs, lambda out: nn.functional.cross_entropy(out, torch.tensor([1])))
    assert "images" in kinds(screener(model)(update))
    unknown = screener(model)(replace(update, training=replace(update.training, lr=None)))
    assert not unknown.exposures
    assert "which nobody knows without the step size" in unknown.tried["analytic"]


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        (TrainingFacts(examples=1), "optimizer, steps and lr"),
        (TrainingFacts(examples=1, optimizer="sgd", steps=3), "lr"),
        (TrainingFacts(examples=1, lr=0.1, epochs=2), "optimizer"),
    ],
)
def test_what_is_missing_is_named(facts: TrainingFacts, missing: str) -> None:
    model = support.network()
    found = screener(model, seconds=2)(replace(support.recorded(model, 1, ADAM), training=facts))
    assert any(note.endswith(f"little can be confirmed: say {missing}") for note in found.notes)


def test_running_statistics_are_those_that_were_sent_behind_a_loader_too() -> None:
    """The constants of the loader are buffers of no state: they must not hide those that were sent."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10)).eval()

    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = build().train()
        model(torch.rand(64, 196))  # moves the statistics
    update = one_step(
        model.eval(),
        (support.examples(1)[0] - 0.5) / 0.25,
        lambda out: nn.functional.cross_entropy(out, torch.ones(1, dtype=torch.int64)),
    )
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    update = replace(update, after={**update.after, **buffers})
    found = Screener(model=build, input_shape=support.SHAPE, mean=(0.5,), std=(0.25,), seconds=20)(update)
    assert "images" in kinds(found)


def trained_on(model: nn.Module, inputs: Tensor, lr: float = 0.1) -> dict[str, Tensor]:
    """The weights after one step of SGD on examples of one label."""
    trained = copy.deepcopy(model)
    nn.functional.cross_entropy(trained(inputs), torch.full((len(inputs),), 3)).backward()
    with torch.no_grad():
        for value in trained.parameters():
            value -= lr * value.grad  # type: ignore[operator]
    return {name: value.detach() for name, value in trained.state_dict().items()}


def test_two_pictures_nearly_alike_that_are_stated_as_one_leak_as_their_mean() -> None:
    model, update = support.dense_network(), support.recorded(support.dense_network())
    inputs, _ = support.examples(1)
    pair = torch.cat([inputs, (1.02 * inputs).clamp(0, 1)])
    found = screener(model)(replace(update, after=trained_on(model, pair)))
    assert found.verdict == "leaked"
    assert found.reason.startswith("an image is recovered, and the update bears it out, if not to a quarter of a level")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_mean_of_a_batch_that_rounding_takes_for_one_picture_is_no_leak(kind: torch.dtype) -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.Sigmoid(), nn.Linear(24, 10))
    inputs, _ = support.examples(8)
    lr = {torch.bfloat16: 0.1, torch.float16: 0.01}[kind]
    after = {name: value.to(kind) for name, value in trained_on(model, inputs, lr).items()}
    facts = replace(support.PLAIN, lr=lr, examples=8, batch_size=8)
    found = screener(model)(replace(support.recorded(model), after=after, training=facts))
    assert "images" not in kinds(found)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(
    ("model", "shown"), [(support.dense_network(), "images"), (support.network(), "features")], ids=["dense", "cnn"]
)
def test_weights_in_two_bytes_show_what_their_rounding_bears_out(
    model: nn.Module, shown: str, both: bool, kind: torch.dtype
) -> None:
    inputs, _ = support.examples(1)
    before = {name: value.to(kind) if both else value for name, value in model.state_dict().items()}
    client = copy.deepcopy(model)
    client.load_state_dict({name: value.float() for name, value in before.items()})
    update = replace(support.recorded(model), before=before)
    for factor, found in ((1.0, {shown}), (1.3, set())):  # biases at a step size of their own
        start, end = client.state_dict(), trained_on(client, inputs)
        sizes = {name: factor if name.endswith("bias") else 1.0 for name in end}
        after = {name: (start[name] - sizes[name] * (start[name] - value)).to(kind) for name, value in end.items()}
        screened = screener(model, seconds=2)(replace(update, after=after))
        assert kinds(screened) & {"images", "features"} == found


@pytest.mark.slow
def test_several_steps_on_one_picture_are_followed_back_to_the_first() -> None:
    layers = nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(392, 20), nn.LeakyReLU(0.2)
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(*layers, nn.Linear(20, 10)).eval()
    facts = replace(support.PLAIN, steps=2, lr=0.05)
    found = screener(model, seconds=60)(support.recorded(model, 1, facts))
    assert "images" in kinds(found)
    assert found.reason.endswith("(first-step+cascade)")
    many = screener(model, seconds=60)(support.recorded(model, 1, replace(facts, steps=6)))
    assert "first-step+cascade" not in many.tried


@pytest.mark.parametrize("head", [True, False])
def test_a_first_layer_without_a_bias_hides_nothing(head: bool) -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        layers = nn.Linear(196, 24, bias=False), nn.ReLU(), nn.Linear(24, 10, bias=head)
        model = nn.Sequential(nn.Flatten(), *layers).eval()
    found = screener(model)(support.recorded(model))
    assert kinds(found) == {"images", "labels"}


def without_head(update: RecordedUpdate, *, sent: bool) -> RecordedUpdate:
    """An update whose client keeps its last layer to itself, of weights that the server sent or has never seen."""
    part = {name: value for name, value in update.after.items() if not name.startswith(("3.", "6."))}
    before = update.before if sent else {name: update.before[name] for name in part}
    return replace(update, before=before, after=part)


@pytest.mark.parametrize("build", [support.dense_network, support.network])
def test_a_head_that_a_client_keeps_hides_nothing_of_the_layers_below(build: Callable[[], nn.Module]) -> None:
    model, other = build(), build()
    for value in other.parameters():
        nn.init.normal_(value, std=0.1, generator=stream(0, "other"))
    for sent in (True, False):
        found = screener(other, seconds=2)(without_head(support.recorded(model), sent=sent))
        assert found.verdict == "leaked", found
        assert ("up to a factor" in found.reason) != sent  # whose weights above confirm it
    several = screener(other, seconds=2)(without_head(support.recorded(model, 4), sent=False))
    assert not several.exposures


def test_updates_that_are_none_are_named() -> None:
    model, update = support.dense_network(), support.recorded(support.dense_network())
    codes = {name: (100 * value).to(torch.int8) for name, value in update.after.items()}
    total = {name: 3 * value for name, value in update.after.items()}
    for odd, words in (
        (replace(update, before={}), "expected the weights before training, got none"),
        (replace(update, after={}), "the client sent no update"),
        (replace(update, after=codes), "expected floating-point numbers in what came back, got int8"),
        (replace(update, after=total), "times what was sent (cosine 0.999), as of a sum over clients"),
    ):
        found = screener(model)(odd)
        assert found.verdict == "failed"
        assert words in found.reason


def test_names_of_a_wrapped_model_fit_behind_a_loader() -> None:
    model = support.dense_network()
    update = support.recorded(nn.Sequential(_Loader(), *model))
    bare = {half: _without_loader(getattr(update, half)) for half in ("before", "after")}
    wrapped = {half: {f"module.{name}": value for name, value in bare[half].items()} for half in bare}
    found = screener(model, mean=(0.5,), std=(0.25,))(replace(update, **wrapped))
    assert "images" in kinds(found)


def test_statistics_alone_are_no_update() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(576, 10))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moved = {name: value + 1 for name, value in state.items() if "running" in name}
    found = screener(model)(RecordedUpdate(before=state, after=moved, training=support.PLAIN))
    assert found.verdict == "failed"
    assert "expected weights that the model trains in what came back, got '1.running_mean'" in found.reason
