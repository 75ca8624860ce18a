"""Numbers of found pictures that features leave open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import attacks
from attacks.analytic.graph import picture_search, undetermined_numbers
from attacks.analytic.graph.feature_inversion import InversionSettings, InvertedImages
from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget
from attacks.analytic.graph.undetermined_numbers import count_undetermined
from fl.capture import from_batch
from fl.seeds import stream


def as_found(images: Tensor) -> InvertedImages:
    """Pictures as a search that met its features hands them out."""
    count = len(images)
    return InvertedImages(images, torch.zeros(count), torch.ones(count, dtype=torch.bool), torch.ones(count), 1)


def test_pixels_at_levels_of_which_features_tell_only_sums_are_open() -> None:
    image = torch.randint(256, (1, 3, 4, 4), generator=stream(0, "levels")).double() / 255

    def sums(x: Tensor) -> list[Tensor]:
        flat = x.flatten(1)
        return [torch.cat([flat[:, :1] + flat[:, 1:2], flat[:, 2:]], 1).repeat(1, 2)]

    for seed in range(10):  # whatever the two are moved by
        assert count_undetermined(sums, sums, [FeatureTarget(*sums(image))], as_found(image), seed) == 2


@pytest.mark.parametrize("beside", [0.0, 1e-8, -1e-8])
def test_a_feature_that_a_relu_closed_tells_no_pixel_by_where_the_search_stopped(beside: float) -> None:
    """It bounds the pixel to one side, next to which a search ends that comes from the other."""
    image = torch.rand(1, 3, 4, 4, generator=stream(1, "pixels"), dtype=torch.float64)
    bound = image[0, 0, 0, 0].clone() - beside

    def features(x: Tensor) -> list[Tensor]:
        flat = x.flatten(1)
        return [torch.cat([flat[:, 1:], flat[:, 1:], flat[:, :1] - bound], 1)]

    wanted = features(image)[0].relu()
    wanted[:, -1] = 0
    target = FeatureTarget(wanted, rectified=True)
    assert count_undetermined(features, features, [target], as_found(image), seed=0) > 0


def closing_stem(seed: int) -> tuple[nn.Module, Tensor]:
    """A network with a frozen 1x1 convolution and a ReLU, and a picture one pixel of which opens two of 12 channels."""
    draw = stream(seed // 20, "stem")
    stem = nn.Conv2d(3, 12, 1).requires_grad_(False)
    model = nn.Sequential(stem, nn.ReLU(), nn.Conv2d(12, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 16))
    model.append(nn.ReLU()).append(nn.Linear(16, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            shape, inputs = parameter.shape, parameter[0].numel()
            parameter.copy_(torch.randn(shape, generator=draw) / inputs**0.5)
        stem.weight.copy_(torch.randn(stem.weight.shape, generator=draw))
        stem.bias.copy_(0.3 * torch.randn(12, generator=draw) - 0.3)  # type: ignore[union-attr]
        pool = torch.rand(1, 3, 1, 4000, generator=stream(seed, "pixels"))
        open_channels = (stem(pool) > 0).sum(1)[0, 0]
    chosen = (open_channels >= 5).nonzero()[:36, 0].clone()
    chosen[20] = (open_channels == 2).nonzero()[0, 0]
    return model.eval(), pool[..., chosen].reshape(1, 3, 6, 6)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_a_pixel_of_few_open_channels_below_the_trained_layers_is_not_verified_unless_right(seed: int) -> None:
    model, image = closing_stem(seed)
    found = attacks.build("backsolve")(from_batch(model, image, torch.tensor([seed % 10]))[0])
    inputs = getattr(found, "inputs", None)
    assert not found.verified or (inputs is not None and float((inputs - image).abs().max()) < 0.25 / 255)


def test_pictures_whose_open_numbers_could_not_be_looked_for_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(1, 3, 4, 4, generator=stream(0, "off levels"), dtype=torch.float64)
    found = InvertedImages(images, torch.tensor([0.0]), torch.tensor([True]), torch.tensor([1]), 1)
    lost = replace(found, converged=torch.tensor([False]))
    monkeypatch.setattr(undetermined_numbers, "invert_features", lambda *_, **__: lost)

    def sums(x: Tensor) -> list[Tensor]:
        return [x.sum(1) for _ in range(3)]  # as many equations as pixels, but the same ones

    assert count_undetermined(sums, sums, [FeatureTarget(f) for f in sums(images)], found, seed=0) == 48


def test_where_features_tell_each_pixel_to_first_order_nothing_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(2, 3, 4, 4, generator=stream(0, "off levels"), dtype=torch.float64)
    found = InvertedImages(images, torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.ones(2), 1)
    monkeypatch.setattr(undetermined_numbers, "invert_features", None)
    assert count_undetermined(lambda x: [x.exp()], lambda x: [x.exp()], [FeatureTarget(images.exp())], found, 0) == 0


def weakly_told(pixels: slice, share: float) -> tuple[Tensor, FeatureTarget, Callable[[Tensor], list[Tensor]]]:
    """An image at whole levels, its features by a linear map, and that map, which tells some pixels weakly."""
    draw = torch.Generator().manual_seed(3)
    image = torch.randint(256, (1, 3, 4, 4), generator=draw).double() / 255
    matrix = torch.randn(96, 48, generator=draw, dtype=torch.float64)
    matrix[:, pixels] *= share

    def features(images: Tensor) -> list[Tensor]:
        return [images.flatten(1) @ matrix.mT]

    (exact,) = features(image)
    error = torch.randn(exact.shape, generator=draw, dtype=torch.float64)
    return image, FeatureTarget(exact + 1e-6 * exact.norm() / error.norm() * error, noise=3e-6), features


@pytest.mark.parametrize("share", [1e-4, 1e-5, 1e-6])
def test_pixels_that_noise_leaves_open_count_as_open(share: float) -> None:
    image, target, features = weakly_told(slice(0, 3), share)
    found = picture_search.search_pictures(features, features, [target], image.shape, 0)
    count = count_undetermined(features, features, [target], found, 0)
    assert count or float((found.images - image).abs().max()) < 0.5 / 255


@pytest.mark.parametrize(("share", "seed"), [(1e-3, 3), (1e-3, 5), (1e-2, 3), (1e-2, 5)])
def test_a_pixel_that_the_stated_noise_puts_at_another_level_counts_as_open(share: float, seed: int) -> None:
    """Rounding the best picture to levels hides from its residuals how far noise has moved the pixel."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.randint(256, (1, 3, 4, 4), generator=draw).double() / 255
    matrix = torch.randn(60, 48, generator=draw, dtype=torch.float64)
    matrix[:, 0] *= share

    def features(images: Tensor) -> list[Tensor]:
        return [images.flatten(1) @ matrix.mT]

    (exact,) = features(image)
    error = torch.randn(exact.shape, generator=draw, dtype=torch.float64)
    target = FeatureTarget(exact + 3e-6 * exact.norm() / error.norm() * error, noise=3e-6)
    best = torch.linalg.lstsq(matrix, target.value.mT).solution.mT.view_as(image)
    found = as_found((255 * best).round() / 255)
    wrong = float((found.images - image).abs().max()) > 0.5 / 255
    assert wrong == (share == 1e-3)
    assert bool(count_undetermined(features, features, [target], found, seed)) == wrong


def test_a_pixel_at_another_level_counts_as_open_where_features_hardly_tell_it() -> None:
    image, target, features = weakly_told(slice(5, 6), 1e-5)
    other = image.clone()
    other.flatten()[5] = (image.flatten()[5] + 1 / 255 + 1) % 1
    found = InvertedImages(other, torch.tensor([1e-6]), torch.tensor([True]), torch.tensor([1]), 1)
    assert count_undetermined(features, features, [target], found, 0) == 1


@pytest.mark.parametrize("channels", [slice(None), slice(1, 2)])
def test_a_contrast_that_features_do_not_tell_is_open_however_many_numbers_share_it(channels: slice) -> None:
    images = torch.rand(1, 3, 32, 32, generator=stream(0, "off levels"), dtype=torch.float64)

    def normalized(x: Tensor) -> list[Tensor]:
        part = x[:, channels] - 0.5
        rest = x.clone()
        rest[:, channels] = part / part.norm()
        return [rest.flatten(1).repeat(1, 2)]

    for seed in range(3):
        found = as_found(images)
        assert count_undetermined(normalized, normalized, [FeatureTarget(*normalized(images))], found, seed) == 3072


@pytest.mark.parametrize("flat", [False, True])
def test_features_without_contrast_tell_a_picture_of_whole_levels(flat: bool) -> None:
    """All 108 numbers are open as real numbers, and none as levels, unless two levels alone are in the picture."""
    image = torch.randint(30, 220, (1, 3, 6, 6), generator=stream(4, "levels")).double() / 255
    image = torch.where(image > 0.5, 105, 150).double() / 255 if flat else image
    mixing = torch.randn(216, 108, generator=stream(5, "mixing"), dtype=torch.float64)

    def features(x: Tensor) -> list[Tensor]:
        signal = (x - 127.5 / 255).flatten(1)
        return [signal / signal.norm(dim=1, keepdim=True) @ mixing.T]

    found = as_found(image)
    opened = count_undetermined(features, features, [FeatureTarget(*features(image))], found, seed=0)
    assert opened > 0 if flat else opened == 0


def test_searches_aside_share_one_bound_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be searched for counts as open."""
    image, given = torch.rand(1, 3, 6, 6, generator=stream(4, "aside"), dtype=torch.float64), list[float]()
    monkeypatch.setattr(undetermined_numbers, "search_seconds", lambda _: 5.0)

    def stuck(*_: object, settings: InversionSettings, **__: object) -> InvertedImages:
        given.append(settings.seconds or 0.0)
        return InvertedImages(image, torch.ones(1), torch.zeros(1, dtype=torch.bool), torch.ones(1), 1)

    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(undetermined_numbers.time, "process_time", lambda: float(next(clock)))
    monkeypatch.setattr(undetermined_numbers, "invert_features", stuck)

    def contrastless(x: Tensor) -> list[Tensor]:
        signal = (x - 127.5 / 255).flatten(1)
        return [signal / signal.norm(dim=1, keepdim=True)]

    found = as_found(image)
    problem = FeatureProblem.of(contrastless, contrastless, [FeatureTarget(*contrastless(image))])
    assert undetermined_numbers._search_aside(problem, found.images, [torch.zeros_like(image)], seed=0) is None
    assert given == [3.0, 1.0, 0.0]
