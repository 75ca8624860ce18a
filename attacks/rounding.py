"""What rounding leaves of a gradient that was sent as the difference of two models."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.tensors import dense
from fl.types import ServerView

ROUNDED = 0.25
"""Rounding to the nearest number, root mean square, relative to the spacing after 1."""
ON_GRID = 0.95
"""Share of a parameter whose update leads from one number of its type to another. Differences of models miss by a
thousandth, where a weight is far smaller than its update and the difference is rounded once more; computed updates
are there by chance, one in hundreds."""


def rounding(view: ServerView, name: str) -> float:
    """Share of a parameter's gradient that is rounding: the update is a difference of numbers of the weight's size."""
    step = ROUNDED * torch.finfo(view.dtype).eps
    moved, start = dense(view.update[name]).norm(), dense(view.shared[name]).norm()
    return float(step * (1 + start / moved)) if bool(moved > 0) else step


def grain(view: ServerView, name: str) -> Tensor | None:
    """Rounding of each number of a parameter's update, relative to the root mean square of all, in its shape.

    A small weight lies on a finer grid than a large one, so that its gradient is known better. None where the update is
    no difference of two models on the grid of `view.dtype`: one that was noised, averaged or computed from others
    leaves that grid. Numbers of double precision are not told from computed ones.
    """
    if view.dtype == torch.float64:
        return None
    start, moved = (dense(part[name]).detach().to("cpu", torch.float64) for part in (view.shared, view.update))
    after = (start - moved).to(view.dtype)
    if not (after.double() == start - moved).double().mean() > ON_GRID:
        return None
    largest = torch.maximum(after.abs(), moved.abs().to(view.dtype))
    spacing = (largest.nextafter(largest.new_tensor(torch.inf)) - largest).double()
    return spacing / spacing.square().mean().sqrt()
