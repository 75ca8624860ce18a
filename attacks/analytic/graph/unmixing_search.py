"""The search for single images in mixed signals, which rounds of starts, refinement and tests make (`unmixing`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.search_control import check_time_limit

STARTING_ROWS, SMALL_ROW = 12_000, 1e-3
"""Rows that are drawn to start from, and the size, relative to the largest, below which a row is left out."""
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
NOISE_DEVIATIONS, ROUNDING = 12.0, 1e-4
"""What may be zero: so many standard deviations of noise, and such a share of the mixed row."""
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


@dataclass(frozen=True)
class Candidates:
    """Directions in whitened coordinates (k, B), of length 1, and what became of their test."""

    directions: Tensor
    confirmed: Tensor
    errors: Tensor
    log_chances: Tensor

    def take(self, which: Tensor) -> Candidates:
        """Return some of them, in this order."""
        return Candidates(self.directions[which], self.confirmed[which], self.errors[which], self.log_chances[which])

    @staticmethod
    def join(some: Candidates, others: Candidates) -> Candidates:
        """Return both, one after the other."""
        return Candidates(
            torch.cat([some.directions, others.directions]),
            torch.cat([some.confirmed, others.confirmed]),
            torch.cat([some.errors, others.errors]),
            torch.cat([some.log_chances, others.log_chances]),
        )

    def independent(self) -> Candidates:
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


class UnmixingProblem(ABC):
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

    def judge(self, directions: Tensor) -> Candidates:
        """Return the directions (k, B) with their errors and tests."""
        tests = [self.judge_one(v) for v in directions]
        confirmed, errors, chances = zip(*tests, strict=True) if tests else ((), (), ())
        device = directions.device
        return Candidates(
            directions,
            torch.tensor(confirmed, dtype=torch.bool, device=device),
            torch.tensor(errors, dtype=torch.float64, device=device),
            torch.tensor(chances, dtype=torch.float64, device=device),
        )


def search(problem: UnmixingProblem, rounds: int, draw: torch.Generator) -> Unmixing:
    """Find as many images as there are, those missing anew each round."""
    found = problem.judge(torch.eye(problem.images, dtype=torch.float64, device=problem.whitening.device)[:0])
    rejected, idle = found, 0
    while True:
        check_time_limit()
        free = complement(found.directions, problem.images)
        starts = _kurtosis_maxima(problem.starting_rows(draw) @ free, draw) @ free.mT
        corrections = problem.corrections(rejected.directions, found.directions, draw)
        starts = torch.cat([starts, corrections[: 2 * free.shape[1]]])
        judged = problem.judge(torch.cat([problem.refine(starts), problem.draw_vertices(draw)]))
        known = len(found.directions)
        found = Candidates.join(found, judged.take(judged.confirmed)).independent()
        rejected = judged.take(~judged.confirmed)
        missing = problem.images - len(found.directions)
        rejected = rejected.take(rejected.log_chances.argsort()[: 2 * missing])
        idle = 0 if len(found.directions) > known else idle + 1
        if not missing or idle == rounds:
            break
    found = Candidates.join(found, rejected).independent()
    return Unmixing(problem.whitening @ found.directions.mT, found.confirmed, found.errors)


def complement(directions: Tensor, size: int) -> Tensor:
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


def whiten(rows: Tensor) -> Tensor:
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


def large_rows(rows: Tensor) -> Tensor:
    """Return the rows that are not too small to count."""
    size = rows.norm(dim=1)
    return rows[size > SMALL_ROW * size.max()]


def log_chance(fits: int, count: int, free: int, rate: float) -> float:
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


def weakest_direction(equations: Tensor) -> Tensor:
    """Return the direction (B,) that satisfies equations (n, B) best."""
    return torch.linalg.eigh(equations.mT @ equations)[1][:, 0]


def least_squares_error(equations: Tensor, rows: Tensor, direction: Tensor) -> tuple[float, Tensor]:
    """Return how far noise may move rows @ direction, relative to it, and the direction that equations exclude least.

    Args:
        equations: (n, B); the direction fits each of them up to noise.
        rows: (N, B).
        direction: (B,) of length 1.
    """
    size = len(direction)
    if size == 1:
        return float((equations @ direction).pow(2).mean().sqrt() / (rows @ direction).pow(2).mean().sqrt()), direction
    rest = complement(direction[None], size)  # (B, B - 1)
    values, vectors = torch.linalg.eigh(rest.mT @ (equations.mT @ (equations @ rest)))
    variance = (equations @ direction).pow(2).sum() / max(len(equations) - size, 1)
    moved = (rows @ (rest @ vectors)).pow(2).sum(0) / values.clamp_min(1e-300)
    error = (variance * moved.sum() / (rows @ direction).pow(2).sum()).sqrt()
    return float(error), rest @ vectors[:, 0]
