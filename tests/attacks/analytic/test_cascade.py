"""Exact inversion, layer by layer: images come back to rounding, and the attack knows when they did not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import chains
from support.brief import brief_picture_searches
from support.cover import pairwise
from support.pictures import LEAKY, POOLED, STEP, attack, error, network, photograph, victim
from torch import nn

import fl.models
from attacks import NotApplicable, Reconstruction
from attacks.analytic import cascade
from attacks.analytic.backsolve import Backsolve
from attacks.analytic.cascade import Cascade
from defenses.clip import Clip
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ThreatModel

GENERATED = HyperFL(
    lr=0.1, steps=1, batch_size=None, head_epochs=0, parametrization=Hypernetwork(embedding=8, hidden=16, init="scaled")
)
CHAINS = {
    "max pooling": POOLED,
    "activation first": (nn.Conv2d(1, 12, 3, padding=1), LEAKY, nn.MaxPool2d(2)),
    "no pooling": (nn.Conv2d(1, 4, 3, padding=1), LEAKY),
    "strides": (nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.Tanh()),
    "two strides": (
        *(nn.Conv2d(1, 12, 4, stride=2), LEAKY),
        *(nn.Conv2d(12, 16, 4, stride=2), LEAKY),
    ),
    "average pooling": (nn.Conv2d(1, 12, 5, padding=2), nn.AvgPool2d(2), LEAKY),
    "overlapping pooling": (nn.Conv2d(1, 20, 5, padding=2), nn.MaxPool2d(3, 2), LEAKY),
    "overlapping pooling, relu first": (nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
    "overlapping averages": (nn.Conv2d(1, 12, 5, padding=2), nn.AvgPool2d(3, 2), LEAKY),
    "batch norm": (nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.MaxPool2d(2), LEAKY),
    "relu": (nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    "softplus": (nn.Conv2d(1, 12, 3, padding=1), nn.Softplus(), nn.MaxPool2d(2)),
    "elu": (nn.Conv2d(1, 12, 3, padding=1), nn.MaxPool2d(2), nn.ELU(0.7)),
    "hardsigmoid": (nn.Conv2d(1, 24, 3, padding=1), nn.Hardsigmoid()),
    "two convolutions": (
        *(nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2), LEAKY),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.MaxPool2d(2), LEAKY),
    ),
    "two convolutions, activation first": (
        *(nn.Conv2d(1, 8, 3, padding=1), LEAKY, nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), LEAKY, nn.MaxPool2d(2)),
    ),
    "two convolutions, relu first": (
        *(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    ),
    "two linear layers": (
        *(nn.Conv2d(1, 12, 3, padding=1), nn.MaxPool2d(2), LEAKY, nn.Flatten()),
        *(nn.Linear(588, 20), LEAKY),
    ),
    "no convolution": (nn.Flatten(), nn.Linear(196, 20), LEAKY),
}


@pytest.fixture
def _brief_searches() -> Iterator[None]:
    """Where a chain can't be undone, `backsolve` searches for the picture: `test_backsolve` is of that."""
    with brief_picture_searches():
        yield


@pytest.mark.parametrize("chain", list(CHAINS))
def test_the_image_comes_back_to_rounding(chain: str) -> None:
    method = replace(STEP, train_mode=False) if any(isinstance(m, nn.BatchNorm2d) for m in CHAINS[chain]) else STEP
    image = photograph(14)
    result = attack(victim(network(*CHAINS[chain]), image, method))
    assert result.verified
    assert error(result, image) < 1e-5


def test_what_no_layer_sees_is_not_said_to_be_known() -> None:
    """A second convolution without padding and its pooling see six of the seven rows and columns of the first's."""
    first = (nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    task = network(*first, nn.Conv2d(24, 32, 3), nn.ReLU(), nn.MaxPool2d(2))
    image = photograph(14)
    result = attack(victim(task, image))
    assert result.inputs is not None
    assert result.fixed is not None
    assert not result.verified
    seen = torch.zeros(14, 14, dtype=torch.bool)
    seen[:13, :13] = True
    assert torch.equal(result.fixed[0, 0], seen)
    assert float((result.inputs - image)[0, 0][seen].abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["cascade", "peel+cascade"])
def test_the_papers_network_in_single_precision(name: str) -> None:
    image = photograph(28)
    task = fl.models.build("hyperfl-grey", num_classes=10, seed=0)
    result = attack(victim(task, image, STEP if name == "cascade" else GENERATED), name)
    assert result.inputs is not None
    exact = (result.inputs.double() - image).abs() < 1 / 510  # the same once rounded to 8 bits
    assert exact.double().mean() > 0.99  # pooling never looked at some pixels of the border
    assert bool(exact.all()) or not result.verified
    assert all(float(value.max()) < 1e-4 for n, value in result.private.items() if n.startswith("residual/"))  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_where_nothing_is_pooled_single_precision_suffices(size: int) -> None:
    """Three strided convolutions with sigmoids: each layer's rounding is magnified by the one below."""
    image = photograph(size, channels=3)
    task = fl.models.build("lenet-zhu", num_classes=10, seed=1, input_shape=(3, size, size))
    result = attack(victim(task, image))
    assert result.verified
    assert error(result, image) < 0.05 / 255


@pytest.mark.usefixtures("_brief_searches")
@pairwise(seed=range(3), filters=(1, 2, 4), act=(nn.LeakyReLU(0.1), LEAKY, nn.ReLU(), nn.Sigmoid()))
def test_an_objective_is_small_only_where_the_picture_explains_the_update(
    seed: int, filters: int, act: nn.Module
) -> None:
    """Without biases nothing but the image makes an output, so that what is lost above leaves nothing below."""
    image = photograph(8)
    task = network(nn.Conv2d(1, 8, 3, 2, 1), act, nn.Conv2d(8, filters, 3, 1, 1), act, size=8, seed=seed)
    for name, value in task.model.named_parameters():
        if name in {"body.0.bias", "body.2.bias"}:
            value.data.zero_()
    result = attack(victim(Task(task.model, task.input_shape, 3, "head.", task.mean, task.std), image))
    if result.verified:
        assert error(result, image) < 1e-6
    elif error(result, image) > 0.1:
        assert result.objective > 1e-3, result.note
        assert "unexplained" in result.note


@pytest.mark.usefixtures("_brief_searches")
@pytest.mark.parametrize("act", [LEAKY, nn.ReLU(), nn.Sigmoid()])
@pytest.mark.parametrize("filters", [1, 2, 8])
def test_a_layer_whose_equations_are_too_few_is_told_by_name(filters: int, act: nn.Module) -> None:
    """One or two filters say too little of 392 numbers, eight are enough; what is above says little of the rest."""
    image = photograph(14)
    chain = (nn.Conv2d(1, 8, 3, stride=2, padding=1), act, nn.Conv2d(8, filters, 3, padding=1), act)
    result = attack(victim(network(*chain), image))
    assert bool(result.verified) is (filters == 8)
    assert math.isfinite(result.objective)
    if filters == 8:
        assert error(result, image) < 1e-9
    else:
        assert result.objective > 1e-3
        assert "body.0: " in result.note
        assert "inf " not in result.note


def test_the_label_and_the_classifier_are_not_needed() -> None:
    view = victim(network(*CHAINS["max pooling"]), photograph(14))
    bare = {n: v for n, v in view.update.items() if not n.startswith("head.")}
    found, full = attack(replace(view, update=bare)), attack(view)
    assert torch.equal(found.inputs, full.inputs)  # type: ignore[arg-type]


def test_a_wrong_gradient_is_never_verified() -> None:
    image = photograph(14)
    task = network(*CHAINS["max pooling"])
    view, other = victim(task, image), victim(task, 1 - image)
    mixed = {n: v if "0" not in n else other.update[n] for n, v in view.update.items()}
    assert attack(replace(view, update=mixed)).verified is False


def test_noise_is_not_called_rounding() -> None:
    image = photograph(14)
    view = victim(network(*CHAINS["max pooling"]), image)
    draw = stream(0, "noise")
    noisy = {
        n: v + 0.05 * v.square().mean().sqrt() * torch.randn(v.shape, generator=draw, dtype=v.dtype)  # type: ignore[union-attr]
        for n, v in view.update.items()
    }
    assert attack(replace(view, update=noisy)).verified is False


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        ((nn.Conv2d(1, 8, 3, padding=1, dilation=2), nn.MaxPool2d(3), LEAKY), "dilated"),
        ((nn.Conv2d(1, 8, 3), nn.MaxPool2d(3, 2, padding=1), LEAKY), "can't be undone"),
    ],
)
@pytest.mark.parametrize("searched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_it_cannot_undo_is_refused(
    chain: tuple[nn.Module, ...], reason: str, searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not searched:  # seconds of it lead to a picture that explains as little
        gray = Reconstruction(inputs=torch.full((1, 1, 14, 14), 0.5), verified=False)
        monkeypatch.setattr(Backsolve, "attack_view", lambda *_: gray)
    result = Cascade()(victim(network(*chain), photograph(14)))
    assert isinstance(result, NotApplicable)
    assert reason in result.reason
    assert "of all equations together is left unexplained" in result.reason


@pytest.mark.usefixtures("_brief_searches")
def test_a_picture_that_explains_most_is_returned_without_a_claim() -> None:
    image = photograph(14)
    result = Cascade()(victim(network(nn.Conv2d(1, 8, 3), nn.LeakyReLU(0.01), nn.AvgPool2d(2)), image))
    assert isinstance(result, Reconstruction)
    assert not result.verified
    (left,) = re.findall(r"(\S+) of all equations together is left unexplained", result.note)
    assert 0.05 < float(left) < 0.2
    assert float((result.inputs - image).square().mean()) < 10**-2.3  # type: ignore[operator]


def test_copies_come_back_and_several_steps_are_refused() -> None:
    task = network(*CHAINS["max pooling"])
    for method, count in ((STEP, 2), (replace(STEP, steps=2), 1)):
        batch = Batch(photograph(14).repeat(count, 1, 1, 1), torch.arange(count))
        view = Federation(Client(task, method), [ClientData(batch, batch)]).observe(0)[0]
        result = Cascade()(view)
        assert isinstance(result, NotApplicable) is (method is not STEP)
        if isinstance(result, Reconstruction):
            assert result.inputs is not None
            assert len(result.inputs) == count
            assert float((result.inputs - batch.inputs).square().mean()) < 1e-3


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_lengths_clipped_apart_are_never_verified(deep: bool, known: bool) -> None:
    top = [nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 4)] if deep else [nn.Linear(128, 4)]
    model = chains.initialized(nn.Sequential(nn.Flatten(), *top))
    for defense, right in (
        (Clip(max_norm=0.05, scope="tensor"), False),
        (Defense(), known),
    ):  # it starts at the lowest bias
        view, truth = chains.seen(model, defense=defense, threat=ThreatModel(knows_defense=known))
        result = Cascade()(view)
        assert isinstance(result, Reconstruction) or (known and "ratio" in result.reason)
        assert bool(isinstance(result, Reconstruction) and result.verified) == right
        if right:
            assert isinstance(result, Reconstruction)
            assert result.inputs is not None
            assert torch.allclose(result.inputs, truth.inputs, atol=1e-6)


def test_a_bias_whose_update_is_lost_to_rounding_is_no_signal() -> None:
    task = network(nn.Flatten(), nn.Linear(196, 20, bias=False), LEAKY).to(dtype=torch.float32)
    with torch.no_grad():
        task.model.get_parameter("body.4.bias").fill_(100.0)
        head = task.model.get_parameter("head.weight")
        head.sub_(head.mean(1, keepdim=True))  # so that the large features alone decide nothing
    view = victim(task, photograph(14), replace(STEP, lr=1e-6))
    assert not bool(view.update["body.4.bias"].any())  # type: ignore[union-attr]
    assert bool(view.update["body.4.weight"].any())  # type: ignore[union-attr]
    result = Cascade()(view)
    assert isinstance(result, NotApplicable)
    assert "bias of body.4 did not move" in result.reason


def test_an_update_without_a_gradient_says_so() -> None:
    view = victim(network(*CHAINS["max pooling"]), photograph(14))
    result = Cascade()(replace(view, update={n: torch.zeros(v.shape).double() for n, v in view.update.items()}))
    assert isinstance(result, NotApplicable)
    assert "no gradient reached it" in result.reason


@pytest.mark.parametrize("name", ["body.0.weight", "body.0.bias", "body.1.weight", "body.5.weight"])
def test_a_model_of_numbers_that_are_not_finite_is_refused(name: str) -> None:
    view = victim(network(*CHAINS["batch norm"]), photograph(14), replace(STEP, train_mode=False))
    broken = view.shared[name].clone()  # type: ignore[union-attr]
    broken.view(-1)[0] = float("nan")
    result = Cascade()(replace(view, shared={**view.shared, name: broken}))
    assert isinstance(result, NotApplicable)
    assert "the model has numbers at body." in result.reason


def test_what_is_solved_as_a_graph_is_finished_by_all_equations_together() -> None:
    image = (photograph(14) * 255).round() / 255
    result = attack(victim(network(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AvgPool2d(2)), image))
    assert not result.note
    assert error(result, image) < 1e-6


def test_a_result_that_explains_nothing_has_a_note() -> None:
    """Nine tenths of the update are pruned: all that is left counts as noise, and every layer below as satisfied."""
    view = victim(network(*CHAINS["max pooling"]), photograph(14))
    kept = {n: torch.where(v.abs() >= v.abs().quantile(0.9), v, 0.0) for n, v in view.update.items()}  # type: ignore[union-attr]
    result = attack(replace(view, update=kept))
    assert not result.verified
    assert "body.4: its gradient explained up to" in result.note


def test_a_picture_beyond_its_range_has_a_note() -> None:
    view = victim(network(nn.Flatten(), nn.Linear(196, 20), LEAKY), 3 * photograph(14))
    result = attack(view)
    assert not result.verified
    assert result.note.startswith(
        "the picture came out beyond [0, 1] and was cut off there: a loader may normalize pixels, which the model then"
    )


@pytest.mark.parametrize(("device", "place"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "cpu")])
def test_it_solves_where_the_view_is_unless_there_is_no_double_precision(device: str, place: str) -> None:
    view = SimpleNamespace(device=torch.device(device))
    assert cascade._solving_device(view) == torch.device(place)  # type: ignore[arg-type]
