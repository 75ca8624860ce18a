"""The values that a pixel of so many bits may take, and what "on one of them" says as a factor of the propagation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NARROW = 0.6
"""Standard deviation, in steps between two levels, below which levels are told apart."""
SHARP = 0.15
"""Standard deviation, in steps, that a pixel on its level keeps."""

ON_LEVEL = 1e-6
"""Steps between two levels within which a pixel lies on one."""

MIN_CAVITY_SHARE = 0.02
"""Share of a pixel's precision that must come from elsewhere for its site to be formed anew: less is rounding."""


@dataclass(frozen=True)
class PixelLevels:
    """Equally distant values, the same for all pixels of a channel, in a network's normalized units.

    Attributes:
        first: the lowest, by channel (I, 1, 1).
        step: between neighbors (I, 1, 1).
        count: how many.
    """

    first: Tensor
    step: Tensor
    count: int

    @property
    def index_precision(self) -> float:
        """How much is known of a pixel's index by its being on one of so many levels, as an inverse variance."""
        return (2 / self.count) ** 2

    @classmethod
    def of(cls, mean: Tensor, std: Tensor, count: int = 256) -> PixelLevels:
        """Return `count` levels of [0, 1], normalized by a mean and standard deviation per channel (I,)."""
        std = std[:, None, None]
        return cls(-mean[:, None, None] / std, 1 / (std * (count - 1)), count)

    def nearest(self, x: Tensor) -> Tensor:
        """Return every pixel of X (I, H, W) on its nearest level."""
        return self.values(self.indices(x))

    def contain(self, x: Tensor) -> bool:
        """Return whether every pixel of X (I, H, W) is on a level."""
        return bool(((x - self.nearest(x)).abs() < ON_LEVEL * self.step).all())

    def values(self, indices: Tensor) -> Tensor:
        """Return the pixels on levels of these indices (I, H, W)."""
        return self.first + indices * self.step

    def coordinate_descent(self, x: Tensor, matrix: Tensor, right: Tensor, moves: int = 500) -> Tensor:
        """Move single pixels to a neighboring level, for as long as x^T A x / 2 - b^T x falls.

        Args:
            x: on levels (I, H, W).
            matrix: A (N, N).
            right: b (N,), or in X's shape.
            moves: at most.
        """
        step = self.step.expand_as(x).flatten()
        number = self.indices(x).flatten()
        slope = matrix @ x.flatten() - right.flatten()
        curvature = 0.5 * matrix.diagonal() * step.square()
        least = 1e-9 * curvature.mean()
        for _ in range(moves):
            up = (slope * step + curvature).masked_fill(number == self.count - 1, math.inf)
            down = (curvature - slope * step).masked_fill(number == 0, math.inf)
            gain = torch.minimum(up, down)
            at = int(gain.argmin())
            if not gain[at] < -least:
                break
            sign = 1 if up[at] < down[at] else -1
            number[at] += sign
            slope += sign * step[at] * matrix[at]
        return self.values(number.view_as(x))

    def indices(self, x: Tensor) -> Tensor:
        """Return which level every pixel of X (I, H, W) is nearest to, from 0 on."""
        return ((x - self.first) / self.step).round().clamp(0, self.count - 1)

    def match_moments(self, mean: Tensor, variance: Tensor, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gaussians that stand for "on some level", given everything else: precision, precision times mean.

        They match the first two moments (Minka, 2001); nothing where the levels can't be told apart yet. As in (4) to
        (6) of `expectation_propagation`, for one pixel: cavity, moments of the levels under it, site.

        Args:
            mean: of every pixel (I, H, W).
            variance: of every pixel (I, H, W).
            precision: of the sites that are in both (I, H, W).
            shift: precision times mean of these (I, H, W).
        """
        cavity = 1 / variance - precision
        sure = cavity * variance > MIN_CAVITY_SHARE
        cavity = torch.where(sure, cavity, 1 / variance)
        center = (mean / variance - shift) / cavity
        indices = self.indices(center)[..., None] + torch.arange(-4, 5).to(mean)
        values = (self.first + indices.movedim(-1, 0) * self.step).movedim(0, -1)
        log = -0.5 * cavity[..., None] * (values - center[..., None]) ** 2
        log = log.masked_fill((indices < 0) | (indices > self.count - 1), -math.inf)
        weights = torch.softmax(log, -1)
        tilted_mean = (weights * values).sum(-1)
        tilted = (weights * (values - tilted_mean[..., None]) ** 2).sum(-1) + (SHARP * self.step) ** 2
        narrow = (cavity * (NARROW * self.step) ** 2 > 1) & (tilted * cavity < 1)
        none = torch.zeros_like(mean)
        new_precision = torch.where(narrow, 1 / tilted - cavity, none)
        new_shift = torch.where(narrow, tilted_mean / tilted - center * cavity, none)
        return torch.where(sure, new_precision, precision), torch.where(sure, new_shift, shift)
