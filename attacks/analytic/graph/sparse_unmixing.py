"""Mixed signals, or features, of images with many zeros (`unmixing`)."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import linprog
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
    STARTING_ROWS,
    UnmixingProblem,
    large_rows,
    least_squares_error,
    log_chance,
    weakest_direction,
    whiten,
)
from attacks.search_control import check_time_limit

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


class SparseUnmixing(UnmixingProblem):
    """Rows (N, B) of signals with many zeros."""

    def __init__(self, rows: Tensor, draw: torch.Generator) -> None:
        rows = rows[(rows != 0).any(1)]  # zeros in all directions hide how large the noise is
        self.images = rows.shape[1]
        self.whitening = torch.eye(self.images, dtype=rows.dtype, device=rows.device)
        self.rows = rows
        if self.images > 1:
            self.whitening = whiten(large_rows(self._draw(draw)))
        self.rows = rows @ self.whitening
        large = large_rows(self.rows)
        self.scaled = large / large.norm(dim=1, keepdim=True)

    def _draw(self, draw: torch.Generator) -> Tensor:
        return self.rows[torch.randperm(len(self.rows), generator=draw)[:STARTING_ROWS]]

    def starting_rows(self, draw: torch.Generator) -> Tensor:
        """Return some rows."""
        rows = large_rows(self._draw(draw))
        return rows / rows.norm(dim=1, keepdim=True)

    def refine(self, directions: Tensor) -> Tensor:
        """Return the directions after reweighted least squares."""
        for number in range(REFINEMENTS):
            epsilon = max(FIRST_EPSILON * EPSILON_STEP**number, LAST_EPSILON)
            weights = 1 / ((self.scaled @ directions.mT).pow(2) + epsilon**2).sqrt()  # (N, k)
            last = directions
            directions = torch.stack([weakest_direction(self.scaled * w[:, None]) for w in weights.mT])
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
            direction = weakest_direction(self.rows[zero])
        return direction

    def judge_one(self, direction: Tensor) -> tuple[bool, float, float]:
        """Return whether the direction is an image's, its error and the logarithm of (4)."""
        values = (self.rows @ direction).abs()
        noise = _noise(values)
        zero = values <= NOISE_DEVIATIONS * noise
        if int(zero.sum()) <= 2 * self.images:
            return False, math.inf, 0.0
        error, second = least_squares_error(self.rows[zero], self.rows, direction)
        against = (self.rows @ second).abs()
        counted = values <= WIDE * NOISE_DEVIATIONS * noise
        if self.images > 1:
            # A row that a combination of two images passes by chance fixes it and tilts u slightly out of their plane:
            # what r(u) is by that tilt must not count, however far above the noise.
            counted &= against > torch.clamp(
                AGAINST * against.pow(2).mean().sqrt(), min=WIDE * NOISE_DEVIATIONS * noise
            )
        chance = log_chance(int((zero & counted).sum()), int(counted.sum()), self.images - 1, MAX_FALSE_ZEROS)
        return chance < math.log(MAX_FALSE_ACCEPTANCE) and error < MAX_ERROR, error, chance


class NonnegativeSparseUnmixing(SparseUnmixing):
    """Rows (N, B) of numbers with many zeros and none below zero."""

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
    """Return the standard deviation of the zeros among absolute values (N,): a quarter of these or more."""
    noise = FIRST_NOISE * float(values.quantile(SURE_ZEROS))
    for _ in range(NOISE_ROUNDS):
        noise = float(values[values <= NOISE_DEVIATIONS * noise].pow(2).mean().sqrt())
    return noise
