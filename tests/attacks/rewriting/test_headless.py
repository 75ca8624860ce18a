"""Cutting the classifier off: the true image explains what is left of the update, whatever the label."""

from dataclasses import replace

import pytest
import torch
from support import chains, worlds
from support.compare import assert_near
from support.loud import Loud
from torch import nn

from attacks import NotApplicable, Reconstruction
from attacks.base import build
from attacks.rewriting.headless import Headless
from attacks.update.view_below_classifier import LAYER_SIGNAL, LayerSignal, truncate_at
from fl.capture import from_update
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.gradient import func_derivative
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Candidate, Task, Truth
from fl.view import ServerView

STEP = FedAvg(lr=0.1, steps=1, weight_decay=1e-2, momentum=0.5)
GENERATED = HyperFL(steps=1, batch_size=None, parametrization=Hypernetwork(embedding=8, hidden=16, init="scaled"))


def victim(method: Method, n: int = 1, task: Task | None = None) -> tuple[ServerView, Truth]:
    data = worlds.images(n, "victim")
    return Federation(Client(task or worlds.task(), method), [ClientData(data, data)]).observe(0)


def cut(view: ServerView) -> ServerView:
    rewritten = Headless().rewrite(view)
    assert isinstance(rewritten, ServerView)
    return rewritten


def truth_without_label(truth: Truth) -> Candidate:
    return Candidate(truth.inputs, torch.zeros(1, dtype=torch.int64))


def cosine(x: dict, y: dict) -> float:  # type: ignore[type-arg]
    mine, theirs = (torch.cat([dense(z[n]).detach().flatten() for n in y]) for z in (x, y))
    return float(nn.functional.cosine_similarity(mine, theirs, dim=0))


@pytest.mark.parametrize("method", [STEP, FedPer(lr=0.1, steps=1)], ids=["shared head", "private head"])
def test_the_true_image_gives_the_update_to_the_last_bits(method: Method) -> None:
    view, truth = victim(method)
    rewritten = cut(view)
    assert not rewritten.private
    assert isinstance(rewritten.method, LayerSignal)
    assert not any(name.startswith("head.") for name in {**rewritten.shared, **rewritten.update})
    for derivative in (func_derivative, None):
        extra = {} if derivative is None else {"derivative": derivative}
        assert_near(predict(rewritten, truth_without_label(truth), **extra), rewritten.update, 1e-11)


def test_clipping_leaves_the_direction() -> None:
    view, truth = victim(replace(STEP, max_norm=1e-2, weight_decay=0.0))
    rewritten = cut(view)
    predicted = predict(rewritten, truth_without_label(truth))
    assert cosine(predicted, rewritten.update) > 1 - 1e-12


def test_another_image_does_not_explain_it() -> None:
    view, truth = victim(STEP)
    other = replace(truth_without_label(truth), inputs=1 - truth.inputs)
    assert cosine(predict(cut(view), other), cut(view).update) < 0.99


def test_the_prediction_does_not_look_at_labels_and_stacks() -> None:
    view, truth = victim(STEP)
    rewritten = cut(view)

    def predicted(inputs: torch.Tensor, label: int) -> torch.Tensor:
        guess = Candidate(inputs, torch.full((1,), label))
        return dense(predict(rewritten, guess, derivative=func_derivative)["body.conv1.weight"])

    images = torch.stack([truth.inputs, truth.inputs * 0.5])
    stacked = torch.func.vmap(lambda image: predicted(image, 2))(images)
    single = torch.stack([predicted(image, 0) for image in images])
    assert (stacked - single).abs().max() < 1e-14


def test_the_layers_input_is_read_off() -> None:
    view, truth = victim(STEP)
    found = Headless()(view)
    assert isinstance(found, Reconstruction)
    body = view.task.model.get_submodule("body")
    x = truth.inputs
    with torch.no_grad():
        for name, module in body.named_children():
            if name == "fc1":
                break
            x = module(x)
    assert (dense(found.private["features"]) - x[0]).abs().max() < 1e-11
    assert torch.equal(dense(cut(view).received[LAYER_SIGNAL]["features"]), dense(found.private["features"]))


@pytest.mark.parametrize("method", [GENERATED, replace(GENERATED, head_epochs=0, max_norm=0.05)])
def test_after_a_peel_neither_classifier_nor_label_is_needed(method: HyperFL) -> None:
    view, truth = victim(method)
    peeled = build("peel")
    rewritten = peeled.rewrite(view)  # type: ignore[attr-defined]
    assert isinstance(rewritten.method, LayerSignal)
    assert cosine(predict(rewritten, truth_without_label(truth)), rewritten.update) > 1 - 1e-12


def test_chained_it_searches_for_the_image_alone() -> None:
    view, _ = victim(FedPer(lr=0.1, steps=1))
    found = build({"name": "headless+ig", "iterations": 5})(view, seed=1)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.labels is None
    assert set(found.private) == {"features"}


def test_the_tapped_model_keeps_names_and_leaves_the_original_alone() -> None:
    model = worlds.task().model
    before = [name for name, _ in model.named_parameters()]
    x = worlds.images(2, "tap").inputs
    expected = model(x)
    short = truncate_at(model, "body.fc1", "head.")
    assert [n for n, _ in short.named_parameters()] == [n for n in before if not n.startswith("head.")]
    assert short(x).shape == (2, 16)
    assert torch.equal(model(x), expected)


class Late(nn.Module):
    """A scale between the last linear layer and the classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body, self.head = model.body, model.head
        self.scale = nn.Parameter(torch.full((16,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) * self.scale)


def test_what_lies_above_the_layer_is_left_out() -> None:
    task = worlds.task()
    view, truth = victim(STEP, task=replace(task, model=Late(task.model)))
    rewritten = cut(view)
    assert "scale" not in rewritten.update
    assert_near(predict(rewritten, truth_without_label(truth)), rewritten.update, 1e-11)


def test_a_known_defense_is_counted_once() -> None:
    data = worlds.images(1, "victim")
    run = Federation(Client(worlds.task(), STEP, Loud()), [ClientData(data, data)])
    view, truth = run.observe(0)
    rewritten = cut(view)
    assert_near(predict(rewritten, truth_without_label(truth)), rewritten.update, 1e-11)


@pytest.mark.parametrize(
    ("method", "n", "reason"),
    [
        (STEP, 2, "batch of one"),
        (replace(STEP, steps=2), 1, "one local step"),
        (GENERATED, 1, "peel it first"),
    ],
)
def test_headless_says_why_it_does_not_apply(method: Method, n: int, reason: str) -> None:
    answer = Headless()(victim(method, n)[0])
    assert isinstance(answer, NotApplicable)
    assert reason in answer.reason


def test_a_network_without_a_linear_layer_below_the_head_is_told() -> None:
    flat = worlds.build("linear", num_classes=3).to(dtype=torch.float64)
    answer = Headless()(victim(STEP, task=flat)[0])
    assert isinstance(answer, NotApplicable)
    assert "no linear layer" in answer.reason


def test_an_unknown_schedule_and_a_silent_layer_are_told() -> None:
    view, _ = victim(STEP)
    unknown = Headless()(replace(view, schedule=None))
    assert isinstance(unknown, NotApplicable)
    assert "unknown" in unknown.reason
    share = 0.1 * 1e-2
    silent = {n: dense(view.shared[n]) * share for n in view.update}
    answer = Headless()(replace(view, update=silent))
    assert isinstance(answer, NotApplicable)
    assert "signal" in answer.reason


def test_an_update_that_overflowed_is_told() -> None:
    view, _ = victim(STEP)
    bias = dense(view.update["head.bias"])
    answer = Headless()(replace(view, update={**view.update, "head.bias": torch.full_like(bias, torch.inf)}))
    assert isinstance(answer, NotApplicable)
    assert "not finite" in answer.reason


def test_signs_alone_are_refused() -> None:
    view, _ = victim(STEP)
    signs = {name: dense(value).sign() * 0.01 for name, value in view.update.items()}
    result = Headless().rewrite(replace(view, update=signs))
    assert isinstance(result, NotApplicable)
    assert "signs" in result.reason


def test_inputs_of_the_first_layer_that_are_no_image_are_handed_out_and_not_taken_for_those_of_the_last() -> None:
    layers = nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 10)
    model = chains.initialized(nn.Sequential(nn.Flatten(), *layers)).float()
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "image"))
    normalized = (image - 0.3) / 0.2
    torch.nn.functional.cross_entropy(model(normalized), torch.tensor([3])).backward()
    update = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    view = from_update(model, update, input_shape=(1, 8, 8), num_classes=10, batch_size=1, kind="gradient")
    found = build("headless+analytic")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is None
    torch.testing.assert_close(dense(found.private["features"]).reshape(1, 1, 8, 8), normalized, rtol=1e-4, atol=1e-4)
    assert found.verified  # of these inputs: one step on them makes the update
