"""Brings a prediction to an update by one factor, tensors weighed by how precise they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Fit:
    """How what images make goes with an update.

    Attributes:
        made: of each tensor, in double precision.
        allowed: how far each may be from the update.
        factor: that brings it to the update.
        sized: whether the update has the stated size, so that its size counts.
    """

    made: Mapping[str, Tensor]
    allowed: Mapping[str, float]
    factor: float
    sized: bool


def best_factor(update: Mapping[str, Tensor], made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> float:
    """Return the factor that brings a prediction nearest to an update, tensors weighed by precision; NaN of zero."""
    top = bottom = 0.0
    for name, value in made.items():
        weight = 1 / max(allowed[name], 1e-150) ** 2
        top += weight * float((value * update[name]).sum())
        bottom += weight * float(value.square().sum())
    return top / bottom if bottom > 0 else math.nan


def without_multiple(
    update: Mapping[str, Tensor], made: Mapping[str, Tensor], allowed: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return what an update has beside the multiple of another that is nearest to it."""
    factor = best_factor(update, made, allowed)
    return {name: value - factor * made[name] if math.isfinite(factor) else value for name, value in update.items()}
