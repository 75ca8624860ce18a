"""The values that a pixel of so many bits may take, as a factor of the propagation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NARROW = 0.6
"""Standard deviation, in steps between two levels, below which levels are told apart."""
SHARP = 0.15
"""Standard deviation, in steps, that a pixel on its level keeps."""

ON = 1e-6
"""Steps between two levels within which a pixel lies on one."""

OWN = 0.02
"""Share of a pixel's precision that must come from elsewhere for its site to be formed anew: less is rounding."""


@dataclass(frozen=True)
class Levels:
    """Equally distant values, the same for all pixels of a channel, in a network's normalised units.

    Attributes:
        first: the lowest, by channel (I, 1, 1).
        step: between neighbours (I, 1, 1).
        count: how many.
    """

    first: Tensor
    step: Tensor
    count: int

    @classmethod
    def of(cls, mean: Tensor, std: Tensor, count: int = 256) -> Levels:
        """Those of [0, 1], with the mean and standard deviation (I,) of an image's normalisation."""
        std = std[:, None, None]
        return cls(-mean[:, None, None] / std, 1 / (std * (count - 1)), count)

    def nearest(self, x: Tensor) -> Tensor:
        """Every pixel of X (I, H, W) on its nearest level."""
        return self.values(self.number(x))

    def hold(self, x: Tensor) -> bool:
        """Whether every pixel of X (I, H, W) is on a level."""
        return bool(((x - self.nearest(x)).abs() < ON * self.step).all())

    def values(self, number: Tensor) -> Tensor:
        """The pixels on these levels (I, H, W)."""
        return self.first + number * self.step

    def descend(self, x: Tensor, matrix: Tensor, right: Tensor, moves: int = 500) -> Tensor:
        """Moves single pixels of X (I, H, W) to a neighbouring level, for as long as x.matrix.x / 2 - right.x falls."""
        step = self.step.expand_as(x).flatten()
        number = self.number(x).flatten()
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

    def number(self, x: Tensor) -> Tensor:
        """Which level every pixel of X (I, H, W) is nearest to, from 0 on."""
        return ((x - self.first) / self.step).round().clamp(0, self.count - 1)

    def sites(self, mean: Tensor, variance: Tensor, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The Gaussians that stand for "on some level", given everything else: precision, precision times mean.

        They match the first two moments (Minka, 2001); nothing where the levels can't be told apart yet.

        Args:
            mean: of every pixel (I, H, W).
            variance: of every pixel (I, H, W).
            precision: of the sites that are in both (I, H, W).
            shift: precision times mean of these (I, H, W).
        """
        rest = 1 / variance - precision
        sure = rest * variance > OWN
        rest = torch.where(sure, rest, 1 / variance)
        centre = (mean / variance - shift) / rest
        numbers = self.number(centre)[..., None] + torch.arange(-4, 5).to(mean)
        values = (self.first + numbers.movedim(-1, 0) * self.step).movedim(0, -1)
        log = -0.5 * rest[..., None] * (values - centre[..., None]) ** 2
        log = log.masked_fill((numbers < 0) | (numbers > self.count - 1), -math.inf)
        weights = torch.softmax(log, -1)
        found = (weights * values).sum(-1)
        spread = (weights * (values - found[..., None]) ** 2).sum(-1) + (SHARP * self.step) ** 2
        told = (rest * (NARROW * self.step) ** 2 > 1) & (spread * rest < 1)
        none = torch.zeros_like(mean)
        found_precision = torch.where(told, 1 / spread - rest, none)
        found_shift = torch.where(told, found / spread - centre * rest, none)
        return torch.where(sure, found_precision, precision), torch.where(sure, found_shift, shift)
