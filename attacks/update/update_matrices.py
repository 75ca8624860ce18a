"""The matrices of an update beside the weights that they started from, and how far their numbers are rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.update.float_rounding import LEAST_SPACING, sent_types
from fl.tensors import LowRank, dense
from fl.view import ServerView

MOST_ROWS, MOST_COLUMNS, MOST_MATRICES = 64, 128, 3
"""Of a matrix, those that moved most are asked, since a part of a sum of outer products is one as well; and of matrices
the first and the last ones."""
COMPUTED_SPACINGS = 4.0
"""What computing a gradient may add to its rounding, in spacings after 1 of its size."""


@dataclass(frozen=True)
class UpdateMatrix:
    """A matrix of an update, or a part of it, with the bias beside it where there is one.

    Attributes:
        name: of the parameter.
        moved: its update (m, ...).
        start: its weights, likewise.
        spacing: of the numbers after 1 that both lie on.
        bias: the bias's update and its weights, for these rows (m,).
    """

    name: str
    moved: Tensor
    start: Tensor
    spacing: float
    bias: tuple[Tensor, Tensor] | None = None

    def part(self) -> UpdateMatrix:
        """Return the rows and columns that moved most, in double precision."""
        rows = self.moved.square().sum(1).topk(min(MOST_ROWS, self.moved.shape[0])).indices
        columns = self.moved[rows].square().sum(0).topk(min(MOST_COLUMNS, self.moved.shape[1])).indices
        moved, start = (value[rows][:, columns].double() for value in (self.moved, self.start))
        bias = None if self.bias is None else (self.bias[0][rows].double(), self.bias[1][rows].double())
        return UpdateMatrix(self.name, moved, start, self.spacing, bias)

    @property
    def rounding(self) -> Tensor:
        """Standard deviations of the update's numbers for having been rounded, in double precision."""
        return self.spacing / 2 * torch.exp2(torch.frexp(self.start).exponent.double()) / 12**0.5

    @property
    def expected_error(self) -> float:
        """How long the rounding of the update, and of computing it, is."""
        return math.hypot(float(self.rounding.norm()), COMPUTED_SPACINGS * LEAST_SPACING * float(self.moved.norm()))


def update_matrices(view: ServerView) -> list[UpdateMatrix]:
    """Return the matrices, kernels too, of an update that moved; none where some of it is structured.

    Args:
        view: what the server saw.
    """
    return list(_matrices(view))


def vector_parts(matrices: list[UpdateMatrix]) -> list[UpdateMatrix]:
    """Return parts of those that may be a layer's that is given vectors, the first ones and the last."""
    asked = [one for one in matrices if one.moved.ndim == 2]
    return [one.part() for one in asked[:MOST_MATRICES] + asked[MOST_MATRICES:][-MOST_MATRICES:]]


def _matrices(view: ServerView) -> Iterator[UpdateMatrix]:
    if any(isinstance(value, LowRank) for value in (*view.update.values(), *view.shared.values())):
        return
    of_update, of_weights = sent_types(view)
    spacing = torch.finfo(of_weights if view.rounded else of_update).eps
    update = {name: dense(value) for name, value in view.update.items()}
    for name, value in update.items():
        if name not in view.shared or value.ndim < 2 or not bool(value.any()) or not bool(value.isfinite().all()):
            continue
        beside = f"{name.removesuffix('weight')}bias"
        known = beside in view.shared and beside in update and update[beside].shape == value.shape[:1]
        bias = (update[beside], dense(view.shared[beside])) if known else None
        yield UpdateMatrix(name, value, dense(view.shared[name]), spacing, bias)
