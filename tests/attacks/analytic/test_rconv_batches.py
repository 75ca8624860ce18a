"""R-CONV of a batch: images are told apart at the classifier or below it, and inverted together."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from support import chains
from torch import Tensor, nn
from torch.nn import functional

from attacks import NotApplicable, Reconstruction
from attacks.analytic.rconv import RConv
from attacks.analytic.recursive.softmax_separation import (
    ClassifierGradient,
    is_underdetermined,
    label_candidates,
    separate_by_softmax,
)
from attacks.analytic.rgap import RGAP
from defenses import defenses
from defenses.mixup import Mixup
from fl.capture import from_batch
from fl.defense import Defense
from fl.seeds import stream
from fl.tensors import scale_tensors
from fl.types import Truth
from fl.view import ServerView, ThreatModel

CLASSES = 8


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.01)


def seen(model: nn.Module, labels: list[int], *, seed: int = 0, **settings: Any) -> tuple[ServerView, Truth]:
    """What the server sees of one step of `model` on a batch of noise."""
    draw = stream(seed, "batch")
    images = torch.rand(len(labels), 2, 8, 8, generator=draw, dtype=torch.float64)
    return from_batch(model, images.to(next(model.parameters()).dtype), torch.tensor(labels), **settings)


def chain(act: Callable[[], nn.Module], channels: tuple[int, int] = (24, 24), *, bias: bool = True) -> nn.Module:
    return chains.chain(act, channels, CLASSES, bias=bias)


def attack(view: ServerView) -> Reconstruction:
    result = RConv()(view)
    assert isinstance(result, Reconstruction), result
    return result


def matched(result: Reconstruction, truth: Truth) -> tuple[float, list[int]]:
    """How far the worst pixel is off, and which true image each found one is."""
    assert result.inputs is not None
    apart = (result.inputs[:, None] - truth.inputs[None]).abs().flatten(2).amax(2)
    which = apart.argmin(1)
    assert sorted(which.tolist()) == list(range(len(which)))  # each image once
    return float(apart.amin(1).max()), which.tolist()


# ---- told apart by the loss ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("act", [nn.ReLU, leaky, nn.Sigmoid, nn.Tanh])
@pytest.mark.parametrize("labels", [[1, 5], [2, 6, 0], [3, 3, 4]], ids=["two", "three", "two alike"])
def test_a_double_precision_update_gives_all_images_and_whose_label_is_whose(
    act: Callable[[], nn.Module], labels: list[int]
) -> None:
    view, truth = seen(chain(act), labels)
    result = attack(view)
    off, which = matched(result, truth)
    assert off < 1e-8
    assert result.verified
    assert result.labels is not None
    assert result.labels.tolist() == [labels[i] for i in which]
    assert result.knowledge == ()


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_exact_or_not_verified(seed: int) -> None:
    model = chains.initialized(chain(nn.ReLU), seed)
    view, truth = seen(model.float(), [seed, 7, 7], seed=seed)
    result = attack(view)
    if result.verified:
        assert matched(result, truth)[0] < 0.5 / 255


def test_hidden_linear_layers_and_networks_without_biases_are_undone() -> None:
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(128, 40), nn.Sigmoid(), nn.Linear(40, CLASSES))
    for model in (chains.initialized(hidden), chain(nn.Tanh, bias=False)):
        view, truth = seen(model, [0, 4, 4])
        result = attack(view)
        assert matched(result, truth)[0] < 1e-8
        assert result.verified


def test_unknowns_of_all_images_are_counted_and_gradient_equations_stay_as_many() -> None:
    for count, enough in ((1, True), (3, False)):  # 5 filters of 16 taps for 64 numbers a channel of each image
        view, _ = seen(chain(nn.ReLU, (5, 24)), [1, 3, 5][:count])
        result = attack(view)
        unknowns, _, rank = result.private["rank/0"].tolist()  # type: ignore[union-attr]
        assert unknowns == 128 * count
        assert (rank == unknowns) == enough
        assert bool(result.verified) == enough


def test_weight_equations_of_each_image_help_where_gradients_are_too_few() -> None:
    view, truth = seen(chain(leaky, (6, 24)), [1, 3])  # 96 equations for the 128 unknowns of a channel
    result = attack(view)
    unknowns, gradient, rank = result.private["rank/0"].tolist()  # type: ignore[union-attr]
    assert gradient < unknowns == rank
    assert matched(result, truth)[0] < 1e-8
    assert result.verified


def test_known_labels_are_used_and_listed() -> None:
    view, truth = seen(chain(nn.Tanh), [6, 2])
    result = attack(replace(view, labels=torch.tensor([2, 6])))
    off, which = matched(result, truth)
    assert off < 1e-8
    assert result.labels is not None
    assert result.labels.tolist() == [[6, 2][i] for i in which]
    assert result.knowledge == ("labels",)
    assert isinstance(RConv()(replace(view, labels=torch.tensor([2, 5]))), NotApplicable)


def test_known_labels_may_be_probabilities_as_of_blended_images() -> None:
    view, truth = seen(chain(nn.Tanh), [6, 2], defense=Mixup(alpha=1.0), threat=ThreatModel(knows_labels=True))
    assert view.labels is not None
    assert view.labels.ndim == 2
    result = attack(view)
    off, which = matched(result, truth)
    assert off < 1e-8
    assert result.verified
    assert result.labels is not None
    assert torch.equal(result.labels, truth.labels[which])
    wrong = RConv()(replace(view, labels=view.labels.flip(1)))
    assert isinstance(wrong, NotApplicable)
    assert "of the labels known" in wrong.reason


@pytest.mark.parametrize("layer", [0, 5], ids=["convolution", "classifier"])
def test_a_frozen_bias_is_known_although_it_is_not_sent(layer: int) -> None:
    for labels in ([6, 2], [6]):
        if layer == 5 and len(labels) == 1:
            continue  # one image is told by the bias's gradient
        model = chain(nn.Tanh)
        model[layer].bias.requires_grad_(False)  # type: ignore[index]
        view, truth = seen(model, labels)
        result = attack(view)
        assert matched(result, truth)[0] < 1e-8
        assert result.verified


# ---- told apart by the bend of an activation -------------------------------------------------------------------------
def test_behind_an_unknown_classifier_the_bend_of_a_relu_tells_images_apart() -> None:
    layers = list(chain(nn.ReLU))[:-1]
    model = chains.initialized(nn.Sequential(*layers, nn.Linear(384, 40), nn.ReLU(), nn.Linear(40, CLASSES)))
    view, truth = seen(model, [1, 5])
    shared = {n: v for n, v in view.shared.items() if not n.startswith("7.")}
    update = {n: v for n, v in view.update.items() if not n.startswith("7.")}
    private = frozenset({"7.weight", "7.bias"})
    result = RConv()(replace(view, shared=shared, update=update, private=private))
    assert isinstance(result, Reconstruction), result
    assert matched(result, truth)[0] < 1e-5
    assert result.verified
    assert result.labels is None


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_what_tells_no_images_apart_is_refused() -> None:
    few_classes = chains.chain(nn.Sigmoid, (24, 24), 3)
    result = RConv()(seen(few_classes, [0, 1, 2])[0])
    assert isinstance(result, NotApplicable)
    assert "3 classes are too few" in result.reason
    assert "bend" in result.reason
    twice = seen(chain(nn.Sigmoid), [1, 1])[1].inputs[:1].repeat(2, 1, 1, 1)
    view, _ = from_batch(chain(nn.Sigmoid), twice, torch.tensor([1, 1]))
    assert isinstance(RConv()(view), NotApplicable)  # one image twice: of rank one


@pytest.mark.parametrize("size", [1e90, 1e300])
def test_numbers_too_large_for_a_gradient_of_images_are_refused(size: float) -> None:
    view, _ = seen(chain(nn.Tanh), [1, 5])
    assert isinstance(RConv()(replace(view, update=scale_tensors(view.update, size))), NotApplicable)


def test_a_network_with_numbers_that_are_none_is_refused() -> None:
    view, _ = seen(chain(nn.Tanh), [1, 5])
    bias = torch.full_like(view.task.parameters["5.bias"], float("nan"))
    assert isinstance(RConv()(replace(view, shared={**view.shared, "5.bias": bias})), NotApplicable)


def test_rgap_still_takes_one_image() -> None:
    result = RGAP()(seen(chain(nn.Tanh), [1, 2])[0])
    assert isinstance(result, NotApplicable)
    assert "batch of one" in result.reason


def test_an_update_of_turned_sign_gets_no_labels() -> None:
    view, truth = seen(chain(nn.ReLU), [1, 5])
    result = RConv()(replace(view, update={n: -v for n, v in view.update.items()}))  # type: ignore[operator]
    assert isinstance(result, Reconstruction)
    assert matched(result, truth)[0] < 1e-5
    assert result.labels is None
    assert "turned" in result.note


@pytest.mark.parametrize("defense", [pytest.param(d, id=n) for n, d in defenses.examples() if d.group_size == 1])
def test_under_every_defense_it_answers_and_claims_nothing_false(defense: Defense) -> None:
    view, truth = seen(chain(leaky), [1, 5], defense=defense)
    result = RConv()(view)
    if isinstance(result, NotApplicable):
        assert result.reason
        return
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.inputs.isfinite().all()
    assert not result.verified or matched(result, truth)[0] < 0.05


def test_noise_that_mixes_images_into_one_is_refused() -> None:
    noisy = dict(defenses.examples())["chain"]
    assert isinstance(RConv()(seen(chain(nn.ReLU), [1, 4, 0], seed=3, defense=noisy)[0]), NotApplicable)


# ---- the loss's equations --------------------------------------------------------------------------------------------
def classified(
    labels: Tensor, inputs: Tensor, classes: int = 10, *, bias: bool = True
) -> tuple[ClassifierGradient, Tensor]:
    """What the gradient of a random classifier says of inputs (B, d), and the signals."""
    draw = stream(0, "classified")
    weight = torch.randn(classes, inputs.shape[1], generator=draw, dtype=torch.float64) / inputs.shape[1] ** 0.5
    offset = torch.randn(classes, generator=draw, dtype=torch.float64)
    signals = (inputs @ weight.mT + offset).softmax(-1) - functional.one_hot(labels, classes)
    signals = signals / len(labels)
    return ClassifierGradient(weight, offset, signals.mT @ inputs, signals.sum(0) if bias else None), signals


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1.0, 5.0])
def test_the_loss_tells_four_images_apart(bias: bool, size: float) -> None:
    labels = torch.tensor([3, 0, 9, 3])
    inputs = size * torch.randn(4, 30, generator=stream(0, "in"), dtype=torch.float64)
    known, signals = classified(labels, inputs, bias=bias)
    told = separate_by_softmax(known, [torch.tensor([0, 0, 3, 9]), torch.tensor([9, 3, 3, 0])])  # the first are wrong
    assert told is not None
    found, classes = told
    which = torch.cdist(found.inputs, inputs).argmin(1)
    assert sorted(which.tolist()) == [0, 1, 2, 3]
    assert torch.allclose(found.inputs, inputs[which], rtol=0, atol=1e-6 * size)
    assert torch.allclose(found.signals, signals[which], rtol=0, atol=1e-8)
    assert classes.tolist() == labels[which].tolist()


def test_no_wrong_labels_explain_a_gradient() -> None:
    inputs = torch.randn(2, 30, generator=stream(1, "in"), dtype=torch.float64)
    known, _ = classified(torch.tensor([1, 4]), inputs)
    assert separate_by_softmax(known, [torch.tensor([1, k]) for k in (0, 1, 2, 3)]) is None


def test_equations_are_counted() -> None:
    assert is_underdetermined(2, 2, bias=True)
    assert not is_underdetermined(3, 2, bias=True)
    assert is_underdetermined(3, 2, bias=False)
    assert is_underdetermined(4, 4, bias=True)


def test_likely_labels_come_once_each_and_those_guessed_first() -> None:
    every = [tuple(sorted(labels.tolist())) for labels in label_candidates(4, 3, torch.tensor([0, 2, 2]))]
    assert every[0] == (0, 2, 2)
    assert len(every) == len(set(every)) == 20
    assert sum(labels.count(2) >= 1 for labels in every[1:4]) == 3
    assert len(list(islice(label_candidates(4, 3, None), 100))) == 20
