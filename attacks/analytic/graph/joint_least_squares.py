r"""Least squares of what is known of what layers take, where their gradients alone are too few.

Of layers that share an input x (n, K, H, W) are known

    (1) A x_k = G_k    for every input channel k: their gradients, with one matrix A for all channels
    (2) F x = t        what else is linear in x, such as outputs of the layers that were solved for
    (3) x_e = v_e      for some entries e, such as what a skip connection carries to an activation that is open

A mixes the positions of all images, each channel for itself. F mixes channels, each image for itself. A has no more
rows with more images, F has as many for each. So a batch that is too large for (1) leaves some directions open, or A
ill-conditioned, and (2) and (3) say how much of each is in x.

(3) is not weighed against the others: these entries are put in, and the rest, x_U, is solved for. (1) and (2) are
weighed by their rounding, and solved by conjugate gradients on the normal equations of x_U,

    P N P x_U = P (A^T G + w F^T t - N v),    N = A^T A + w F^T F,

where P sets the entries of (3) to zero.

**Signs** (`sign_bounds`). Where a ReLU made x, no number of it is below zero. An activation above that is closed
bounds the number that a skip connection brings it, x_e <= u_e. With half of x zero, equations of three quarters of
the unknowns are enough then (Donoho and Tanner, 2010). So x is first the minimum of

    |A x - G|^2 + w |F x - t|^2 + rho |min(x, 0)|^2 + rho |max(x - u, 0)|^2.

All four are zero at the true x, so rho biases nothing. The function is quadratic wherever the same numbers are out of
their bounds, and Newton's method goes from one such piece to the next. After that the zeros of x are put in as known,
and what is left has more equations than unknowns. Numbers that come out below zero there become zeros, and zeros that
pull upwards become free.

**Preconditioner** (its blocks: `block_matrices`). Let A^T A = V S V^T. Positions that no equation of A ties together,
such as those that a stride keeps apart, make blocks of V. With C the eigenvectors of the channels' part of F^T F, it
divides by S_i + w p_i m_j in the coordinates V and C. m_j is an eigenvalue of that part, averaged over positions, and
p_i the share of F^T F in direction i, relative to others. Where entries are known, A^T A and the diagonal of w F^T F
are inverted instead, for every channel at its own unknown entries. That needs small blocks.

The weight w is 1 by rounding alone. Where A has many small singular values, F cannot tell all those directions, and
the system is ill-conditioned: there w is less, so that A counts more in all directions but as many as F can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.analytic.graph.block_matrices import BlockMatrix, Eigenbasis, find_parts
from attacks.analytic.graph.conjugate_gradients import ConjugateGradients
from attacks.analytic.graph.joint_equations import GradientEquations, KnownEntries, LinearEquations
from attacks.analytic.graph.sign_bounds import RestrictedSystem, gradient_product, negligible, settle, solve_with_zeros
from fl.seeds import stream

PROBES = 4
"""Random inputs from which the preconditioner is estimated."""
MAX_TOLD_SHARE = 0.4
"""Directions that are left to F, as a share of its equations for one channel."""
LEAST_WEIGHT = 1e-3
"""Weight of F's equations, at least."""
NULL_SPACE = 1e-12
"""Share of the largest eigenvalue up to which a direction counts as in the null space."""
LEAST_SHARE = 1e-3
"""Share of the largest number of the preconditioner that each is taken to have at least."""
MAX_BLOCK_NUMBERS = 2**25
"""Numbers of the blocks of all channels, at most, to be inverted for each channel."""
ENTRY_WEIGHT = 0.03
"""Weight of F's equations where entries are known, in which directions in the null space of A are most of all."""
MAX_SECONDS = 120.0
"""CPU seconds after which no further system with known entries is solved for one input."""


class OutOfTimeError(Exception):
    """A search ended for lack of time, not of equations."""


@dataclass
class JointSolver:
    """Solves systems that are alike, as by other weights of the same equations, one after the other.

    Attributes:
        others: F and t; None where there are only gradients.
        entries: what is known of single numbers; None where nothing is.
        began: the process time from which `MAX_SECONDS` count.
        ran_out: whether a system was left unsolved as these were over.
        zero: where x (n, K, H, W) turned out to be zero; None before it is solved for, or where it may be negative.
    """

    others: LinearEquations | None
    entries: KnownEntries | None = None
    began: float = field(default_factory=time.process_time)
    ran_out: bool = field(default=False, init=False)
    zero: Tensor | None = field(default=None, init=False)
    _parts: list[Tensor] | None = field(default=None, init=False)
    _system: _System | None = field(default=None, init=False)

    def solve(
        self, gradients: GradientEquations, start: Tensor | None = None, tolerance: float = 1e-8
    ) -> Tensor | None:
        """Return x (n H W, K) that leaves least of all equations; None if they leave numbers open.

        They do where a direction is in none of them, or where they leave so much open that iterations do not end.

        Args:
            gradients: A and G.
            start: x (n H W, K) to begin with.
            tolerance: share of the gradient at zero, in the preconditioner's norm, at which it ends. After
                `MAX_ITERATIONS` it may be above, up to `LARGEST_GRADIENT`.
        """
        if self.entries is not None:
            return self._solve_with_entries(gradients, self.entries, start, tolerance)
        assert self.others is not None
        if self._system is None or not torch.equal(self._system.matrix, gradients.matrix):
            self._system = _System.of(gradients, self.others)
        return None if self._system is None else self._system.solve(start, tolerance)

    def _solve_with_entries(
        self,
        gradients: GradientEquations,
        entries: KnownEntries,
        start: Tensor | None,
        tolerance: float,
    ) -> Tensor | None:
        if self._is_late():
            return None
        if self._parts is None:
            self._parts = find_parts(gradients.matrix)
        gram = BlockMatrix.gram(gradients.known_share**0.5 * gradients.matrix, self._parts)
        if gram.numbers * gradients.right.shape[1] > MAX_BLOCK_NUMBERS:
            return None
        product, right = _normal_equations(gradients, gram, self.others, ENTRY_WEIGHT)
        own = _diagonal_of_others(gradients, self.others, ENTRY_WEIGHT)
        unknown = gradients.as_rows(~entries.known)
        fixed = gradients.as_rows(entries.values) * ~unknown
        system = RestrictedSystem(product, right - product(fixed), gram, own)
        if not entries.nonnegative:
            found = system.solve(unknown, start, tolerance)
            return None if found is None else _by_channels(found + fixed)
        if self.zero is None:
            upper = None if entries.upper is None else gradients.as_rows(entries.upper)
            start = settle(system, gradients, fixed, unknown, upper, self._is_late)
            zero = start <= negligible(start)
        else:
            zero = gradients.as_rows(self.zero)
        settled = solve_with_zeros(system, unknown, zero, start, tolerance, self._is_late)
        if settled is None:
            return None
        self.zero = gradients.as_images(settled[1])
        return _by_channels(settled[0] + fixed)

    def _is_late(self) -> bool:
        """Return whether no further system is to be solved, and note that."""
        self.ran_out = self.ran_out or time.process_time() - self.began > MAX_SECONDS
        return self.ran_out

    def explain_time(self) -> str:
        """Say that the search ran out of time."""
        return f"the search by numbers that are known and by signs ran out of its {MAX_SECONDS:.0f} CPU seconds"


def _by_channels(x: Tensor) -> Tensor:
    """Return x (n H W, K) that lies in memory channel by channel: strides of others put batch norm's backward off."""
    return x.mT.contiguous().mT


@dataclass
class _System:
    """The normal equations of all numbers, where nothing is known of single ones, in coordinates of eigenvectors.

    Attributes:
        matrix: A.
        basis: the eigenvectors of A^T A.
        precondition: the preconditioner.
        right: the right side.
        product: returns N y.
        iterations: which solve it, once they have begun.
    """

    matrix: Tensor
    basis: Eigenbasis
    precondition: _Preconditioner
    right: Tensor
    product: Callable[[Tensor], Tensor]
    iterations: ConjugateGradients | None = None

    @classmethod
    def of(cls, gradients: GradientEquations, others: LinearEquations) -> _System | None:
        """Return the system; None where a direction is in none of the equations."""
        a, as_images, as_rows = gradients.matrix, gradients.as_images, gradients.as_rows
        basis = Eigenbasis.of(gradients.known_share * (a.mT @ a))
        estimate = _Preconditioner.of(basis, gradients, others)
        if estimate is None:
            return None
        precondition, weight = estimate
        right = basis.to(a.mT @ gradients.right + weight * as_rows(others.pull(others.right_side())))

        def product(y: Tensor) -> Tensor:
            x = basis.back(y)
            heard = as_rows(others.pull(others.push(as_images(x))))
            of_gradients = basis.values[:, None] * y if gradients.known is None else basis.to(gradients.apply_gram(x))
            return of_gradients + weight * basis.to(heard)

        return cls(a, basis, precondition, right, product)

    def solve(self, start: Tensor | None, tolerance: float) -> Tensor | None:
        """Return x as `JointSolver` does; asked again, iterations go on from where they ended."""
        if self.iterations is None:
            begin = None if start is None else self.basis.to(start)
            self.iterations = ConjugateGradients(self.product, self.right, self.precondition, begin)
        y = self.iterations.solve(tolerance)
        return None if y is None else self.basis.back(y)


def _normal_equations(
    gradients: GradientEquations, gram: BlockMatrix, others: LinearEquations | None, weight: float
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return x -> N x, and the right side of N x = A^T G + w F^T t."""
    right = gradients.matrix.mT @ gradients.right
    by_gradients = gradient_product(gradients, gram)
    if others is None:
        return by_gradients, right

    def product(x: Tensor) -> Tensor:
        return by_gradients(x) + weight * gradients.as_rows(others.pull(others.push(gradients.as_images(x))))

    return product, right + weight * gradients.as_rows(others.pull(others.right_side()))


def _diagonal_of_others(gradients: GradientEquations, others: LinearEquations | None, weight: float) -> Tensor:
    """Return w times the diagonal of F^T F, averaged over the positions of each channel (K,)."""
    found = gradients.right.new_zeros(gradients.right.shape[1])
    if others is None:
        return found
    draw = stream(0, "probes of output equations")
    like = torch.Size((gradients.matrix.shape[1], len(found)))
    for _ in range(PROBES):
        probe = (2.0 * torch.randint(0, 2, like, generator=draw) - 1).to(found)
        answer = gradients.as_rows(others.pull(others.push(gradients.as_images(probe))))
        found += weight * (probe * answer).mean(0) / PROBES
    return found.clamp_min(0)


@dataclass(frozen=True)
class _Preconditioner:
    """Divides by S_i + w p_i m_j in coordinates of eigenvectors.

    Attributes:
        channels: C (K, K).
        divisors: (n, K).
    """

    channels: Tensor
    divisors: Tensor

    @classmethod
    def of(
        cls, basis: Eigenbasis, gradients: GradientEquations, others: LinearEquations
    ) -> tuple[_Preconditioner, float] | None:
        """Return it, with p and m estimated from random signs, and the weight w of F's equations.

        It is None where a direction is in neither A nor F: iterations would leave it at zero, as if that were known.
        F may tell nothing at all, as where no number of the layer above was sent: then w is 0.
        """
        n, k = len(basis.values), gradients.right.shape[1]
        draw = stream(0, "probes of output equations")
        shares, mixed = basis.values.new_zeros(n), basis.values.new_zeros(k, k)
        for _ in range(PROBES):
            probe = (2.0 * torch.randint(0, 2, (n, k), generator=draw) - 1).to(basis.values)
            answer = basis.to(gradients.as_rows(others.pull(others.push(gradients.as_images(basis.back(probe))))))
            shares += (probe * answer).sum(1) / (k * PROBES)
            mixed += probe.mT @ answer / (n * PROBES)
        values, channels = torch.linalg.eigh((mixed + mixed.mT) / 2)
        null = basis.values <= NULL_SPACE * float(basis.values.max())
        if bool((null & (shares <= NULL_SPACE * float(shares.max()))).any()):
            return None
        if bool(null.any()) and float(values.min()) <= NULL_SPACE * float(values.max()):
            return None
        if not bool(mixed.any()):
            return cls(channels, basis.values[:, None].expand(n, k)), 0.0
        values = values.clamp_min(LEAST_SHARE * float(values.max()))
        shares = shares.clamp_min(LEAST_SHARE * float(shares.max())) / shares.mean()
        told = min(int(MAX_TOLD_SHARE * others.count / k), n - 1)
        level = float(basis.values.sort().values[told]) / float(values.mean())
        weight = min(1.0, max(level, LEAST_WEIGHT))
        return cls(channels, basis.values[:, None] + weight * shares[:, None] * values), weight

    def __call__(self, y: Tensor) -> Tensor:
        """Return what y (n, K) is divided to."""
        return ((y @ self.channels) / self.divisors) @ self.channels.mT
