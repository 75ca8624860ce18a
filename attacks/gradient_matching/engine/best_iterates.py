"""What a search has found so far, trial by trial."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.gradient_matching.engine.problem import Variables

Found = tuple[Variables, float, tuple[float, ...], float]
"""Of one trial: best variables, objective there and history, both relative to the start, and the start's objective."""


class Watch:
    """Keeps the best finite iterate of every trial, and knows which trials go on.

    The first finite one from iteration `settled` on goes before all that came earlier.
    """

    def __init__(self, variables: Variables, settled: int) -> None:
        self.settled = settled
        some = next(iter(variables.values()))
        self.count = len(some)
        self.rows = torch.arange(self.count, device=some.device)
        self.best = {k: v.clone() for k, v in variables.items()}
        self.value = torch.full((self.count,), float("inf"), device=self.rows.device, dtype=some.dtype)
        self.since = torch.zeros_like(self.rows)
        self.history: list[list[float]] = [[] for _ in range(self.count)]
        self.scale = self.start = torch.ones_like(self.value)

    def note(self, iteration: int, values: Tensor, variables: Variables) -> Tensor:
        """Record the objectives (rows still going) at `variables`; returns them relative to the start."""
        if iteration == 0:
            usable = values.isfinite() & (values > 0)
            self.scale = self.start = torch.where(usable, values, 1.0)
        relative = values / self.scale
        better = relative < self.value[self.rows]  # never true for not-a-number
        if iteration == self.settled:
            better = relative.isfinite()
        rows = self.rows[better]
        self.value[rows] = relative[better]
        for k, v in variables.items():
            self.best[k][rows] = v[better]
        self.since += 1
        self.since[rows] = 0
        if iteration % 50 == 0:
            for row, value in zip(self.rows.tolist(), relative.tolist(), strict=True):
                self.history[row].append(value)
        return relative

    def going(self, relative: Tensor, tolerance: float, patience: int) -> Tensor | None:
        """Which of the running trials go on, or None for all."""
        on = relative.isfinite() & (relative > tolerance)
        if patience:
            on &= self.since[self.rows] < patience
        return None if bool(on.all()) else on.nonzero().flatten()

    def keep(self, rows: Tensor) -> None:
        """Go on with these of the running trials."""
        self.rows, self.scale = self.rows[rows], self.scale[rows]

    def results(self) -> list[Found]:
        """Trial by trial."""
        values, starts = self.value.tolist(), self.start.tolist()
        return [
            ({k: v[t].clone() for k, v in self.best.items()}, values[t], tuple(self.history[t]), starts[t])
            for t in range(self.count)
        ]
