"""The input of a convolution below an overlapping max pooling."""

import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph.pooled_convolution import (
    AnnealingSettings,
    PooledConvolution,
    PooledObservation,
    _overlapping_windows,
    candidate_positions,
    invert_pooled_convolution,
)


def layer_and_images() -> tuple[PooledConvolution, Tensor]:
    """A stem with stride 2 and 3x3 pooling with stride 2, and a smooth image in normalized units."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 3, 5, 5, generator=generator, dtype=torch.float64) / 75**0.5
    layer = PooledConvolution(weight, torch.zeros(40, dtype=torch.float64), (2, 2), (2, 2), (3, 3), (2, 2), (1, 1))
    coarse = torch.rand(1, 3, 4, 4, generator=generator, dtype=torch.float64)
    images = functional.interpolate(coarse, size=(16, 16), mode="bicubic", align_corners=False)
    return layer, 4 * (images - 0.5)


def observe(layer: PooledConvolution, images: Tensor) -> tuple[PooledObservation, Tensor]:
    """What the layer shows, and the true positions."""
    z = layer.outputs(images)
    pooled, index = functional.max_pool2d(z.relu(), 3, 2, 1, return_indices=True)
    generator = torch.Generator().manual_seed(1)
    signal = torch.randn(pooled.shape, generator=generator, dtype=torch.float64)
    size = z[0, 0].numel()
    flat = torch.zeros(z.shape, dtype=torch.float64).flatten(2)
    opened = signal * (pooled > 0)
    flat.scatter_add_(2, index.flatten(2), opened.flatten(2))
    offset = torch.arange(z.shape[0] * z.shape[1]).reshape(*z.shape[:2], 1) * size
    true = (index.flatten(2) + offset)[pooled.flatten(2) > 0].unique()
    return PooledObservation(pooled, signal, layer.gradient(images, flat.reshape(z.shape))), true


def test_candidates_hold_the_true_positions_and_few_others() -> None:
    layer, images = layer_and_images()
    known, true = observe(layer, images)
    noisy = PooledObservation(
        known.pooled * (1 + 1e-7 * torch.randn(known.pooled.shape, generator=torch.Generator().manual_seed(2))),
        known.signal,
        known.gradient,
    )
    found = candidate_positions(layer, noisy, layer.outputs(images).shape)
    hit = torch.isin(true, found.position).double().mean()
    assert float(hit) > 0.97  # two maxima that happen to be the same number tell nothing
    assert len(found.position) < 5 * found.groups
    z = layer.outputs(images).flatten()
    assert bool((z <= found.bound.flatten() + 1e-5).all())


def test_windows_apart_with_the_same_number_keep_their_positions() -> None:
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    layer = PooledConvolution(one, torch.zeros(1).double(), (1, 1), (0, 0), (3, 3), (2, 2), (1, 1))
    images = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    images[0, 0, 1, 1] = images[0, 0, 6, 6] = 1.0  # by chance
    pooled = functional.max_pool2d(images, 3, 2, 1)
    found = candidate_positions(layer, PooledObservation(pooled, torch.ones_like(pooled), one), images.shape)
    assert {9, 54} <= set(found.position.tolist())
    assert float(found.signal[found.position == 9]) == float((pooled[..., :2, :2] == 1).sum())


def test_images_come_back_through_an_overlapping_pooling() -> None:
    layer, images = layer_and_images()
    known, _ = observe(layer, images)
    settings = AnnealingSettings(roughness=0.4, color_roughness=0.4, steps=40, decay=0.9)
    found = invert_pooled_convolution(layer, known, torch.zeros_like(images), settings)
    nothing = PooledObservation(known.pooled, 0 * known.signal, 0 * known.gradient + 1e-9)
    without = invert_pooled_convolution(layer, nothing, torch.zeros_like(images), settings)

    def error(result: Tensor) -> float:
        return float((result - images).square().mean().sqrt()) / 4

    assert error(found) < 0.01
    assert error(found) < 0.3 * error(without)


def test_windows_that_overlap_are_paired() -> None:
    windows = torch.tensor([[0, 1, 5], [1, 2, 6], [9, 9, 9]])  # of three windows; the last position is outside
    inside = torch.tensor([[True, True, True], [True, True, True], [False, False, False]])
    assert _overlapping_windows(windows, inside).mT.tolist() == [[0, 1]]
