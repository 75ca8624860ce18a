"""Least squares whose solution is not below zero, nor above bounds: Newton's method, then a set of zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.graph.block_matrices import BlockMatrix
from attacks.analytic.graph.conjugate_gradients import solve_by_conjugate_gradients
from attacks.analytic.graph.joint_equations import GradientEquations
from attacks.search_control import check_time_limit

MIN_CHANNEL_RATIO = 1.25
"""Equations of a channel's gradient for one unknown by which it is solved for by itself."""
SIGN_TOLERANCES = (1e-5, 1e-7)
"""Tolerances of conjugate gradients while numbers still leave their bounds."""
SETTLED_SHARES = (5e-2, 2e-2)
"""Share of the numbers that may still leave their bounds after each."""
MAX_SIGN_ROUNDS, MAX_ZERO_ROUNDS = 30, 8
"""Steps of Newton, and solutions with other zeros."""
NEGLIGIBLE, MAX_CHANGED_ZEROS = 1e-5, 1e-3
"""Share of the largest number up to which one is zero, and share of zeros that may still change."""


def gradient_product(gradients: GradientEquations, gram: BlockMatrix) -> Callable[[Tensor], Tensor]:
    """Return x -> A^T A x, by the blocks of that where all equations are known."""
    return gram.__matmul__ if gradients.known is None else gradients.apply_gram


@dataclass(frozen=True)
class RestrictedSystem:
    """N x = b for some numbers of x, while the others are zero.

    Attributes:
        product: returns N x.
        right: b.
        gram: A^T A.
        own: what else there is of N's diagonal (K,).
    """

    product: Callable[[Tensor], Tensor]
    right: Tensor
    gram: BlockMatrix
    own: Tensor

    @property
    def diagonal(self) -> Tensor:
        """Return the diagonal of N (n, K)."""
        return self.own + self.gram.diagonal()[:, None]

    def solve(
        self,
        free: Tensor,
        start: Tensor | None,
        tolerance: float,
        bent: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> Tensor | None:
        """Return the solution of (N + D) x = b + d at numbers that are free, with 0 elsewhere; None as above.

        Args:
            free: bool (n H W, K).
            start: where to begin.
            tolerance: of conjugate gradients.
            bent: the diagonal of D; none if left out.
            shift: d.
        """
        right = self.right if shift is None else self.right + shift
        precondition = self.gram.invert_restricted(free, self.own if bent is None else self.own + bent)

        def product(x: Tensor) -> Tensor:
            made = self.product(x)
            return (made if bent is None else made + bent * x) * free

        return solve_by_conjugate_gradients(
            product, right * free, precondition, None if start is None else start * free, tolerance
        )


def settle(
    system: RestrictedSystem,
    gradients: GradientEquations,
    fixed: Tensor,
    unknown: Tensor,
    upper: Tensor | None,
    is_late: Callable[[], bool],
) -> Tensor:
    """Return x without what is known, with next to no number below zero.

    Channels of few unknowns are solved for first, by their own gradient.

    Args:
        system: all equations.
        gradients: A and G.
        fixed: x (n H W, K) where it is known, 0 elsewhere.
        unknown: where it is not.
        upper: what numbers are not above.
        is_late: whether no further system is to be solved.
    """
    equations = int(gradients.known_share * int((gradients.matrix != 0).any(1).sum()))
    by_gradients = gradient_product(gradients, system.gram)
    few = MIN_CHANNEL_RATIO * unknown.sum(0) <= equations
    right = gradients.matrix.mT @ gradients.right - by_gradients(fixed)
    alone = RestrictedSystem(by_gradients, right, system.gram, torch.zeros_like(system.own))
    near = alone.solve(unknown & few, None, SIGN_TOLERANCES[-1])
    if near is None or bool(few.all()):
        return _settle_signs(system, unknown, upper, is_late) if near is None else near
    rest = replace(system, right=system.right - system.product(near))
    return near + _settle_signs(rest, unknown & ~few, upper, is_late)


def _settle_signs(
    system: RestrictedSystem, unknown: Tensor, upper: Tensor | None, is_late: Callable[[], bool]
) -> Tensor:
    """Return x with next to no number below zero or above its bound, by Newton's method."""
    stage, before = 0, torch.zeros_like(unknown)
    rho = float(system.diagonal.median())
    x = system.solve(unknown, None, SIGN_TOLERANCES[0])
    x = torch.zeros_like(system.right) if x is None else x
    for turn in range(MAX_SIGN_ROUNDS):
        check_time_limit()
        high = torch.zeros_like(unknown) if upper is None else (x > upper) & unknown
        outside = (x < 0) & unknown | high
        if turn and int((outside ^ before).sum()) <= SETTLED_SHARES[stage] * int(unknown.sum()):
            stage += 1
        if stage == len(SIGN_TOLERANCES) or is_late():
            break
        shift = None if upper is None else rho * torch.where(high, upper, 0.0)
        found = system.solve(unknown, x, SIGN_TOLERANCES[stage], rho * outside, shift)
        if found is None:
            break
        x, before = found, outside
    return x


def solve_with_zeros(
    system: RestrictedSystem,
    unknown: Tensor,
    zero: Tensor,
    start: Tensor | None,
    tolerance: float,
    is_late: Callable[[], bool],
) -> tuple[Tensor, Tensor] | None:
    """Return x that is zero in some places, and these, set right; None if equations leave numbers open."""
    found, before = torch.zeros_like(system.right), unknown.numel()
    for _ in range(MAX_ZERO_ROUNDS):
        if is_late():
            return None
        now = system.solve(unknown & ~zero, start, tolerance)
        if now is None:
            return None
        found = now
        missing = (system.right - system.product(found)) / system.diagonal
        least = negligible(found)
        changed = unknown & torch.where(zero, missing > least, found < -least)
        count = int(changed.sum())
        if count <= MAX_CHANGED_ZEROS * int(unknown.sum()) or count >= before:
            break
        zero, start, before = zero ^ changed, found, count
    return found, zero & unknown


def negligible(x: Tensor) -> float:
    """Return up to which number one of x counts as zero."""
    return NEGLIGIBLE * float(x.max())
