"""Conjugate gradients with a preconditioner."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attacks.search_control import check_time_limit

MAX_ITERATIONS = 200
"""Iterations of conjugate gradients."""
LARGEST_GRADIENT = 1e-3
"""Gradient that may be left after them, as a share of that at zero."""


class ConjugateGradients:
    """The iterations for one positive definite system, which go on from where they ended."""

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        right: Tensor,
        precondition: Callable[[Tensor], Tensor],
        start: Tensor | None = None,
    ) -> None:
        """Begin.

        Args:
            product: multiplies by the system's matrix.
            right: its right side.
            precondition: multiplies by about its inverse.
            start: where to begin; None for the preconditioned right side.
        """
        self._product, self._precondition = product, precondition
        first = precondition(right)
        self._whole = float((right * first).sum())
        self._found = first if start is None else start
        self._rest = right - product(self._found)
        self._direction = precondition(self._rest)
        self._gamma = float((self._rest * self._direction).sum())

    def solve(self, tolerance: float) -> Tensor | None:
        """Return the solution; None where `MAX_ITERATIONS` further iterations do not come near it.

        Args:
            tolerance: share of the gradient at zero, in the preconditioner's norm, at which iterations end. After all
                of them it may be above, up to `LARGEST_GRADIENT`.
        """
        for _ in range(MAX_ITERATIONS):
            check_time_limit()
            if not self._gamma > tolerance**2 * self._whole:
                break
            self._iterate()
        near = self._gamma <= max(tolerance, LARGEST_GRADIENT) ** 2 * self._whole
        return self._found if near else None

    def _iterate(self) -> None:
        made = self._product(self._direction)
        length = self._gamma / float((self._direction * made).sum())
        self._found = self._found + length * self._direction
        self._rest = self._rest - length * made
        step = self._precondition(self._rest)
        following = float((self._rest * step).sum())
        self._direction, self._gamma = step + following / self._gamma * self._direction, following


def solve_by_conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    start: Tensor | None,
    tolerance: float,
) -> Tensor | None:
    """Return the solution of a positive definite system; None where iterations do not come near it.

    Args:
        product: multiplies by the system's matrix.
        right: its right side.
        precondition: multiplies by about its inverse.
        start: where to begin; None for the preconditioned right side.
        tolerance: as of `ConjugateGradients.solve`.
    """
    return ConjugateGradients(product, right, precondition, start).solve(tolerance)
