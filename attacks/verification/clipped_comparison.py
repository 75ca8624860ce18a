"""Checks whether inputs explain an update whose numbers were clipped at a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from attacks.verification.update_comparison import UNLIKE_DISTANCE, UpdateComparison
from attacks.verification.update_fit import Fit, best_factor

BELOW_BOUND = 0.999
"""Share of the bound up to which a number of a gradient that was clipped by value counts as not clipped."""


def is_explained_clipped(check: UpdateComparison, images: Tensor, labels: Tensor, bound: float) -> bool:
    """Return whether these inputs make the update to its rounding, were numbers cut at a bound, and no two others.

    Two that differ from them, to either side, by a tenth of twice their root mean square must leave more in the
    numbers that were not cut. As in `tells_pairs_apart`, what they leave towards one of them does not count, nor
    their size, unless that is the stated one.

    Args:
        check: the comparison with the update.
        images: (N, C, H, W).
        labels: (N,).
        bound: the largest size in the update.
    """
    made, allowed = check.bounds.predict_exactly(images, labels)
    limit = BELOW_BOUND * bound / check.unit
    at_bound = torch.cat([v[v.abs() >= limit].abs() for v in check.observed.values()])
    if not len(at_bound):
        return False
    cut = float(at_bound.median())  # the largest is off by the largest rounding error
    free = {name: check.observed[name].abs() < limit for name in made}
    below = {name: value * free[name] for name, value in check.observed.items() if name in made}
    factor = best_factor(below, {name: value * free[name] for name, value in made.items()}, check.bounds.rounding)
    whole = check.best_factor(made, check.bounds.rounding)
    if not 0 < whole < math.inf or not 0 < factor < math.inf:
        return False
    allowed = {name: value * max(1.0, factor / whole) for name, value in allowed.items()}

    def clipped(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: (factor * value).clamp(-cut, cut) for name, value in values.items()}

    expected = clipped(made)
    if any(float((check.observed[n] - value).norm()) > allowed[n] for n, value in expected.items()):
        return False
    size = check.stated_factor
    stated = {name: (size * value).clamp(-cut, cut) for name, value in made.items()}
    sized = not check.view.scale_unknown and all(
        float((check.observed[n] - value).norm()) <= allowed[n] for n, value in stated.items()
    )
    uncut = {name: value.double() for name, value in free.items()}
    return check.tells_differences(
        images, labels, check.spread / MAX_PIXEL_ERROR * UNLIKE_DISTANCE, Fit(made, allowed, factor, sized), uncut
    )
