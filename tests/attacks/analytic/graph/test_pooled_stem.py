"""Pictures come back through a stem of convolution, ReLU and max pooling."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks.analytic.graph import pooled_stem
from attacks.analytic.graph.pooled_convolution import AnnealingSettings, PooledConvolution, PooledObservation
from attacks.analytic.graph.pooled_stem import PooledStem, invert_pooled_stem
from attacks.analytic.graph.solver import SolvedTensor
from attacks.base import Reconstruction
from attacks.network.operation_trace import Ref
from fl.capture import from_batch


class PooledNetwork(nn.Module):
    """A stem with max pooling, two convolutions and a linear layer, for pictures of 8 by 8 pixels."""

    def __init__(self, *, pool_first: bool) -> None:
        super().__init__()
        self.pool_first = pool_first
        self.stem, self.norm = nn.Conv2d(3, 48, 5, padding=2), nn.BatchNorm2d(48)
        self.one, self.two = nn.Conv2d(48, 96, 3, padding=1, bias=False), nn.Conv2d(96, 96, 3, 2, padding=1)
        self.top, self.head = nn.Conv2d(96, 96, 3, padding=1), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem((x - 0.4) / 0.3))
        if self.pool_first:
            x = functional.max_pool2d(x, 3, 2, 1).relu()
        else:
            x = functional.max_pool2d(functional.relu(x), 3, 2, 1)
        x = functional.relu(self.two(functional.relu(self.one(x))))
        return self.head(functional.relu(self.top(x)).mean((2, 3)))


def victim(*, pool_first: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = PooledNetwork(pool_first=pool_first).eval()
        nn.init.normal_(model.norm.weight)  # of both signs
        nn.init.normal_(model.norm.bias)
        nn.init.normal_(model.norm.running_mean, std=0.1)
    return model


def picture(size: int = 8) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, size // 4, size // 4, generator=draw)
    smooth = functional.interpolate(coarse, size=size, mode="bicubic", align_corners=False).clamp(0, 1)
    return (255 * smooth).round() / 255


class TwoConvolutions(nn.Module):
    """Two convolutions before a max pooling, the second with fewer equations than its input has numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.one, self.two = nn.Conv2d(32, 96, 3, padding=1), nn.Conv2d(96, 96, 3, 2, padding=1)
        self.top, self.head = nn.Conv2d(96, 96, 3, padding=1), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.second(self.first(4 * x - 2).relu()), 2).relu()
        x = functional.relu(self.two(functional.relu(self.one(x))))
        return self.head(functional.relu(self.top(x)).mean((2, 3)))


def test_a_picture_comes_back_through_two_convolutions_before_max_pooling() -> None:
    images = picture()
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        view, _ = from_batch(TwoConvolutions().eval(), images, torch.tensor([3]))
    result = attacks.build("backsolve")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.verified
    assert bool(((result.inputs - images).abs() < 1e-4).all())


@pytest.mark.parametrize("pool_first", [pytest.param(False, marks=pytest.mark.slow), True])  # the next test is like it
def test_a_picture_comes_back_through_max_pooling(*, pool_first: bool) -> None:
    images = picture()
    view, _ = from_batch(victim(pool_first=pool_first), images, torch.tensor([3]))
    result = attacks.build("backsolve")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.verified
    assert bool(((result.inputs - images).abs() < 1e-4).all())


def test_a_color_that_only_the_gradient_shows_is_verified() -> None:
    model, images = victim(pool_first=False), picture()
    with torch.no_grad():
        model.get_parameter("stem.weight")[:, 2] = 0
    result = attacks.build("backsolve")(from_batch(model, images, torch.tensor([3]))[0])
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert bool(((result.inputs - images).abs() < 1e-4).all())
    assert result.verified


def wide_stem(images: Tensor) -> PooledStem:
    """Return ImageNet's stem with few filters, and what is known of it where it takes these images."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 3, 7, 7, generator=draw, dtype=torch.float64) / 10
    layer = PooledConvolution(weight, torch.zeros(16).double(), (2, 2), (3, 3), (3, 3), (2, 2), (1, 1))
    pooled, places = functional.max_pool2d(layer.outputs(images), 3, 2, 1, return_indices=True)
    signal = torch.randn(1, 16, 1, 1, generator=draw, dtype=torch.float64) * (pooled > 0)
    passed = torch.zeros_like(layer.outputs(images)).flatten(2)
    passed.scatter_add_(2, places.flatten(2), signal.flatten(2))
    gradient = layer.gradient(images, passed.reshape(layer.outputs(images).shape))
    known = PooledObservation(pooled.relu(), signal, gradient)
    one = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    target = SolvedTensor(Ref(2), known.pooled, 1e-6, True, ("top.weight",))
    return PooledStem(layer, known, one, 0 * one, None, target, "stem.weight")


@pytest.mark.parametrize("off", [False, True])
def test_one_wrong_level_of_a_large_picture_does_not_count_as_explained(
    monkeypatch: pytest.MonkeyPatch, *, off: bool
) -> None:
    noise = torch.randn(1, 3, 176, 176, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    images = functional.interpolate(picture(16).double(), size=176, mode="bicubic") + 0.1 * noise
    images = (255 * images.clamp(0, 1)).round() / 255
    stem, wrong = wide_stem(images), images.clone()
    wrong[0, 0, 0, 175] += (1 if float(wrong[0, 0, 0, 175]) < 0.5 else -1) / 255
    assert 0 < pooled_stem._measure(stem, wrong) < pooled_stem.MAX_MISFIT
    monkeypatch.setattr(pooled_stem, "_search", lambda *_: wrong if off else images)
    found = invert_pooled_stem(stem, images.shape)
    assert bool(found.converged.all()) is not off


def test_a_search_that_leaves_equations_is_followed_by_ones_for_rougher_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = picture().double()
    stem, asked = wide_stem(images), []

    def search(_: PooledStem, start: Tensor, settings: AnnealingSettings) -> Tensor:
        asked.append(settings.roughness)
        return images if len(asked) == 2 else (start + 0.1).clamp(max=1)

    monkeypatch.setattr(pooled_stem, "_search", search)
    found = pooled_stem._search_from_gray(stem, images.shape, AnnealingSettings(0.1, 0.1))
    assert torch.equal(found, images)
    assert asked == [0.1, pytest.approx(0.3)]


def test_searches_go_on_one_after_the_other_and_the_best_pictures_count(monkeypatch: pytest.MonkeyPatch) -> None:
    images, asked = picture().double(), []
    stem = wide_stem(images)
    gaps = iter([0.5, 0.4, 0.45, 0.3, 0.35, 0.32])  # of three from gray the second is best, then the fourth

    def search(_: PooledStem, start: Tensor, settings: AnnealingSettings) -> Tensor:
        gap = next(gaps)
        asked.append((gap, settings.first_sigma, start))
        return images + gap

    monkeypatch.setattr(pooled_stem, "_search", search)
    monkeypatch.setattr(pooled_stem, "_measure", lambda _, at: float((at - images).abs().max()))
    found = pooled_stem._search_from_gray(stem, images.shape, AnnealingSettings(0.1, 0.1))
    assert torch.allclose(found, images + 0.3)
    assert [sigma for _, sigma, _ in asked[3:]] == [0.05, 0.03, 0.02]
    starts = [float((start - images).mean()) for *_, start in asked[3:]]
    assert starts == pytest.approx([0.4, 0.3, 0.35])


@pytest.mark.parametrize(("noise", "asked"), [(1e-6, True), (1e-3, False)])
def test_positions_are_corrected_where_outputs_are_precise(
    monkeypatch: pytest.MonkeyPatch, noise: float, *, asked: bool
) -> None:
    images = picture(16).double()
    stem, seen = wide_stem(images), []
    stem = replace(stem, known=replace(stem.known, noise=noise))
    gray = torch.full_like(images, 0.5)

    def correct(*given: Any) -> tuple[Tensor, Any, int]:
        seen.append(given)
        return images, given[-1], 1

    monkeypatch.setattr(pooled_stem, "correct_positions", correct)
    found = pooled_stem._correct(stem, gray, AnnealingSettings())
    assert bool(seen) is asked
    assert torch.equal(found, images if asked else gray)
