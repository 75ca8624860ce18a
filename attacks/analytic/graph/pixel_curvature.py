r"""A cheap model of J^T J over pixels, by which conjugate gradients are preconditioned.

J is the Jacobian of features by the pixels of a picture. Two things make J^T J ill-conditioned: in front of strides and
poolings pixels differ by tens in how much they say, most of all by their position modulo the stride; and poolings say
much of slow changes over a picture, and little of quick ones. So it is modeled as

    J^T J  ~  S C^T D C S,

with S a diagonal over pixels, C the orthonormal cosine transform of each color, and D a diagonal over frequencies. Both
diagonals are estimated by random signs (Hutchinson): the mean of (J^T e)^2 over random e of +-1 is the diagonal of
J^T J. S^2 is a product of position and color, and so is D; D is also a mean over neighboring frequencies, since few
signs are drawn. Both are means over the images: they belong to the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

LEAST = 1e-4
"""Share of the largest entry that each entry of a diagonal has, at least."""
SILENT = 1e-12
"""Share of the largest entry of J^T J's diagonal up to which a pixel says nothing."""


@dataclass(frozen=True)
class PixelCurvature:
    """The model S C^T D C S.

    Attributes:
        scale: S, (1, C, H, W); zero where pixels say nothing.
        frequencies: D, (1, C, H, W).
        silent: what stands on the diagonal for pixels that say nothing, which only a prior moves.
    """

    scale: Tensor
    frequencies: Tensor
    silent: float = 1.0

    def multiply(self, images: Tensor) -> Tensor:
        """Return the model's product with images (B, C, H, W)."""
        heard = self.scale * self._back(self.frequencies * self._transform(self.scale * images))
        return torch.where(self.scale > 0, heard, self.silent * images)

    def divide(self, images: Tensor) -> Tensor:
        """Return the inverse model's product with images (B, C, H, W)."""
        heard = self._inverse_scale * self._back(self._transform(self._inverse_scale * images) / self.frequencies)
        return torch.where(self.scale > 0, heard, images / self.silent)

    def color(self, coordinates: Tensor) -> Tensor:
        """Return S^-1 C^T D^-1/2 u: moves of images (B, C, H, W) whose value in the quadratic model is |u|^2."""
        return self._inverse_scale * self._back(coordinates / self.frequencies.sqrt())

    @cached_property
    def _inverse_scale(self) -> Tensor:
        return torch.where(self.scale > 0, 1 / self.scale, torch.zeros_like(self.scale))

    @cached_property
    def _cosines(self) -> tuple[Tensor, Tensor]:
        height, width = self.scale.shape[-2:]
        return cosine_transform(height).to(self.scale), cosine_transform(width).to(self.scale)

    def _transform(self, images: Tensor) -> Tensor:
        down, right = self._cosines
        return down @ images @ right.mT

    def _back(self, spectra: Tensor) -> Tensor:
        down, right = self._cosines
        return down.mT @ spectra @ right


def cosine_transform(size: int) -> Tensor:
    """Return the orthonormal matrix (size, size) of the cosine transform of type II, in float64."""
    place = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * place[:, None] * (place + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def estimate_curvature(pulled: Sequence[Tensor]) -> PixelCurvature:
    """Return the model of J^T J, from products of J^T with random signs.

    Args:
        pulled: these products, each (B, C, H, W).
    """
    squares = _mean_square(pulled)
    seen = squares > SILENT * squares.max()
    product = _product(squares)
    scale, silent = product.sqrt(), LEAST * float(product.max())
    scale = torch.where(seen, scale / scale.mean().clamp_min(1e-30), torch.zeros_like(scale))
    even = PixelCurvature(scale, torch.ones_like(scale))
    spectra = _product(_mean_square([even._transform(even._inverse_scale * one) for one in pulled]))
    smooth = functional.avg_pool2d(functional.pad(spectra, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return PixelCurvature(scale, smooth, silent)


def _mean_square(pulled: Sequence[Tensor]) -> Tensor:
    """Return the mean square over products and images, (1, C, H, W)."""
    return torch.stack([one.square().mean(0, keepdim=True) for one in pulled]).mean(0)


def _product(squares: Tensor) -> Tensor:
    """Return the nearest product of color and position, without a factor next to zero."""
    position, color = squares.mean(1, keepdim=True), squares.mean((2, 3), keepdim=True)
    product = position * color / squares.mean().clamp_min(1e-30)
    return product.clamp_min(LEAST * float(product.max())).clamp_min(1e-30)
