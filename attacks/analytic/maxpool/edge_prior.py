r"""A prior of pictures with few edges, for pixels that equations leave mostly open.

Colors are turned into their mean and what differs from it. With d_r the r-th difference of neighbors (first and second
differences along rows, columns and diagonals) and groups g of color directions u, the density is

    p(X) ~ exp(-share sum_r,g lambda_g |d_r u_g X|),

whose Gaussian bound has the precision

    sum_r,g w_rg (u_g u_g^T) (x) (d_r d_r^T),    w_rg = share lambda_g / sqrt(E |d_r u_g X|^2 / n_g + least^2)

(half-quadratic; Geman and Yang, 1995), n_g the number of directions of a group: one for the mean, the others for what
differs from it. The expectation is over all that is known of X, its spread included, and lambda the likeliest for the
picture itself, so that nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHARE = 0.4
"""Factor on the weight of each difference: differences overlap, so each counts for less than a whole one."""
LEAST_DIFFERENCE = 2 / 255
"""Differences below this, for pixels in [0, 1], are none."""
DEVIATION = 3.0
"""Standard deviation of a pixel in [0, 1] around gray where nothing else is known of it."""
Taps = Sequence[tuple[int, int, float]]
DIFFERENCES: tuple[Taps, ...] = (
    ((0, 0, -1.0), (0, 1, 1.0)),
    ((0, 0, -1.0), (1, 0, 1.0)),
    ((0, 0, 1.0), (0, 1, -2.0), (0, 2, 1.0)),
    ((0, 0, 1.0), (1, 0, -2.0), (2, 0, 1.0)),
    tuple((a, b, (-1.0) ** (a + b) * 2**0.5) for a in (0, 1) for b in (0, 1)),
)
"""Differences of neighbors: how far down and right of the first each one is, and its factor."""


@dataclass(frozen=True)
class DensePrior:
    """A Gaussian over X by its whole precision.

    Attributes:
        dense: the precision (N, N), N = I H W.
        shift: the precision times the mean (I, H W).
    """

    dense: Tensor
    shift: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the precision times X (I, H W)."""
        return (self.dense @ x.flatten()).view_as(x)

    def to(self, dtype: torch.dtype) -> DensePrior:
        """Return this prior in another floating-point precision."""
        return DensePrior(self.dense.to(dtype), self.shift.to(dtype))

    def restrict_to(self, pixels: Tensor) -> DensePrior:
        """Return the prior of some pixels of the plane (n,), the others being known."""
        if len(pixels) == self.shift.shape[1]:
            return self
        entries = (torch.arange(len(self.shift)).to(pixels)[:, None] * self.shift.shape[1] + pixels).flatten()
        return DensePrior(self.dense[entries[:, None], entries], self.shift[:, pixels])


def edge_prior(mean: Tensor, covariance: Tensor, offset: Tensor, std: Tensor) -> DensePrior:
    """Return the prior of few edges that fits what is known of a picture.

    Args:
        mean: of X (I, H, W).
        covariance: of X (N, N).
        offset: mean of the network's normalization (I,).
        std: standard deviation of it (I,).
    """
    channels, height, width = mean.shape
    count = height * width
    basis = torch.linalg.qr(torch.cat([torch.ones(channels, 1), torch.eye(channels)[:, 1:]], 1).to(mean)).Q.mT
    turned = (basis * std) @ mean.flatten(1)
    spread = covariance.view(channels, count, channels, count)
    groups = [(basis[:1], turned[:1]), (basis[1:], turned[1:])][:channels]  # of one channel, its mean alone
    precision = mean.new_zeros(channels, count, channels, count)
    for taps in DIFFERENCES:
        places, factors = _places(taps, height, width, mean)
        for group, own in groups:
            square = (own[:, places] @ factors).square().sum(0)
            turn = (group * std).to(covariance)
            for i, one in enumerate(factors):
                for j, other in enumerate(factors):
                    pairs = spread[:, places[:, i], :, places[:, j]].to(covariance)  # (rows, I, I)
                    square = square + one * other * torch.einsum("ga,rab,gb->r", turn, pairs, turn).to(square)
            size = (square.clamp_min(0) / len(group) + LEAST_DIFFERENCE**2).sqrt()
            weights = SHARE / (size.mean() * size)
            mixing = torch.einsum("ga,gb->ab", group, group) * std[:, None] * std
            plane = mean.new_zeros(count, count)
            for i, one in enumerate(factors):
                for j, other in enumerate(factors):
                    plane.index_put_((places[:, i], places[:, j]), one * other * weights, accumulate=True)
            precision += mixing[:, None, :, None] * plane[None, :, None, :]
    matrix = precision.view(channels * count, channels * count)
    matrix.diagonal().add_((std / DEVIATION).square().repeat_interleave(count))
    gray = ((0.5 - offset) / std).repeat_interleave(count)
    return DensePrior(matrix, (matrix @ gray).view(channels, count))


def _places(taps: Taps, height: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixels of every difference (rows, taps), counted along the plane, and their factors (taps,)."""
    down, right = max(a for a, _, _ in taps), max(b for _, b, _ in taps)
    plane = torch.arange(height * width, device=like.device).view(height, width)
    seen = [plane[a : a + height - down, b : b + width - right].flatten() for a, b, _ in taps]
    return torch.stack(seen, 1), like.new_tensor([factor for _, _, factor in taps])
