"""The best iterate of each trial, and which trials are still active."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attacks.gradient_matching.engine.problem import Variables

HISTORY_INTERVAL = 50
"""Iterations between two values of a trial's history."""


class TrialResult(NamedTuple):
    """What one trial came to.

    Attributes:
        variables: the best iterate.
        objective: there, relative to the start.
        history: the objective along the search, relative to the start, one value every `HISTORY_INTERVAL` iterations.
        start_objective: the objective at the start, in its own unit.
        cut_short: what stopped the trial before its last iteration although it was active, in words; else empty.
    """

    variables: Variables
    objective: float
    history: tuple[float, ...]
    start_objective: float
    cut_short: str = ""


class BestIterates:
    """Keeps the best finite iterate of every trial, and knows which trials go on.

    The first finite one from iteration `final_phase_start` on goes before all that came earlier.

    Args:
        variables: of all trials, where they start.
        final_phase_start: the iteration from which iterates count more than all before; 0 for none such.
    """

    def __init__(self, variables: Variables, final_phase_start: int) -> None:
        self.final_phase_start = final_phase_start
        some = next(iter(variables.values()))
        self.count = len(some)
        self.active_rows = torch.arange(self.count, device=some.device)
        self.best = {k: v.clone() for k, v in variables.items()}
        self.best_objective = torch.full((self.count,), float("inf"), device=self.active_rows.device, dtype=some.dtype)
        self.iterations_since_best = torch.zeros_like(self.active_rows)
        self.history: list[list[float]] = [[] for _ in range(self.count)]
        self.scale = self.start_objective = torch.ones_like(self.best_objective)
        self.cut_short = [""] * self.count

    def update(self, iteration: int, values: Tensor, variables: Variables) -> Tensor:
        """Record the objectives (of the active trials) at `variables`; returns them relative to the start.

        Args:
            iteration: number of the step.
            values: objectives of the active trials (A,).
            variables: of the active trials, one row each.
        """
        if iteration == 0:
            usable = values.isfinite() & (values > 0)
            self.scale = self.start_objective = torch.where(usable, values, 1.0)
        relative = values / self.scale
        better = relative < self.best_objective[self.active_rows]  # never true for not-a-number
        if iteration == self.final_phase_start:
            better = relative.isfinite()
        rows = self.active_rows[better]
        for k, v in variables.items():
            self.best[k][rows] = v[better]
        self.best_objective[rows] = relative[better]
        self.iterations_since_best += 1
        self.iterations_since_best[rows] = 0
        if iteration % HISTORY_INTERVAL == 0:
            for row, value in zip(self.active_rows.tolist(), relative.tolist(), strict=True):
                self.history[row].append(value)
        return relative

    def still_active(self, relative: Tensor, tolerance: float, patience: int) -> Tensor | None:
        """Return which of the active trials go on, or None for all.

        Args:
            relative: objectives relative to the start (A,), as `update` returns them.
            tolerance: a trial ends at this objective or below.
            patience: a trial ends after so many iterations without a better iterate; 0 never.
        """
        on = relative.isfinite() & (relative > tolerance)
        if patience:
            on &= self.iterations_since_best[self.active_rows] < patience
        return None if bool(on.all()) else on.nonzero().flatten()

    def select(self, rows: Tensor) -> None:
        """Go on with these of the active trials."""
        self.active_rows, self.scale = self.active_rows[rows], self.scale[rows]

    def mark_cut_short(self, reason: str) -> None:
        """Note of the trials still active what stops them."""
        for row in self.active_rows.tolist():
            self.cut_short[row] = reason

    def results(self) -> list[TrialResult]:
        """Return what every trial came to."""
        objectives, starts = self.best_objective.tolist(), self.start_objective.tolist()
        return [
            TrialResult(
                variables={k: v[t].clone() for k, v in self.best.items()},
                objective=objectives[t],
                history=tuple(self.history[t]),
                start_objective=starts[t],
                cut_short=self.cut_short[t],
            )
            for t in range(self.count)
        ]
