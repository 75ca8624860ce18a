"""Numbers that lie on an even grid, as those of an update that was sent in few bits (integers and a scale)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_ENTRIES = 64
"""Numbers of a tensor, below which a grid through all of them says little."""
MIN_STEPS, MAX_STEPS = 30, 4096
"""Steps between the least and the largest number: fewer may be signs and their like (`attacks.update.update_rule`), and
of more float32 tells no grid."""
OFF_GRID = 0.02
"""How far numbers may be from whole steps."""
OWN_SPACINGS = 4.0
"""Last places of the largest weight, up to which a step is one of the weights' own."""
SAMPLE = 4 * MAX_STEPS
"""Numbers that are looked at first: those of a grid repeat among them."""


def grid_step(values: Tensor) -> float:
    """Return how far apart numbers of a tensor are that all lie on an even grid; 0 where they lie on none.

    Rows that are multiples of one count as on none: pixels lie on a grid as well.

    Args:
        values: floating-point numbers, finite.
    """
    flat = values.detach().flatten()
    known = torch.unique(flat[:SAMPLE].double())
    if len(flat) < MIN_ENTRIES or len(known) > MAX_STEPS + 1:
        return 0.0
    flat = flat.double()
    low, high = (float(extreme) for extreme in flat.aminmax())
    gaps = known.diff()
    gaps = gaps[gaps > (high - low) / (2 * MAX_STEPS)]
    if not len(gaps):
        return 0.0
    steps = round((high - low) / float(gaps.min()))
    if not MIN_STEPS <= steps <= MAX_STEPS:
        return 0.0
    step = (high - low) / steps
    places = (flat - low) / step
    on_grid = bool(((places - places.round()).abs() < OFF_GRID).all())
    return step if on_grid and not is_of_one_row(values.detach(), step) else 0.0


def is_of_one_row(values: Tensor, step: float) -> bool:
    """Return whether all rows of a matrix are multiples of one, as no rounding leaves them.

    The gradient of a layer with one output, or two classes, is that: pixels of 8 bits times one number.
    """
    if values.ndim < 2:
        return False
    rows = values.flatten(1).double()
    sizes = rows.square().sum(1)
    longest = rows[int(sizes.argmax())]
    along = rows @ longest / sizes.max()
    return bool(((rows - along[:, None] * longest).abs() < OFF_GRID * step).all())


def bits_of_grid(values: Tensor, start: Tensor | None = None) -> int:
    """Return in how many bits numbers on an even grid can be sent; 0 where they lie on none.

    Args:
        values: of an update.
        start: the weights before: a difference of them lies on the grid of their last places, which counts as none.
    """
    step = grid_step(values)
    if not step or (
        start is not None and step <= OWN_SPACINGS * torch.finfo(start.dtype).eps * float(start.abs().max())
    ):
        return 0
    low, high = (float(extreme) for extreme in values.aminmax())
    return math.ceil(math.log2(round((high - low) / step) + 1))
