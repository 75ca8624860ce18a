"""Several images in one layer: what each of them gives by itself, side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.flat_regions import _region_level
from attacks.analytic.maxpool.gaussian_prior import image_prior
from fl.seeds import stream

SHAPES = {
    "plain": dict(shape=(2, 8, 7), padding=(0, 0), stride=(1, 1), window=(2, 2)),
    "padded": dict(shape=(1, 6, 6), padding=(1, 2), stride=(1, 1), window=(2, 2)),
    "strided": dict(shape=(2, 9, 8), padding=(1, 1), stride=(2, 1), window=(1, 1)),
    "odd": dict(shape=(1, 9, 9), padding=(0, 0), stride=(1, 1), window=(3, 2)),
}


def randn(*shape: int, key: object) -> Tensor:
    return torch.randn(shape, generator=stream(0, "images", str(key)), dtype=torch.float64)


def both(name: str) -> tuple[ConvPoolLayer, ConvPoolLayer, Tensor]:
    """A layer of one image, the same of two, and two images one above the other."""
    settings = SHAPES[name]
    channels, height, width = settings["shape"]
    one = ConvPoolLayer(randn(3, channels, 3, 3, key="w"), randn(3, key="b"), **settings)  # type: ignore[arg-type]
    two = replace(one, shape=(channels, 2 * height, width), images=2)
    return one, two, randn(channels, 2 * height, width, key="x")


@pytest.mark.parametrize("name", list(SHAPES))
def test_images_do_not_touch(name: str) -> None:
    one, two, x = both(name)
    parts = x.chunk(2, 1)
    assert torch.allclose(two.outputs(x), torch.cat([one.outputs(p) for p in parts], 1))
    assert torch.equal(two.patches(x), torch.cat([one.patches(p) for p in parts]))
    assert torch.allclose(two.pooled_outputs(x), torch.cat([one.pooled_outputs(p) for p in parts], 1))
    signal = randn(3, two.positions, key="signal")
    halves = signal.chunk(2, 1)
    assert torch.allclose(two.backpropagate(signal), torch.cat([one.backpropagate(s) for s in halves], 1))
    assert torch.allclose(two.gradient_map(signal), torch.cat([one.gradient_map(s) for s in halves], 1))


@pytest.mark.parametrize("name", list(SHAPES))
def test_forms_of_several_images_are_blocks(name: str) -> None:
    one, two, x = both(name)
    flat = x.flatten()
    patches = two.patches(x)
    kernels = randn(*patches.shape, patches.shape[1], key="kernel")
    assert torch.allclose(
        flat @ two.quadratic_form(kernels) @ flat, torch.einsum("lm,lmn,ln->", patches, kernels, patches)
    )
    weights = randn(3, two.positions, key="weights")
    blocks = [one.channel_blocks(w)[0] for w in weights.chunk(2, 1)]
    assert torch.allclose(two.channel_blocks(weights)[0], torch.block_diag(*blocks))
    between = randn(*two.cells.shape, two.cells.shape[1], key="pairs")
    assert torch.allclose(
        two.within_cell_form(between), torch.block_diag(*[one.within_cell_form(b) for b in between.chunk(2)])
    )


def test_a_prior_does_not_join_images() -> None:
    one, two, _ = both("plain")
    mean, std = torch.full((2,), 0.4).double(), torch.full((2,), 0.3).double()
    alone, together = (image_prior(made, mean, std, 0.3) for made in (one, two))
    assert torch.equal(together.pixels, torch.block_diag(alone.pixels, alone.pixels))
    assert torch.equal(together.channels, alone.channels)


def test_neighbors_are_of_the_same_image() -> None:
    number = torch.tensor([[[5.0, 5.0], [5.0, 1.0], [9.0, 9.0], [9.0, 9.0]]])
    told = torch.ones_like(number, dtype=torch.bool)
    assert _region_level(number, 3, told, 2, 255) == 5
    assert _region_level(number, 3, told, 4, 255) is None
    assert (
        _region_level(number, 3, told.index_fill(1, torch.tensor([2]), value=False), 4, 255) == 5
    )  # untold ones don't object
