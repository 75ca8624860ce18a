r"""Unmixing: which combinations of a batch's mixed signals belong to a single image, found by their zeros.

**Symbols.** B distinct images, C channels, P positions. Image b sends m_cpb through channel c at position p. Linear
algebra on a gradient (`shift_structure`) gives the columns

    y_cp = A^T m_cp,   y_cp and m_cp in R^B,                                                    (1)

with one unknown invertible A (B, B). Sought are the columns v_b of A^-1, up to order and factors: y_cp . v_b = m_cpb.

**Two values** (`unmix_two_valued`). Where global average pooling follows a ReLU, an image sends one number g_cb back to
all positions of a channel that the ReLU let pass, and nothing to the others. Of a leaky ReLU of slope a < 1, it sends
a g_cb to these:

    m_cpb = g_cb t_cpb,   t_cpb = 1 where s_cpb = 1, a where s_cpb = 0.                          (2)

1. The differences y_cp - y_cq of a channel's positions are sparse in the images' directions, as s_cpb - s_cqb is 0 more
   often than not. They are whitened such that all count alike whatever their size (Tyler's estimator), which makes the
   images' directions nearly orthogonal, and scaled to length 1: x_n.
2. Orthonormal directions u that maximize the sum of (x_n . u)^4 are near the sparsest ones. All are found together, by
   the fixed point U <- polar(X^T (X U)^3) (Zhai et al., Complete dictionary learning via l4-norm maximization, JMLR
   2020; SPEAR++, Bakarsky et al., 2025, unmixes the gradients of linear layers by such means).
3. Each is then refined for itself, without orthogonality. Given v, each channel has its best level g_c and pattern s_c
   (a threshold on the sorted values). Given these, v minimizes the weighted sum of squares of

       r_cp(v) = (y_cp - t_cp sum_q t_cq y_cq / sum_q t_cq^2) . v,                              (3)

   as an eigenvector. Weights are 1 / (r^2 + epsilon^2) with falling epsilon (iteratively reweighted least squares).
4. Missing images are looked for again where those found are not: in the orthogonal complement, from other rows, and
   from what was rejected. Images with one label have nearly proportional g, and where their patterns agree, so that
   differences of them are sparse, too: such a rejected direction is started from again with images found added.

**Sparse rows** (`unmix_sparse`). Below the top a ReLU silences a good part of an image's numbers, the others are
arbitrary. All is the same with rows y_n in place of differences, and r_n(v) = y_n . v in place of (3).

**Sparse rows of which none is below zero** (`nonnegative`), as of what a ReLU returns. Images that are alike share most
of their zeros, and such rows say nothing: they are zero whatever the direction. The rows left span a cone whose facets
are the images'. So linear programs give further directions.

**When a direction is confirmed.** All three conditions are needed. Let u be the direction that the fitted equations
r(v) = 0 exclude least: their matrix's second eigenvector.

- *It is fixed.* Noise, estimated from what the fitted equations leave, moves the image's signals by no more than
  `MAX_ERROR` of their size (`errors`): the usual covariance of least squares.
- *It fits where u does not.* A combination v of several images fits equations that all of them fit. Those leave the
  images' whole span open, u is in it, and r(u) = 0 there. So only channels (or rows) with r(u) != 0 count.
- *Chance does not fit so many of them.* See `_log_chance`. Of n that count, f fit. v has B - 1 free numbers, that can
  make k fit. If a wrong direction fits one with a probability of at most q, the chance that it does is at most

      C(n, k) exp(-(n - k) KL((f - k) / (n - k) || q)),                                         (4)

  KL the divergence between two coins (Chernoff's bound). It must be below `MAX_FALSE_ACCEPTANCE`.

For two values, a channel counts if it has both levels, and k = ceil((B - 1) / (P - 1)). q = `MAX_FALSE_FIT` is
measured: the combinations of two images that fit best are differences of two with the same label, that have two values
where one's pattern holds the other's. On untrained ResNets 38 to 56 % of channels were so, 27 % or less in all other
false minima. For sparse rows k = B - 1, all rows within `WIDE` times the noise of zero count, and those in the inmost
part of them fit, which is q of them where no zeros heap up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from attacks.search_control import check_time_limit
from fl.seeds import stream

STARTING_ROWS, SMALL_ROW = 12_000, 1e-3
"""Rows that are drawn to start from, and the size, relative to the largest, below which a row is left out."""
MIN_SPREAD = 0.1
"""A channel counts by its spread over positions, or by this share of its size: one that hardly varies outweighs all."""
WHITENINGS = 8
"""Iterations of Tyler's estimator."""
ASCENTS = 80
"""Iterations of the fixed point, at most."""
ASCENDED = 1e-4
"""Change of directions at which the fixed point counts as reached."""
REFINEMENTS = 40
"""Reweightings, at most."""
FIRST_EPSILON = 0.1
"""The first epsilon, relative to a channel's spread or a row's size."""
LAST_EPSILON = 1e-4
"""The last epsilon."""
EPSILON_STEP = 0.7
"""Factor from one epsilon to the next."""
CONVERGED = 1e-10
"""Change of a direction at which reweighting ends: one less the cosine."""
NEAR_FITS = (0.3, 0.2, 0.1, 0.1)
"""How far positions may be off, relative to the level, in channels that least squares fit at the end."""
LARGE_LEVEL, SAME_RATIO, ALIKE = 0.8, 0.1, 0.5
"""Two directions may hold something of one image if their levels have one ratio, this quantile of all, up to so much in
such a share of the channels where both are large."""
RANDOM_SUMS, MIXED_IMAGES = 48, 4.0
"""Random sums of a rejected direction and images found looked at, and how many images these hold on average."""
NOISE_DEVIATIONS, ROUNDING = 12.0, 1e-4
"""What may be zero: so many standard deviations of noise, and such a share of the mixed row."""
CLEAR_LEVEL = 4.0
"""A channel tells something if its level is so many times what may be zero."""
MISFIT = 0.1
"""How far a position is off its level, relative to the level, where a direction does not fit a channel."""
MAX_FALSE_FIT, MIN_FIT = 0.6, 0.98
"""Share of the channels that count which fit a wrong direction at most, and a right one at least."""
VERTICES = 4
"""Linear programs of a round for each image."""
SURE_ZEROS, FIRST_NOISE, NOISE_ROUNDS, ZERO_FITS = 0.1, 3.0, 6, 4
"""Share of rows that are zeros for certain, the deviation for which the largest of them is taken (of a quarter, a tenth
reach half a deviation), and rounds of estimating it and of fitting the rows that are zero up to it."""
WIDE, MAX_FALSE_ZEROS = 10.0, 0.2
"""How many times the noise is looked at around zero, and the share of it inmost without zeros heaped up: a tenth if
spread evenly, twice that for safety."""
AGAINST = 0.3
"""How large r(u) must be in a row that counts, relative to its root mean square over all rows."""
MAX_FALSE_ACCEPTANCE = 1e-9
"""The largest chance in (4) for a single direction."""
MAX_ERROR = 0.1
"""Relative error of an image's signals up to which a direction counts as fixed."""
SAME_ERRORS, SAME = 10.0, 1e-3
"""Sine of the angle up to which two directions are one: in errors of both, and whatever these are."""


@dataclass(frozen=True)
class Unmixing:
    """Directions that take single images out of a mixture.

    Attributes:
        directions: (B, k), confirmed ones first: columns (..., B) @ directions are images' signals up to a factor each.
        confirmed: (k,) bool: which are images for certain.
        errors: (k,) by how much noise may have moved an image's signals, relative to them.
    """

    directions: Tensor
    confirmed: Tensor
    errors: Tensor

    @property
    def unmixing(self) -> Tensor:
        """The confirmed directions (B, n)."""
        return self.directions[:, self.confirmed]

    @property
    def complete(self) -> bool:
        """Whether all images are confirmed."""
        return int(self.confirmed.sum()) == len(self.directions)


def unmix_two_valued(columns: Tensor, *, slope: float = 0.0, rounds: int = 8, seed: int = 0) -> Unmixing:
    """Return the directions in which each channel sends one number, or `slope` times it, at every position.

    Args:
        columns: (C, P, B), B the number of *distinct* images, as the rank of the convolution's gradient over P tells
            (`shift_structure.count_images`). Equal pictures have equal patterns and proportional signals if they have
            one label: they are one column, and the direction found has the sum of their signals. Different pictures
            with the same label are no trouble.
        slope: of the activation below zero, a; 0 of a ReLU.
        rounds: the search ends after so many rounds that found no further image.
        seed: of the draws.

    Returns:
        What was found. Fewer than B directions are confirmed where noise, counts or rounds did not allow more.
    """
    return _unmix(partial(_TwoValued, slope), columns, rounds, stream(seed, "unmix", "two-valued"))


def unmix_sparse(rows: Tensor, *, nonnegative: bool = False, rounds: int = 8, seed: int = 0) -> Unmixing:
    """Return the directions in which many rows are exactly zero: the signals (or features) of single images.

    Args:
        rows: (N, B), B the number of distinct images; a quarter or more of the rows should be zero for each image.
        nonnegative: whether no image's number is below zero, as of what a ReLU returns. Fewer zeros do then.
        rounds: the search ends after so many rounds that found no further image.
        seed: of the draws.

    Returns:
        What was found. Fewer than B directions are confirmed where noise, counts or rounds did not allow more.
    """
    kind = _NonnegativeSparse if nonnegative else _Sparse
    return _unmix(kind, rows, rounds, stream(seed, "unmix", "sparse"))


def _unmix(
    problem: Callable[[Tensor, torch.Generator], _Problem], mixed: Tensor, rounds: int, draw: torch.Generator
) -> Unmixing:
    """Return what the search finds in mixed signals (..., B), brought to float64 and a largest number of 1."""
    mixed = mixed.double()
    return _search(problem(mixed / mixed.abs().max().clamp_min(1e-300), draw), rounds, draw)


@dataclass(frozen=True)
class _Candidates:
    """Directions in whitened coordinates (k, B), of length 1, and what became of their test."""

    directions: Tensor
    confirmed: Tensor
    errors: Tensor
    log_chances: Tensor

    def take(self, which: Tensor) -> _Candidates:
        """Return some of them, in this order."""
        return _Candidates(self.directions[which], self.confirmed[which], self.errors[which], self.log_chances[which])

    @staticmethod
    def join(some: _Candidates, others: _Candidates) -> _Candidates:
        """Return both, one after the other."""
        return _Candidates(
            torch.cat([some.directions, others.directions]),
            torch.cat([some.confirmed, others.confirmed]),
            torch.cat([some.errors, others.errors]),
            torch.cat([some.log_chances, others.log_chances]),
        )

    def independent(self) -> _Candidates:
        """Return, the best first, the candidates that are not in the span of better ones."""
        order = torch.argsort(torch.where(self.confirmed, 0.0, 1e3) + self.errors.clamp(max=100.0))
        chosen: list[int] = []
        basis = self.directions[:0]
        for i in order.tolist():
            if len(chosen) == self.directions.shape[1]:
                break
            rest = self.directions[i] - (self.directions[i] @ basis.mT) @ basis
            worst = max((float(self.errors[j]) for j in chosen), default=0.0)
            if float(rest.norm()) > max(SAME, SAME_ERRORS * min(float(self.errors[i]) + worst, 0.05)):
                chosen.append(i)
                basis = torch.cat([basis, rest[None] / rest.norm()])
        return self.take(torch.tensor(chosen, dtype=torch.long, device=order.device))


class _Problem(ABC):
    """Mixed signals, and what a single image's look like.

    Attributes:
        whitening: W (B, B); directions are looked for in the coordinates y W.
        images: B.
    """

    whitening: Tensor
    images: int

    @abstractmethod
    def starting_rows(self, draw: torch.Generator) -> Tensor:
        """Return rows (n, B) of length 1, in whitened coordinates, in which an image is silent more often than not."""

    @abstractmethod
    def refine(self, directions: Tensor) -> Tensor:
        """Return directions (k, B) that fit better than these."""

    def corrections(self, rejected: Tensor, found: Tensor, draw: torch.Generator) -> Tensor:
        """Return starts (n, B) that are rejected directions (k, B) less what they may have of images found (m, B)."""
        return rejected[:0]

    def draw_vertices(self, draw: torch.Generator) -> Tensor:
        """Return directions (n, B) that linear programs give, to be judged as they are."""
        return self.whitening[:0]

    @abstractmethod
    def judge_one(self, direction: Tensor) -> tuple[bool, float, float]:
        """Return whether the direction (B,) is an image's, its error and the logarithm of (4)."""

    def judge(self, directions: Tensor) -> _Candidates:
        """Return the directions (k, B) with their errors and tests."""
        tests = [self.judge_one(v) for v in directions]
        confirmed, errors, chances = zip(*tests, strict=True) if tests else ((), (), ())
        device = directions.device
        return _Candidates(
            directions,
            torch.tensor(confirmed, dtype=torch.bool, device=device),
            torch.tensor(errors, dtype=torch.float64, device=device),
            torch.tensor(chances, dtype=torch.float64, device=device),
        )


def _search(problem: _Problem, rounds: int, draw: torch.Generator) -> Unmixing:
    """Find as many images as there are, those missing anew each round."""
    found = problem.judge(torch.eye(problem.images, dtype=torch.float64, device=problem.whitening.device)[:0])
    rejected, idle = found, 0
    while True:
        check_time_limit()
        free = _complement(found.directions, problem.images)
        starts = _kurtosis_maxima(problem.starting_rows(draw) @ free, draw) @ free.mT
        corrections = problem.corrections(rejected.directions, found.directions, draw)
        starts = torch.cat([starts, corrections[: 2 * free.shape[1]]])
        judged = problem.judge(torch.cat([problem.refine(starts), problem.draw_vertices(draw)]))
        known = len(found.directions)
        found = _Candidates.join(found, judged.take(judged.confirmed)).independent()
        rejected = judged.take(~judged.confirmed)
        missing = problem.images - len(found.directions)
        rejected = rejected.take(rejected.log_chances.argsort()[: 2 * missing])
        idle = 0 if len(found.directions) > known else idle + 1
        if not missing or idle == rounds:
            break
    found = _Candidates.join(found, rejected).independent()
    return Unmixing(problem.whitening @ found.directions.mT, found.confirmed, found.errors)


def _complement(directions: Tensor, size: int) -> Tensor:
    """Return an orthonormal basis (size, m) of what is orthogonal to the directions (k, size)."""
    if not len(directions):
        return torch.eye(size, dtype=directions.dtype, device=directions.device)
    return torch.linalg.svd(directions.mT, full_matrices=True)[0][:, len(directions) :]


def _kurtosis_maxima(rows: Tensor, draw: torch.Generator) -> Tensor:
    """Return orthonormal directions (m, m), one a row, near the sparsest ones of rows (n, m): step 2."""
    size = rows.shape[1]
    start = torch.randn(size, size, generator=draw, dtype=torch.float64).to(rows)
    rotation = torch.linalg.qr(start)[0]
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    for _ in range(ASCENTS):
        left, _, right = torch.linalg.svd(rows.mT @ (rows @ rotation) ** 3)
        last, rotation = rotation, left @ right
        if 1 - float((last * rotation).sum(0).abs().min()) < ASCENDED:
            break
    return rotation.mT.contiguous()


def _whitening(rows: Tensor) -> Tensor:
    """Return W (B, B) such that rows (n, B) @ W, scaled to length 1, have one variance in all directions (Tyler)."""
    size = rows.shape[1]
    whitening = torch.eye(size, dtype=rows.dtype, device=rows.device)
    for number in range(WHITENINGS):
        check_time_limit()
        white = rows @ whitening
        if number:
            white = white / white.norm(dim=1, keepdim=True).clamp_min(1e-300)
        values, vectors = torch.linalg.eigh(white.mT @ white / len(white) * size)
        whitening = whitening @ (vectors / values.clamp_min(1e-12 * values[-1]).sqrt())
    return whitening


def _large(rows: Tensor) -> Tensor:
    """Return the rows that are not too small to count."""
    size = rows.norm(dim=1)
    return rows[size > SMALL_ROW * size.max()]


def _log_chance(fits: int, count: int, free: int, rate: float) -> float:
    """Return the logarithm of (4): `fits` of `count` fit, `free` of them for nothing, the others at `rate` at most."""
    fits, count_left = fits - free, count - free
    if fits <= 0 or count_left <= 0 or fits <= rate * count_left:
        return 0.0
    share = fits / count_left
    divergence = share * math.log(share / rate)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - rate))
    choices = math.lgamma(count + 1) - math.lgamma(free + 1) - math.lgamma(count_left + 1)
    return choices - count_left * divergence


def _weakest(equations: Tensor) -> Tensor:
    """Return the direction (B,) that satisfies equations (n, B) best."""
    return torch.linalg.eigh(equations.mT @ equations)[1][:, 0]


class _TwoValued(_Problem):
    """Columns (C, P, B) of signals with two values in each channel."""

    def __init__(self, slope: float, columns: Tensor, draw: torch.Generator) -> None:
        self.slope = slope
        self.images = columns.shape[2]
        self.columns = columns
        self.whitening = torch.eye(self.images, dtype=columns.dtype, device=columns.device)
        if self.images > 1 and columns.shape[1] > 1:
            self.whitening = _whitening(_large(self._differences(draw)))
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
        return _large(self._differences(draw))

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
            direction = _weakest(equations.flatten(0, 1))
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
            direction = _weakest(fit.equations(self.scaled)[fits].flatten(0, 1))
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
        error, second = _least_squares_error(equations[fits].flatten(0, 1), self.columns.flatten(0, 1), direction)
        counted = told & (fit.inside < positions)
        if self.images > 1:
            against = (equations @ second).abs().amax(1)
            counted &= against > MISFIT * (self.columns @ second).abs().amax(1)
        count, fitted = int(counted.sum()), int((counted & fits).sum())
        spent = math.ceil((self.images - 1) / max(positions - 1, 1))
        chance = _log_chance(fitted, count, spent, MAX_FALSE_FIT)
        sure = chance < math.log(MAX_FALSE_ACCEPTANCE) and fitted >= MIN_FIT * count and error < MAX_ERROR
        return sure, error, chance


@dataclass(frozen=True)
class _LevelFit:
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


def _fit_levels(values: Tensor, slope: float) -> _LevelFit:
    """Return the levels of values (C, P) that are best for least squares."""
    pattern = _two_levels(values, slope).to(values.dtype)
    shape = pattern + slope * (1 - pattern)
    inside = pattern.sum(1)
    level = (values * shape).sum(1) / shape.square().sum(1)
    residual = (values - level[:, None] * shape).abs()
    free = (pattern == 0) | (inside[:, None] >= 3)  # a level of one or two positions leaves little
    noise = 1.4826 * float(residual[free].median()) if bool(free.any()) else 0.0
    return _LevelFit(pattern, shape, inside, level, residual, noise)


def _least_squares_error(equations: Tensor, rows: Tensor, direction: Tensor) -> tuple[float, Tensor]:
    """Return how far noise may move rows @ direction, relative to it, and the direction that equations exclude least.

    Args:
        equations: (n, B); the direction fits each of them up to noise.
        rows: (N, B).
        direction: (B,) of length 1.
    """
    size = len(direction)
    if size == 1:
        return float((equations @ direction).pow(2).mean().sqrt() / (rows @ direction).pow(2).mean().sqrt()), direction
    rest = _complement(direction[None], size)  # (B, B - 1)
    values, vectors = torch.linalg.eigh(rest.mT @ (equations.mT @ (equations @ rest)))
    variance = (equations @ direction).pow(2).sum() / max(len(equations) - size, 1)
    moved = (rows @ (rest @ vectors)).pow(2).sum(0) / values.clamp_min(1e-300)
    error = (variance * moved.sum() / (rows @ direction).pow(2).sum()).sqrt()
    return float(error), rest @ vectors[:, 0]


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


class _Sparse(_Problem):
    """Rows (N, B) of signals, many of which are zero."""

    def __init__(self, rows: Tensor, draw: torch.Generator) -> None:
        rows = rows[(rows != 0).any(1)]  # zeros in all directions hide how large the noise is
        self.images = rows.shape[1]
        self.whitening = torch.eye(self.images, dtype=rows.dtype, device=rows.device)
        self.rows = rows
        if self.images > 1:
            self.whitening = _whitening(_large(self._draw(draw)))
        self.rows = rows @ self.whitening
        large = _large(self.rows)
        self.scaled = large / large.norm(dim=1, keepdim=True)

    def _draw(self, draw: torch.Generator) -> Tensor:
        return self.rows[torch.randperm(len(self.rows), generator=draw)[:STARTING_ROWS]]

    def starting_rows(self, draw: torch.Generator) -> Tensor:
        """Return some rows."""
        rows = _large(self._draw(draw))
        return rows / rows.norm(dim=1, keepdim=True)

    def refine(self, directions: Tensor) -> Tensor:
        """Return the directions after reweighted least squares."""
        for number in range(REFINEMENTS):
            epsilon = max(FIRST_EPSILON * EPSILON_STEP**number, LAST_EPSILON)
            weights = 1 / ((self.scaled @ directions.mT).pow(2) + epsilon**2).sqrt()  # (N, k)
            last = directions
            directions = torch.stack([_weakest(self.scaled * w[:, None]) for w in weights.mT])
            if epsilon == LAST_EPSILON and float(1 - (directions * last).sum(1).abs().min()) < CONVERGED:
                break
        return torch.stack([self._fit_zeros(v) for v in directions])

    def _fit_zeros(self, direction: Tensor) -> Tensor:
        """Return the direction after least squares on the rows that are zero in it up to noise."""
        for _ in range(ZERO_FITS):
            values = (self.rows @ direction).abs()
            zero = values <= NOISE_DEVIATIONS * _noise(values)
            if int(zero.sum()) <= 2 * self.images:
                break
            direction = _weakest(self.rows[zero])
        return direction

    def judge_one(self, direction: Tensor) -> tuple[bool, float, float]:
        """Return whether the direction is an image's, its error and the logarithm of (4)."""
        values = (self.rows @ direction).abs()
        noise = _noise(values)
        zero = values <= NOISE_DEVIATIONS * noise
        if int(zero.sum()) <= 2 * self.images:
            return False, math.inf, 0.0
        error, second = _least_squares_error(self.rows[zero], self.rows, direction)
        against = (self.rows @ second).abs()
        counted = values <= WIDE * NOISE_DEVIATIONS * noise
        if self.images > 1:
            # A row that a combination of two images passes by chance fixes it and tilts u slightly out of their plane:
            # what r(u) is by that tilt must not count, however far above the noise.
            counted &= against > torch.clamp(
                AGAINST * against.pow(2).mean().sqrt(), min=WIDE * NOISE_DEVIATIONS * noise
            )
        chance = _log_chance(int((zero & counted).sum()), int(counted.sum()), self.images - 1, MAX_FALSE_ZEROS)
        return chance < math.log(MAX_FALSE_ACCEPTANCE) and error < MAX_ERROR, error, chance


class _NonnegativeSparse(_Sparse):
    """Rows (N, B) of numbers of which many are zero and none is below it."""

    def draw_vertices(self, draw: torch.Generator) -> Tensor:
        """Return directions (n, B) in which no row is below zero, and as many are zero as can be.

        With rows y the directions v with y . v >= 0 for all of them make a cone. Where each image is alone in some
        rows, its edges are the images' directions. A linear program with a random objective ends at one of them.
        """
        rows = self.scaled.cpu().numpy()
        mean = rows.mean(0)
        objectives = torch.randn(VERTICES * self.images, self.images, generator=draw, dtype=torch.float64).numpy()
        found = []
        for objective in objectives:
            check_time_limit()
            solved = linprog(
                objective, A_ub=-rows, b_ub=np.zeros(len(rows)), A_eq=mean[None], b_eq=[1.0], bounds=(None, None)
            )
            if solved.status == 0 and any(solved.x):
                found.append(torch.as_tensor(solved.x / np.linalg.norm(solved.x), device=self.scaled.device))
        return torch.stack([self._fit_zeros(v) for v in found]) if found else super().draw_vertices(draw)


def _noise(values: Tensor) -> float:
    """Return the standard deviation of the zeros among absolute values (N,), a quarter or more of which are zeros."""
    noise = FIRST_NOISE * float(values.quantile(SURE_ZEROS))
    for _ in range(NOISE_ROUNDS):
        noise = float(values[values <= NOISE_DEVIATIONS * noise].pow(2).mean().sqrt())
    return noise
