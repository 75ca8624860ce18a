"""Greedy changes of single pooling positions that explain the gradient: each filter by itself, all at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

MIN_GAIN = 1e-3
"""Share of what is left, in squares, by which a change has to make it less."""


@dataclass(frozen=True)
class PositionFlips:
    """Filters f whose positions are still changed, and the effect of each change.

    Attributes:
        filters: their numbers (f,).
        cells: numbers of the cells in question (f, k).
        exclusion: 0 for a position in question, infinite for others (f, k, P).
        change: what passing it on instead adds to what is left of the gradient (f, k, P, M).
        size: the sum of squares of that, infinite for others (f, k, P).
        residual: what is left of the gradient (f, M).
        floor: sum of squares of that below which it is explained (f,).
    """

    filters: Tensor
    cells: Tensor
    exclusion: Tensor
    change: Tensor
    size: Tensor
    residual: Tensor
    floor: Tensor

    @classmethod
    def of(
        cls, near: Tensor, selection: Tensor, patches: Tensor, signal: Tensor, residual: Tensor, explained: Tensor
    ) -> PositionFlips:
        """Return the flips of the filters that have undecided positions.

        Args:
            near: which positions are in question (O, K, P); of a cell several or none.
            selection: those passed on so far (O, K, P).
            patches: what the positions of each cell see (K, P, M).
            signal: what flowed back into the cells (O, K).
            residual: what is left of the gradient (O, M).
            explained: root mean square of that below which nothing is changed (O,).
        """
        asked = near.any(-1)
        filters = asked.any(1).nonzero().flatten()
        order = asked[filters].to(torch.uint8).sort(dim=1, descending=True, stable=True)
        cells, rows = order.indices[:, : int(asked.sum(1).max())], filters[:, None]
        exclusion = torch.zeros_like(selection[rows, cells]).masked_fill(~near[rows, cells], float("inf"))
        now = torch.einsum("fkp,fkpm->fkm", selection[rows, cells], patches[cells])
        change = signal[rows, cells][..., None, None] * (now[:, :, None] - patches[cells])
        floor = explained[filters].square() * residual.shape[1]
        return cls(filters, cells, exclusion, change, change.square().sum(-1) + exclusion, residual[filters], floor)

    def apply_best(self) -> tuple[PositionFlips, Tensor, Tensor, Tensor] | None:
        """Make the best change of every filter that one helps; None where there is no such filter.

        Returns:
            What is left to change, and filter, cell and position (f,) of the changes made.
        """
        if not len(self.filters):
            return None
        total = self.residual.square().sum(1)
        along = (self.change.flatten(1, 2) @ self.residual[..., None])[..., 0]
        gained, choice = (self.size.flatten(1) + 2 * along).min(1)
        on = ((total >= self.floor) & (gained < -MIN_GAIN * total)).nonzero().flatten()
        if not len(on):
            return None
        rest = self if len(on) == len(self.filters) else self._subset(on)
        positions = self.size.shape[-1]
        every, cell, position = torch.arange(len(on)), choice[on] // positions, choice[on] % positions
        step = rest.change[every, cell, position]
        rest.residual.add_(step)
        rest.change[every, cell] -= step[:, None]
        rest.size[every, cell] = rest.change[every, cell].square().sum(-1) + rest.exclusion[every, cell]
        return rest, rest.filters, rest.cells[every, cell], position

    def _subset(self, on: Tensor) -> PositionFlips:
        """Return the flips of the filters with the indices `on` (g,)."""
        return PositionFlips(*(getattr(self, part.name)[on] for part in fields(self)))
