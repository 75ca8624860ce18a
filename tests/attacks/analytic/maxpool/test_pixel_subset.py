"""Matrices of some pixels only: the forms that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.pixel_subset import PixelSubset
from fl.seeds import stream

LAYERS = {
    "plain": {"shape": (2, 8, 7)},
    "padded": {"shape": (2, 7, 6), "padding": (1, 2), "stride": (2, 1)},
    "two images": {"shape": (2, 12, 5), "padding": (1, 1), "images": 2},
}


def randn(*shape: int, key: str) -> Tensor:
    return torch.randn(shape, generator=stream(0, "part", key, *shape), dtype=torch.float64)


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_part_has_the_rows_and_columns_of_the_whole(name: str, share: float) -> None:
    made = ConvPoolLayer(randn(3, 2, 3, 3, key="w"), randn(3, key="b"), **LAYERS[name])  # type: ignore[arg-type]
    held = torch.rand(made.shape[1:], generator=stream(0, "part", "held", name)) < share
    part = PixelSubset.of(made, held)
    units = torch.eye(held.numel() * 2, dtype=torch.float64).view(-1, *made.shape)
    seen = torch.stack([made.patches(unit) for unit in units], -1)  # (L, M, N)
    free = (~held).expand(made.shape).flatten()
    assert part.count == int(free.sum())
    kernels = randn(seen.shape[0], seen.shape[1], seen.shape[1], key="kernels")
    whole = torch.einsum("lma,lmn,lnb->ab", seen, kernels, seen)
    assert torch.allclose(part.quadratic_form(kernels), whole[free][:, free])
    covariance = randn(part.count, part.count, key="covariance")
    own = seen[..., free]
    assert torch.allclose(part.patch_covariances(covariance), own @ covariance @ own.mT)


def test_numbers_are_put_where_they_are_taken() -> None:
    made = ConvPoolLayer(randn(3, 2, 3, 3, key="w"), randn(3, key="b"), (2, 8, 7))
    held = torch.rand(8, 7, generator=stream(0, "part", "held")) < 0.5
    part, x = PixelSubset.of(made, held), randn(2, 8, 7, key="x")
    moved = part.scatter(x, part.gather(x.flatten(1)) + 1)
    assert torch.allclose(moved, x + (~held).double())
    assert moved.shape == x.shape
