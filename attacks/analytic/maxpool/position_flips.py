"""Positions changed one by one, so that they explain the gradient: every filter for itself, all filters at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

ENOUGH = 1e-3
"""Share of what is left, in squares, by which a change has to make it less."""


@dataclass(frozen=True)
class Flips:
    """Filters f of which positions are still changed, and what each change would do.

    Attributes:
        filters: their numbers (f,).
        at: numbers of the cells in question (f, k).
        closed: 0 for a position in question, infinite for others (f, k, P).
        moved: what passing it on instead adds to what is left of the gradient (f, k, P, M).
        size: the sum of squares of that, infinite for others (f, k, P).
        left: of the gradient (f, M).
        floor: sum of squares of that below which it is explained (f,).
    """

    filters: Tensor
    at: Tensor
    closed: Tensor
    moved: Tensor
    size: Tensor
    left: Tensor
    floor: Tensor

    @classmethod
    def of(cls, near: Tensor, shares: Tensor, cells: Tensor, signal: Tensor, left: Tensor, explained: Tensor) -> Flips:
        """Of the filters of which anything is in question.

        Args:
            near: which positions are in question (O, K, P); of a cell several or none.
            shares: those passed on so far (O, K, P).
            cells: what the positions see (K, P, M).
            signal: what flowed back into the cells (O, K).
            left: of the gradient (O, M).
            explained: root mean square of that below which nothing is changed (O,).
        """
        cell = near.any(-1)
        filters = cell.any(1).nonzero().flatten()
        first = cell[filters].to(torch.uint8).sort(dim=1, descending=True, stable=True)
        at, rows = first.indices[:, : int(cell.sum(1).max())], filters[:, None]
        closed = torch.zeros_like(shares[rows, at]).masked_fill(~near[rows, at], float("inf"))
        now = torch.einsum("fkp,fkpm->fkm", shares[rows, at], cells[at])
        moved = signal[rows, at][..., None, None] * (now[:, :, None] - cells[at])
        floor = explained[filters].square() * left.shape[1]
        return cls(filters, at, closed, moved, moved.square().sum(-1) + closed, left[filters], floor)

    def best(self) -> tuple[Flips, Tensor, Tensor, Tensor] | None:
        """Make the best change of every filter that one helps; None where there is no such filter.

        Returns:
            What is left to change, and filter, cell and position (f,) of the changes made.
        """
        if not len(self.filters):
            return None
        total = self.left.square().sum(1)
        along = (self.moved.flatten(1, 2) @ self.left[..., None])[..., 0]
        gained, choice = (self.size.flatten(1) + 2 * along).min(1)
        on = ((total >= self.floor) & (gained < -ENOUGH * total)).nonzero().flatten()
        if not len(on):
            return None
        rest = self if len(on) == len(self.filters) else Flips(*(getattr(self, part.name)[on] for part in fields(self)))
        every, cell, position = (
            torch.arange(len(on)),
            choice[on] // self.size.shape[-1],
            choice[on] % self.size.shape[-1],
        )
        step = rest.moved[every, cell, position]
        rest.left.add_(step)
        rest.moved[every, cell] -= step[:, None]
        rest.size[every, cell] = rest.moved[every, cell].square().sum(-1) + rest.closed[every, cell]
        return rest, rest.filters, rest.at[every, cell], position
