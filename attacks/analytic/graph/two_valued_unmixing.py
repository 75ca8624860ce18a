"""Mixed signals of images that send one of two numbers through each channel (`unmixing`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from attacks.analytic.graph.unmixing_search import (
    CONVERGED,
    EPSILON_STEP,
    FIRST_EPSILON,
    LAST_EPSILON,
    MAX_ERROR,
    MAX_FALSE_ACCEPTANCE,
    NOISE_DEVIATIONS,
    REFINEMENTS,
    ROUNDING,
    SAME,
    SMALL_ROW,
    STARTING_ROWS,
    UnmixingProblem,
    large_rows,
    least_squares_error,
    log_chance,
    weakest_direction,
    whiten,
)

MIN_SPREAD = 0.1
"""A channel counts by its spread over positions, or by this share of its size: one that hardly varies outweighs all."""
NEAR_FITS = (0.3, 0.2, 0.1, 0.1)
"""How far positions may be off, relative to the level, in channels that least squares fit at the end."""
LARGE_LEVEL, SAME_RATIO, ALIKE = 0.8, 0.1, 0.5
"""Two directions may hold something of one image if their levels have one ratio, this quantile of all, up to so much in
such a share of the channels where both are large."""
RANDOM_SUMS, MIXED_IMAGES = 48, 4.0
"""Random sums of a rejected direction and images found looked at, and how many images these hold on average."""
CLEAR_LEVEL = 4.0
"""A channel tells something if its level is so many times what may be zero."""
MISFIT = 0.1
"""How far a position is off its level, relative to the level, where a direction does not fit a channel."""
MAX_FALSE_FIT, MIN_FIT = 0.6, 0.98
"""Share of the channels that count which fit a wrong direction at most, and a right one at least."""


class TwoValuedUnmixing(UnmixingProblem):
    """Columns (C, P, B) of signals with two values in each channel."""

    def __init__(self, slope: float, columns: Tensor, draw: torch.Generator) -> None:
        self.slope = slope
        self.images = columns.shape[2]
        self.columns = columns
        self.whitening = torch.eye(self.images, dtype=columns.dtype, device=columns.device)
        if self.images > 1 and columns.shape[1] > 1:
            self.whitening = whiten(large_rows(self._differences(draw)))
        self.columns = columns @ self.whitening
        spread = (self.columns - self.columns.mean(1, keepdim=True)).pow(2).sum(2).mean(1).sqrt()
        varied = spread > SMALL_ROW * spread.max()
        size = torch.maximum(spread, MIN_SPREAD * self.columns.pow(2).sum(2).mean(1).sqrt())
        self.scaled = self.columns[varied] / size[varied, None, None]

    def _differences(self, draw: torch.Generator) -> Tensor:
        channels, positions, _ = self.columns.shape
        channel = torch.randint(channels, (STARTING_ROWS,), generator=draw)
        one = torch.randint(positions, (STARTING_ROWS,), generator=draw)
        other = (one + torch.randint(1, max(positions, 2), (STARTING_ROWS,), generator=draw)) % positions
        return self.columns[channel, one] - self.columns[channel, other]

    def starting_rows(self, draw: torch.Generator) -> Tensor:
        """Return differences of a channel's positions."""
        return large_rows(self._differences(draw))

    def refine(self, directions: Tensor) -> Tensor:
        """Return the directions after step 3, by reweighted least squares."""
        return torch.stack([self._fit_channels(self._reweigh(v)) for v in directions])

    def _reweigh(self, direction: Tensor) -> Tensor:
        for number in range(REFINEMENTS):
            fit = _fit_levels(self.scaled @ direction, self.slope)
            falling = FIRST_EPSILON * EPSILON_STEP**number
            epsilon = max(falling, LAST_EPSILON, fit.noise)
            last = direction
            weights = 1 / (fit.residual.pow(2) + epsilon**2)
            inside = weights * fit.shape
            mean = (inside[:, None] @ self.scaled) / (inside * fit.shape).sum(1)[:, None, None]
            equations = (self.scaled - fit.shape[..., None] * mean) * weights.sqrt()[..., None]
            direction = weakest_direction(equations.flatten(0, 1))
            if falling < epsilon and 1 - abs(float(direction @ last)) < CONVERGED:
                break
        return direction

    def _fit_channels(self, direction: Tensor) -> Tensor:
        """Return the direction after least squares on the channels that nearly fit it."""
        for off in NEAR_FITS:
            fit = _fit_levels(self.scaled @ direction, self.slope)
            fits = fit.residual.amax(1) <= off * fit.level.abs() + NOISE_DEVIATIONS * fit.noise
            if int(fits.sum()) * self.scaled.shape[1] <= 2 * self.images:
                break
            direction = weakest_direction(fit.equations(self.scaled)[fits].flatten(0, 1))
        return direction

    def corrections(self, rejected: Tensor, found: Tensor, draw: torch.Generator) -> Tensor:
        """Return sums of a rejected direction and images found, the best first: up to two of like levels, or any."""
        if not len(rejected) or not len(found):
            return rejected[:0]
        levels = torch.stack([_fit_levels(self.scaled @ v, self.slope).level.abs() for v in found])  # (m, C)
        levels = levels.clamp_min(1e-300)
        starts = []
        for direction in rejected:
            ratios = _fit_levels(self.scaled @ direction, self.slope).level.abs() / levels
            factors = ratios.quantile(LARGE_LEVEL, dim=1, keepdim=True)
            ratios = ratios / factors  # 1 where the two differ and 0 elsewhere, if one holds something of the other
            alike = ((ratios - 1).abs() < SAME_RATIO).sum(1) > ALIKE * (ratios > 0.5).sum(1)
            terms = (found * factors)[alike]
            parts = torch.cat([terms, -terms])
            starts += [direction + part for part in parts]
            starts += [direction + one + other for one, other in combinations(parts, 2)]
            size = (RANDOM_SUMS, len(found))
            shares = 2 * torch.rand(*size, generator=draw, dtype=torch.float64) - 1
            shares *= torch.rand(*size, generator=draw, dtype=torch.float64) * len(found) < MIXED_IMAGES
            starts += list(direction + shares.to(found) @ found)
        if not starts:
            return rejected[:0]
        corrected = torch.stack(starts)
        corrected = corrected[corrected.norm(dim=1) > SAME]
        corrected = corrected / corrected.norm(dim=1, keepdim=True)
        misfits = torch.stack([_fit_levels(self.scaled @ v, self.slope).misfit() for v in corrected])
        return corrected[misfits.argsort()]

    def judge_one(self, direction: Tensor) -> tuple[bool, float, float]:
        """Return whether the direction is an image's, its error and the logarithm of (4)."""
        positions = self.columns.shape[1]
        fit = _fit_levels(self.columns @ direction, self.slope)
        within = NOISE_DEVIATIONS * fit.noise + ROUNDING * self.columns.norm(dim=2).amax(1)  # (C,)
        told = fit.level.abs() > CLEAR_LEVEL * within
        fits = told & (fit.residual.amax(1) <= within)
        if int(fits.sum()) * positions <= 2 * self.images:
            return False, math.inf, 0.0
        equations = fit.equations(self.columns)
        error, second = least_squares_error(equations[fits].flatten(0, 1), self.columns.flatten(0, 1), direction)
        counted = told & (fit.inside < positions)
        if self.images > 1:
            against = (equations @ second).abs().amax(1)
            counted &= against > MISFIT * (self.columns @ second).abs().amax(1)
        count, fitted = int(counted.sum()), int((counted & fits).sum())
        spent = math.ceil((self.images - 1) / max(positions - 1, 1))
        chance = log_chance(fitted, count, spent, MAX_FALSE_FIT)
        sure = chance < math.log(MAX_FALSE_ACCEPTANCE) and fitted >= MIN_FIT * count and error < MAX_ERROR
        return sure, error, chance


@dataclass(frozen=True)
class LevelFit:
    """The best two levels of each channel, one of its own and a share of it.

    Attributes:
        pattern: s (C, P), 1.0 at the level and 0.0 at its share.
        shape: t (C, P).
        inside: (C,) how many positions are at the level.
        level: g (C,).
        residual: (C, P), absolute.
        noise: the standard deviation of the residuals if half of them are nothing but noise.
    """

    pattern: Tensor
    shape: Tensor
    inside: Tensor
    level: Tensor
    residual: Tensor
    noise: float

    def equations(self, columns: Tensor) -> Tensor:
        """Return (3) for columns (C, P, B): the rows (C, P, B) that a direction with this pattern is orthogonal to."""
        mean = (self.shape[:, None] @ columns) / self.shape.square().sum(1)[:, None, None]
        return columns - self.shape[..., None] * mean

    def misfit(self) -> Tensor:
        """Return how far channels are off, relative to their levels and at most 1 each, in the mean."""
        return (self.residual.amax(1) / self.level.abs().clamp_min(1e-300)).clamp(max=1).mean()


def _fit_levels(values: Tensor, slope: float) -> LevelFit:
    """Return the levels of values (C, P) that are best for least squares."""
    pattern = _two_levels(values, slope).to(values.dtype)
    shape = pattern + slope * (1 - pattern)
    inside = pattern.sum(1)
    level = (values * shape).sum(1) / shape.square().sum(1)
    residual = (values - level[:, None] * shape).abs()
    free = (pattern == 0) | (inside[:, None] >= 3)  # a level of one or two positions leaves little
    noise = 1.4826 * float(residual[free].median()) if bool(free.any()) else 0.0
    return LevelFit(pattern, shape, inside, level, residual, noise)


def _two_levels(values: Tensor, slope: float) -> Tensor:
    """Return which of values (C, P) are at the level g, the others at `slope` g (bool), best for least squares."""
    count = values.shape[1]
    numbers = torch.arange(1, count + 1, dtype=values.dtype, device=values.device)
    squares = numbers + slope**2 * (count - numbers)
    order = values.argsort(1, descending=True)
    ordered = values.gather(1, order)
    above = (_sums(ordered, slope).clamp_min(0) ** 2 / squares).max(1)
    below = (_sums(ordered.flip(1), slope).clamp_max(0) ** 2 / squares).max(1)
    positive = above.values >= below.values
    size = torch.where(positive, above.indices, below.indices) + 1
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(count, device=values.device).expand_as(order))
    rank = torch.where(positive[:, None], rank, count - 1 - rank)
    return rank < size[:, None]


def _sums(ordered: Tensor, slope: float) -> Tensor:
    """Return sum_p t_p v_p of ordered values v (C, P), with the first one at the level, the first two, and so on."""
    first = ordered.cumsum(1)
    return first + slope * (first[:, -1:] - first)
