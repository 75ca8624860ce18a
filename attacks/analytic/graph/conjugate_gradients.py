"""Conjugate gradients with a preconditioner."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attacks.search_control import check_time_limit

MAX_ITERATIONS = 200
"""Iterations of conjugate gradients."""
LARGEST_GRADIENT = 1e-3
"""Gradient that may be left after them, as a share of that at zero."""


def solve_by_conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    start: Tensor | None,
    tolerance: float,
) -> Tensor | None:
    """Return the solution of a positive definite system; None where iterations do not come near it."""
    step = precondition(right)
    whole = float((right * step).sum())
    x = step if start is None else start
    rest = right - product(x)
    direction = precondition(rest)
    gamma = float((rest * direction).sum())
    for _ in range(MAX_ITERATIONS):
        check_time_limit()
        if not gamma > tolerance**2 * whole:
            break
        made = product(direction)
        length = gamma / float((direction * made).sum())
        x = x + length * direction
        rest = rest - length * made
        step = precondition(rest)
        following = float((rest * step).sum())
        direction, gamma = step + following / gamma * direction, following
    return x if gamma <= max(tolerance, LARGEST_GRADIENT) ** 2 * whole else None
