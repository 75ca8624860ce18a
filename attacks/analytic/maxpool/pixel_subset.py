"""Some pixels of a layer's input: matrices of these alone, all others being taken for certain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer


@dataclass(frozen=True)
class PixelSubset:
    """The numbers of some pixels, in all channels (n = I * pixels, channel by channel).

    Attributes:
        layer: whose input they are of.
        pixels: where they lie in a plane (H W), in rising order.
    """

    layer: ConvPoolLayer
    pixels: Tensor

    @classmethod
    def of(cls, layer: ConvPoolLayer, known: Tensor) -> PixelSubset:
        """Return all pixels but those that are `known` (H, W)."""
        return cls(layer, (~known).flatten().nonzero().flatten())

    @property
    def count(self) -> int:
        """How many numbers (n)."""
        return self.layer.shape[0] * len(self.pixels)

    @cached_property
    def _pairs(self) -> Tensor:
        """Where each pair of numbers of every patch stands in a matrix with a row and a column before the first.

        (L * M * M); what is known, or padding, is row or column 0.
        """
        columns = torch.zeros(self.layer.shape[0], self.layer.shape[1] * self.layer.shape[2], dtype=torch.float64)
        numbers = torch.arange(1, self.count + 1, dtype=torch.float64)
        columns[:, self.pixels.cpu()] = numbers.view(self.layer.shape[0], -1)
        reach = self.layer.patches(columns.view(self.layer.shape).to(self.pixels.device)).round().long()  # (L, M)
        return (reach[:, :, None] * (self.count + 1) + reach[:, None, :]).flatten()

    def quadratic_form(self, kernels: Tensor) -> Tensor:
        """Return the matrix (n, n) of sum_l patch_l^T kernels_l patch_l, of kernels (L, M, M)."""
        flat = kernels.new_zeros((self.count + 1) ** 2)
        flat.index_add_(0, self._pairs, kernels.flatten())
        return flat.view(self.count + 1, -1)[1:, 1:]

    def patch_covariances(self, covariance: Tensor) -> Tensor:
        """Return the covariance of every patch (L, M, M), from that of the subset (n, n); all else has none."""
        size = self.layer.filters.shape[1]
        return F.pad(covariance, (1, 0, 1, 0)).flatten()[self._pairs].view(-1, size, size)

    def gather(self, x: Tensor) -> Tensor:
        """Return the subset's numbers (n,) of X (I, H W)."""
        return x[:, self.pixels].flatten()

    def scatter(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return X, in the shape that it has, with these numbers (n,) in place of the subset's."""
        made = x.flatten(1).clone()
        made[:, self.pixels] = numbers.view(len(x), -1).to(x)
        return made.view_as(x)
