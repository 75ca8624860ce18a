"""Rows of a batch's gradient that hold one picture: told by the update's rounding, also where pictures are flat."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attacks
from attacks import NotApplicable, Reconstruction
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "leaky": lambda: nn.LeakyReLU(0.01),
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(0, 0.3),
}
LEVEL = 1 / 255


def network(widths: list[int], activation: str, seed: int, *, gain: float = 1.0, normalized: bool = False) -> nn.Module:
    """A chain of linear layers on pictures of 8 x 8, as PyTorch draws it, times a gain."""
    layers: list[nn.Module] = [nn.Flatten()]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for number, (before, after) in enumerate(zip([64, *widths], widths, strict=False)):
            layers += [nn.Linear(before, after)]
            layers += [ACTIVATIONS[activation]()] if number < len(widths) - 1 else []
        layers = [*layers[:-1], nn.LayerNorm(widths[-2]), layers[-1]] if normalized else layers
        model = nn.Sequential(*layers)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(gain)
    return model


def gray_pictures(draw: torch.Generator, count: int, contrast: float) -> Tensor:
    """Pictures about one gray, whose pixels differ by a few levels."""
    gray = torch.rand(1, 1, 1, 1, generator=draw) * 0.6 + 0.2
    away = contrast * (torch.rand(count, 1, 8, 8, generator=draw) - 0.5) * 2
    return ((gray + away).clamp(0, 1) * 255).round() / 255


def attack(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> tuple[attacks.Result, Tensor]:
    view, truth = from_batch(model, images, labels, **settings)
    return attacks.build("analytic")(view), truth.inputs


def farthest(result: Reconstruction, images: Tensor) -> float:
    """By how much a pixel of what came back is off at most, in levels."""
    assert result.inputs is not None
    distances = (result.inputs[:, None] - images[None]).flatten(2).abs().amax(2)
    return float(distances.amin(1).max()) / LEVEL


def of_seed(
    seed: int, widths: list[int], activation: str, contrast: float, gain: float
) -> tuple[nn.Module, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, 9, (1,), generator=draw))
    classes = [2, 3, 5, 10][int(torch.randint(0, 4, (1,), generator=draw))]
    images = gray_pictures(draw, count, contrast)
    labels = torch.randint(0, classes, (count,), generator=draw)
    own = int(torch.randint(0, 2**31, (1,), generator=draw))
    return network([*widths, classes], activation, own, gain=gain), images, labels


@pytest.mark.parametrize(
    ("seed", "widths", "activation", "contrast", "gain"),
    [
        (4, [64], "relu", 0.02, 1.0),
        (114, [64, 32], "relu", 0.02, 1.0),
        (145, [64, 32], "relu", 0.02, 1.0),
        (73, [256], "relu", 0.02, 1.0),
        (62, [64], "gelu", 0.02, 3.0),
        (23, [64], "leaky", 0.1, 3.0),
    ],
)
def test_a_mixture_of_flat_pictures_that_passes_the_rank_test_is_not_verified(
    seed: int, widths: list[int], activation: str, contrast: float, gain: float
) -> None:
    """Each of these was: a neuron's row held a mixture of three or more, which misses the test by less than 1e-3."""
    model, images, labels = of_seed(seed, widths, activation, contrast, gain)
    result, truth = attack(model, images, labels)
    assert not (isinstance(result, Reconstruction) and result.verified and farthest(result, truth) > 0.25)
    if isinstance(result, NotApplicable):
        assert "it may as well be a mixture" in result.reason


def balanced(outputs: Tensor, labels: Tensor) -> Tensor:
    times = torch.bincount(labels, minlength=outputs.shape[1]).to(outputs)
    return nn.functional.cross_entropy(outputs, labels, weight=torch.where(times > 0, 1 / times.clamp(min=1), 0))


@pytest.mark.parametrize("seed", [41, 52])
def test_a_mean_of_flat_pictures_that_a_picture_of_more_weight_looks_like_is_not_verified(seed: int) -> None:
    """Of one class each counts 1. In other batches one counts as much as several of these together."""
    images = gray_pictures(torch.Generator().manual_seed(seed), 8, 0.02)
    model = network([64, 32, 5], "relu", seed, normalized=True)
    method = FedAvg(lr=1e-3, steps=1, batch_size=None)
    result, truth = attack(model, images, torch.zeros(8).long(), loss=balanced, method=method)
    assert not (isinstance(result, Reconstruction) and result.verified and farthest(result, truth) > 0.25)


@pytest.mark.parametrize(("classes", "contrast"), [(2, 0.02), (10, 0.02), (10, 0.01)])
def test_flat_pictures_that_a_neuron_sees_alone_are_verified(classes: int, contrast: float) -> None:
    draw, told = stream(classes, "flat pictures"), 0
    for number in range(4):
        images = gray_pictures(draw, 4, contrast)
        labels = torch.randint(0, classes, (4,), generator=draw)
        result, truth = attack(network([256, classes], "relu", number), images, labels)
        if isinstance(result, Reconstruction) and result.verified:
            assert farthest(result, truth) < 0.25
            told += 1
    assert told >= 2


@pytest.mark.parametrize(
    ("activation", "normalized", "trained"),
    [("relu6", False, True), ("hardtanh", False, True), ("relu", True, True), ("relu", False, False)],
    ids=["bounded above", "bounded early", "normalized above", "frozen above"],
)
def test_pictures_are_verified_where_no_outgoing_weight_tells_them(
    activation: str, normalized: bool, trained: bool
) -> None:
    draw = stream(0, "ordinary pictures")
    images = torch.randint(256, (4, 1, 8, 8), generator=draw) / 255
    model = network([96, 5], activation, 1, normalized=normalized)
    for value in model[-1].parameters():
        value.requires_grad_(trained)
    result, truth = attack(model, images, torch.tensor([0, 3, 3, 1]))
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert farthest(result, truth) < 0.25
    assert len(result.inputs) >= 3
