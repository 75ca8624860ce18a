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

**Signs.** Where a ReLU made x, no number of it is below zero. An activation above that is closed bounds the number
that a skip connection brings it, x_e <= u_e. With half of x zero, equations of three quarters of the unknowns are
enough then (Donoho and Tanner, 2010). So x is first the minimum of

    |A x - G|^2 + w |F x - t|^2 + rho |min(x, 0)|^2 + rho |max(x - u, 0)|^2.

All four are zero at the true x, so rho biases nothing. The function is quadratic wherever the same numbers are out of
their bounds, and Newton's method goes from one such piece to the next. After that the zeros of x are put in as known,
and what is left has more equations than unknowns. Numbers that come out below zero there become zeros, and zeros that
pull upwards become free.

**Preconditioner.** Let A^T A = V S V^T. Positions that no equation of A ties together, such as those that a stride
keeps apart, make blocks of V. With C the eigenvectors of the channels' part of F^T F, it divides by S_i + w p_i m_j
in the coordinates V and C. m_j is an eigenvalue of that part, averaged over positions, and p_i the share of F^T F in
direction i, relative to others. Where entries are known, A^T A and the diagonal of w F^T F are inverted instead, for
every channel at its own unknown entries. That needs small blocks.

The weight w is 1 by rounding alone. Where A has many small singular values, F cannot tell all those directions, and
the system is ill-conditioned: there w is less, so that A counts more in all directions but as many as F can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from attacks.search_control import check_time_limit
from fl.seeds import stream

MAX_ITERATIONS = 200
"""Iterations of conjugate gradients."""
LARGEST_GRADIENT = 1e-3
"""Gradient that may be left after them, as a share of that at zero."""
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
RIDGE = 1e-13
"""Share of the largest number on the diagonal that keeps a channel's block invertible."""
MAX_BLOCK_NUMBERS = 2**25
"""Numbers of the blocks of all channels, at most, to be inverted for each channel."""
CHANNELS_TOGETHER = 64
"""Channels whose blocks are inverted as one stack."""
ENTRY_WEIGHT = 0.03
"""Weight of F's equations where entries are known, in which directions in the null space of A are most of all."""
MIN_CHANNEL_RATIO = 1.25
"""Equations of a channel's gradient for one unknown by which it is solved for by itself."""
SIGN_TOLERANCES = (1e-5, 1e-7)
"""Tolerances of conjugate gradients while numbers still leave their bounds."""
SETTLED_SHARES = (5e-2, 2e-2)
"""Share of the numbers that may still leave their bounds after each."""
MAX_SIGN_ROUNDS, MAX_ZERO_ROUNDS = 30, 8
"""Steps of Newton, and solutions with other zeros."""
MAX_SECONDS = 120.0
"""CPU seconds after which no further system with known entries is solved for one input."""
NEGLIGIBLE, MAX_CHANGED_ZEROS = 1e-5, 1e-3
"""Share of the largest number up to which one is zero, and share of zeros that may still change."""


class OutOfTimeError(Exception):
    """A search ended for lack of time, not of equations."""


class LinearEquations(Protocol):
    """F x = t, weighed so that the error of each is about the same share of one."""

    @property
    def count(self) -> int:
        """Return the number of equations."""

    def push(self, x: Tensor) -> list[Tensor]:
        """Return F x for x (n, K, H, W)."""

    def pull(self, weights: Sequence[Tensor]) -> Tensor:
        """Return F^T w."""

    def right_side(self) -> list[Tensor]:
        """Return t."""


@dataclass(frozen=True)
class KnownEntries:
    """What is known of single numbers of x.

    Attributes:
        known: (n, K, H, W) bool, where x is known outright.
        values: (n, K, H, W), x there, 0 elsewhere.
        nonnegative: whether no number of x is below zero.
        upper: (n, K, H, W), what numbers are not above; None where nothing is known of that.
    """

    known: Tensor
    values: Tensor
    nonnegative: bool = False
    upper: Tensor | None = None

    def unknown_counts(self, zero: Tensor | None = None) -> Tensor:
        """Return how many numbers of each channel (K,) are unknown, without those that turned out to be zero."""
        return (~self.known if zero is None else ~(self.known | zero)).sum((0, 2, 3))


@dataclass(frozen=True)
class GradientEquations:
    """A x_k = G_k for every channel k.

    Attributes:
        matrix: A (equations, n H W), weighed.
        right: G (equations, K), weighed alike.
        as_images: from rows of x (n H W, K) to (n, K, H, W).
        as_rows: the way back.
        known: bool (equations, K), which of G are known, 0 elsewhere; None where all are.
    """

    matrix: Tensor
    right: Tensor
    as_images: Callable[[Tensor], Tensor]
    as_rows: Callable[[Tensor], Tensor]
    known: Tensor | None = None

    @property
    def known_share(self) -> float:
        """Return the share of G that is known."""
        return 1.0 if self.known is None else float(self.known.double().mean())

    def apply_gram(self, x: Tensor) -> Tensor:
        """Return A^T A x for x (n H W, K), of every channel by its equations that are known."""
        made = self.matrix @ x
        return self.matrix.mT @ (made if self.known is None else made * self.known)


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
            self._parts = _find_parts(gradients.matrix)
        gram = _BlockMatrix.gram(gradients.known_share**0.5 * gradients.matrix, self._parts)
        if gram.numbers * gradients.right.shape[1] > MAX_BLOCK_NUMBERS:
            return None
        product, right = _normal_equations(gradients, gram, self.others, ENTRY_WEIGHT)
        own = _diagonal_of_others(gradients, self.others, ENTRY_WEIGHT)
        unknown = gradients.as_rows(~entries.known)
        fixed = gradients.as_rows(entries.values) * ~unknown
        system = _Restricted(product, right - product(fixed), gram, own)
        if not entries.nonnegative:
            found = system.solve(unknown, start, tolerance)
            return None if found is None else _by_channels(found + fixed)
        if self.zero is None:
            upper = None if entries.upper is None else gradients.as_rows(entries.upper)
            start = _settle(system, gradients, fixed, unknown, upper, self._is_late)
            zero = start <= _negligible(start)
        else:
            zero = gradients.as_rows(self.zero)
        settled = _solve_with_zeros(system, unknown, zero, start, tolerance, self._is_late)
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


@dataclass(frozen=True)
class _System:
    """The normal equations of all numbers, where nothing is known of single ones, in coordinates of eigenvectors.

    Attributes:
        matrix: A.
        basis: the eigenvectors of A^T A.
        precondition: the preconditioner.
        right: the right side.
        product: returns N y.
    """

    matrix: Tensor
    basis: _Eigenbasis
    precondition: _Preconditioner
    right: Tensor
    product: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, gradients: GradientEquations, others: LinearEquations) -> _System | None:
        """Return the system; None where a direction is in none of the equations."""
        a, as_images, as_rows = gradients.matrix, gradients.as_images, gradients.as_rows
        basis = _Eigenbasis.of(gradients.known_share * (a.mT @ a))
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
        """Return x as `JointSolver` does."""
        begin = None if start is None else self.basis.to(start)
        y = _conjugate_gradients(self.product, self.right, self.precondition, begin, tolerance)
        return None if y is None else self.basis.back(y)


def _normal_equations(
    gradients: GradientEquations, gram: _BlockMatrix, others: LinearEquations | None, weight: float
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return x -> N x, and the right side of N x = A^T G + w F^T t."""
    right = gradients.matrix.mT @ gradients.right
    by_gradients = _gradient_product(gradients, gram)
    if others is None:
        return by_gradients, right

    def product(x: Tensor) -> Tensor:
        return by_gradients(x) + weight * gradients.as_rows(others.pull(others.push(gradients.as_images(x))))

    return product, right + weight * gradients.as_rows(others.pull(others.right_side()))


def _gradient_product(gradients: GradientEquations, gram: _BlockMatrix) -> Callable[[Tensor], Tensor]:
    """Return x -> A^T A x, by the blocks of that where all equations are known."""
    return gram.__matmul__ if gradients.known is None else gradients.apply_gram


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
class _Restricted:
    """N x = b for some numbers of x, while the others are zero.

    Attributes:
        product: returns N x.
        right: b.
        gram: A^T A.
        own: what else there is of N's diagonal (K,).
    """

    product: Callable[[Tensor], Tensor]
    right: Tensor
    gram: _BlockMatrix
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

        return _conjugate_gradients(
            product, right * free, precondition, None if start is None else start * free, tolerance
        )


def _settle(
    system: _Restricted,
    gradients: GradientEquations,
    fixed: Tensor,
    unknown: Tensor,
    upper: Tensor | None,
    is_late: Callable[[], bool],
) -> Tensor:
    """Return x without what is known, next to no number of which is below zero.

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
    by_gradients = _gradient_product(gradients, system.gram)
    few = MIN_CHANNEL_RATIO * unknown.sum(0) <= equations
    right = gradients.matrix.mT @ gradients.right - by_gradients(fixed)
    alone = _Restricted(by_gradients, right, system.gram, torch.zeros_like(system.own))
    near = alone.solve(unknown & few, None, SIGN_TOLERANCES[-1])
    if near is None or bool(few.all()):
        return _settle_signs(system, unknown, upper, is_late) if near is None else near
    rest = replace(system, right=system.right - system.product(near))
    return near + _settle_signs(rest, unknown & ~few, upper, is_late)


def _settle_signs(system: _Restricted, unknown: Tensor, upper: Tensor | None, is_late: Callable[[], bool]) -> Tensor:
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


def _solve_with_zeros(
    system: _Restricted,
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
        least = _negligible(found)
        changed = unknown & torch.where(zero, missing > least, found < -least)
        count = int(changed.sum())
        if count <= MAX_CHANGED_ZEROS * int(unknown.sum()) or count >= before:
            break
        zero, start, before = zero ^ changed, found, count
    return found, zero & unknown


def _negligible(x: Tensor) -> float:
    """Return up to which number one of x counts as zero."""
    return NEGLIGIBLE * float(x.max())


def _conjugate_gradients(
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


def _find_parts(matrix: Tensor) -> list[Tensor]:
    """Return the columns of a matrix in parts that no row ties together; those of zeros are one part."""
    there = matrix != 0
    part = torch.zeros(matrix.shape[1], dtype=torch.long, device=matrix.device)
    open_ = there.any(0)
    count = 0
    while bool(open_.any()):
        count += 1
        columns = torch.zeros_like(open_)
        columns[int(open_.nonzero()[0])] = True
        size = 0
        while int(columns.sum()) > size:
            size = int(columns.sum())
            columns = there[there[:, columns].any(1)].any(0)
        part[columns] = count
        open_ &= ~columns
    return [places for k in range(count + 1) if len(places := (part == k).nonzero()[:, 0])]


@dataclass(frozen=True)
class _BlockMatrix:
    """A square matrix of blocks.

    Attributes:
        blocks: places (m, size) and matrices (m, size, size) of the blocks of each size.
    """

    blocks: list[tuple[Tensor, Tensor]]

    @classmethod
    def gram(cls, a: Tensor, parts: Sequence[Tensor]) -> _BlockMatrix:
        """Return A^T A, of whose columns no row of A ties parts together."""
        by_size: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for places in parts:
            columns = a[:, places]
            columns = columns[(columns != 0).any(1)]
            by_size.setdefault(len(places), []).append((places, columns.mT @ columns))
        return cls(
            [(torch.stack(p), torch.stack(m)) for p, m in (zip(*pairs, strict=True) for pairs in by_size.values())]
        )

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the product with x (n, K)."""
        out = torch.empty_like(x)
        for places, matrices in self.blocks:
            out[places] = matrices @ x[places]
        return out

    @property
    def numbers(self) -> int:
        """Return how many numbers the blocks hold."""
        return sum(matrices.numel() for _, matrices in self.blocks)

    def diagonal(self) -> Tensor:
        """Return the diagonal (n,)."""
        found = self.blocks[0][1].new_empty(sum(places.numel() for places, _ in self.blocks))
        for places, matrices in self.blocks:
            found[places] = matrices.diagonal(dim1=1, dim2=2)
        return found

    def invert_restricted(self, free: Tensor, added: Tensor) -> Callable[[Tensor], Tensor]:
        """Return x -> P (P M P + D)^-1 P x for every channel by itself, where M is this matrix.

        Args:
            free: where the diagonals of P are 1 and not 0 (n, K).
            added: the diagonals of D (n, K), or (K,).
        """
        added = added.expand_as(free)
        parts = free.sum(0).argsort().split(CHANNELS_TOGETHER)  # channels of about as many free numbers
        inverses = [
            (channels, places, *_invert_free(matrices, *(part[places[..., None], channels] for part in (free, added))))
            for channels in parts
            for places, matrices in self.blocks
        ]

        def invert(x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for channels, places, order, inverse in inverses:
                part = x[places[..., None], channels].permute(2, 0, 1)
                # An inverse is symmetric, and its columns lie together in memory: products from the left are faster.
                found = (part.gather(-1, order)[..., None, :] @ inverse)[..., 0, :]
                out[places[..., None], channels] = torch.zeros_like(part).scatter_(-1, order, found).permute(1, 2, 0)
            return out * free

        return invert


def _invert_free(matrices: Tensor, free: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows of blocks are kept, free ones first, and the inverses of these rows and columns.

    A channel of fewer free numbers than another has rows of others among them, each of which stands for itself.

    Args:
        matrices: blocks (m, size, size).
        free: (m, size, channels).
        added: to the diagonal, likewise.

    Returns:
        (channels, m, width) and (channels, m, width, width).
    """
    free, added = free.permute(2, 0, 1), added.permute(2, 0, 1)
    width = int(free.sum(-1).max())
    order = free.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    kept = free.gather(-1, order)
    block = torch.arange(len(matrices), device=order.device)[:, None, None]
    whole = matrices[block, order[..., :, None], order[..., None, :]]
    whole = whole * kept[..., :, None] * kept[..., None, :]
    ridge = RIDGE * matrices.diagonal(dim1=1, dim2=2).max()
    whole.diagonal(dim1=-2, dim2=-1).add_(torch.where(kept, added.gather(-1, order) + ridge, 1.0))
    factor, failed = torch.linalg.cholesky_ex(whole)
    if bool(failed.any()):  # rounding of an ill-conditioned block: its diagonal preconditions as well, more slowly
        diagonal = torch.diag_embed(whole.diagonal(dim1=-2, dim2=-1).clamp_min(ridge))
        factor = torch.linalg.cholesky_ex(torch.where(failed[..., None, None] > 0, diagonal, whole))[0]
    return order, torch.cholesky_inverse(factor)


@dataclass(frozen=True)
class _Eigenbasis:
    """Eigenvectors of a symmetric matrix, block by block.

    Attributes:
        values: eigenvalues (n,), block after block.
        blocks: places (m, size) and eigenvectors (m, size, size) of the blocks of each size.
    """

    values: Tensor
    blocks: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, matrix: Tensor) -> _Eigenbasis:
        """Return the eigenvectors of a matrix, block by block where zeros part it into blocks."""
        count, part = connected_components(csr_array((matrix != 0).cpu().numpy()), directed=False)
        order = torch.from_numpy(part).to(matrix.device).argsort(stable=True)
        sizes = torch.bincount(torch.from_numpy(part), minlength=count).tolist()
        values, blocks = [], []
        parts = order.split(sizes)
        for size in sorted(set(sizes)):
            places = torch.stack([places for places in parts if len(places) == size])
            found, vectors = torch.linalg.eigh(matrix[places[:, :, None], places[:, None]])
            values.append(found.clamp_min(0).flatten())
            blocks.append((places, vectors))
        return cls(torch.cat(values), blocks)

    def to(self, x: Tensor) -> Tensor:
        """Return rows x (n, K) in coordinates of the eigenvectors, block after block."""
        return torch.cat([(vectors.mT @ x[places]).flatten(0, 1) for places, vectors in self.blocks])

    def back(self, y: Tensor) -> Tensor:
        """Return rows x of their coordinates y (n, K)."""
        x = torch.empty_like(y)
        for (places, vectors), part in zip(self.blocks, y.split([p.numel() for p, _ in self.blocks]), strict=True):
            x[places] = vectors @ part.view(*places.shape, -1)
        return x


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
        cls, basis: _Eigenbasis, gradients: GradientEquations, others: LinearEquations
    ) -> tuple[_Preconditioner, float] | None:
        """Return it, with p and m estimated from random signs, and the weight w of F's equations.

        It is None where a direction is in neither A nor F: iterations would leave it at zero, as if that were known.
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
        values = values.clamp_min(LEAST_SHARE * float(values.max()))
        shares = shares.clamp_min(LEAST_SHARE * float(shares.max())) / shares.mean()
        told = min(int(MAX_TOLD_SHARE * others.count / k), n - 1)
        level = float(basis.values.sort().values[told]) / float(values.mean())
        weight = min(1.0, max(level, LEAST_WEIGHT))
        return cls(channels, basis.values[:, None] + weight * shares[:, None] * values), weight

    def __call__(self, y: Tensor) -> Tensor:
        """Return what y (n, K) is divided to."""
        return ((y @ self.channels) / self.divisors) @ self.channels.mT
