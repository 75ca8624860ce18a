"""How many examples one step was taken on, as far as the rank of its update tells.

The gradient of a linear layer that is given one vector an example is a sum of as many outer products as examples were
fed (Zhu and Blaschko, ICLR 2021, Section 3). Below both sides of the matrix its rank is that number, or less where
several examples are given vectors of fewer dimensions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attacks.update.float_rounding import LEAST_SPACING
from attacks.update.observed_update import ObservedUpdate
from attacks.update.update_matrices import (
    COMPUTED_SPACINGS,
    UpdateMatrix,
    update_matrices,
    vector_parts,
)
from fl.view import ServerView

MIN_FREE = 4
"""How much the smaller side of what moved in a matrix must exceed a rank that means something."""
MARGIN, MIN_GAP = 2.0, 8.0
"""Times the largest singular value of rounding that one of a gradient exceeds, and the factor between the last one that
does and the next."""


def count_examples(view: ServerView) -> int | None:
    """Return the rank of an update's matrices, if it is the same in the one that shows most, or None.

    It is the number of examples that one step was taken on, or that of the examples of several small steps together.

    Args:
        view: what the server saw.
    """
    if view.private or view.parts:
        return None
    shares = ObservedUpdate(view).decay_shares
    found = [_rank(one, shares.get(one.name, 0.0)) for one in vector_parts(update_matrices(view))]
    full = max((side for rank, side in found if rank is None), default=0)
    most = max((rank for rank, _ in found if rank is not None), default=0)
    return most if most and most > full - MIN_FREE else None


def _rank(part: UpdateMatrix, share: float) -> tuple[int | None, int]:
    """Return the rank of a matrix's update to its rounding, None where that is full or not told, and its least side.

    Args:
        part: of the update.
        share: of the weights, that decay took.
    """
    moved = part.moved - share * part.start
    height, width = (int((moved != 0).any(side).sum()) for side in (1, 0))
    sizes = torch.linalg.svdvals(moved)
    rounding = float(replace(part, moved=moved).rounding.square().mean().sqrt())
    noise = math.hypot(rounding * (height**0.5 + width**0.5), COMPUTED_SPACINGS * LEAST_SPACING * float(sizes[0]))
    rank, side = int((sizes > MARGIN * noise).sum()), min(height, width)
    if rank > side - MIN_FREE:
        return None, side
    told = rank > 0 and float(sizes[rank - 1]) > MIN_GAP * noise
    return (rank, side) if told else (None, 0)
