r"""Least squares and low rank where entries of a gradient were not sent, as under pruning.

Where only the entries of a gradient G in a set Omega were sent, its equations still hold there. Of a layer with A x_k =
G_k for every input channel k (`layer_equations`), the input minimizes

    sum over k and over e with (e, k) in Omega of (A_e x_k - G_ek)^2,

where every channel has equations of its own, and so a matrix of its own, A^T diag(Omega_k) A.

**Completion** (`complete_low_rank`). The gradient of a convolution that sees n positions has rank n at most, over
output channels and the rest. M = U V^T of that rank is fitted to the entries in Omega by least squares in turn: U given
V, V given U (Jain, Netrapalli and Sanghavi, Low-rank matrix completion using alternating minimization, STOC 2013). It
takes more entries than the n (rows + columns - n) numbers that a matrix of rank n has.

**Silent slices** (`find_sent`). A zero that was sent looks like an entry that was not. An input channel or a position
of the kernel through which nothing flows makes zeros all over its slice. That all of so many entries were left out by
chance is out of the question, so these zeros count as sent. A defense that leaves out whole slices, as Soteria does,
breaks that: what is found must then fail the comparison with what was sent (`attacks.verification.left_out`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.search_control import check_time_limit
from fl.seeds import stream

MIN_SPARE = 1.1
"""Entries sent for one number of a matrix of low rank, at least."""
SENT_FOR_CERTAIN = 1e-9
"""Chance at which a slice of zeros was left out entry by entry, at most, for its zeros to count as sent."""
MAX_TURNS = 60
"""Alternating least squares, at most."""
FIRST_RIDGE = 0.3
"""The first ridge, relative to the share of entries that were sent."""
RIDGE_STEP = 0.85
"""Factor from one ridge to the next."""
EXACT = 3e-8
"""What is left of the sent entries, relative to them, at which completion ends."""
ITERATED, MAX_ITERATIONS = 1e-12, 150
"""Share of what is left at zero, in the preconditioner's norm, at which conjugate gradients end, and steps at most."""
SAME = 1e-6
"""How near to a known solution iterations must come, relative to it, for a column's equations to tell all of it."""
LEAST = 1e-300
"""What is divided by, at least."""
MOST_DIRECTLY = 128
"""Numbers of a column up to which its own matrix is made: of more, iterations take less time."""
MAX_STACKED = 2**24
"""Numbers of products that are made in one piece."""
LEAST_RIDGE = 1e-14
"""Ridge, at least: it keeps equations solvable."""


def find_sent(gradient: Tensor, sent: Tensor) -> Tensor:
    """Return which entries of a gradient are known: those sent, and zeros of slices through which nothing flows.

    Args:
        gradient: of any shape, zero where nothing was sent.
        sent: bool, likewise: what is other than zero, or is known to have been sent.
    """
    share = 1 - float(sent.double().mean())
    if not 0 < share < 1:
        return sent
    enough = math.log(SENT_FOR_CERTAIN) / math.log(share)
    known, axes = sent.clone(), range(gradient.ndim)
    slices = {(axis,) for axis in axes} | {tuple(other for other in axes if other != axis) for axis in axes}
    for through in sorted(slices):  # the axes that a slice goes through
        if math.prod(gradient.shape[axis] for axis in through) >= enough:
            known |= ~sent.any(dim=through, keepdim=True)
    return known


def masked_least_squares(a: Tensor, b: Tensor, sent: Tensor) -> Tensor | None:
    """Return x (n, K) of least squares over the equations of each column that were sent; None if one leaves it open.

    Args:
        a: (equations, n).
        b: (equations, K), zero where nothing was sent.
        sent: bool (equations, K).
    """
    scale = a.norm(dim=0)
    if not bool((scale > 0).all()) or int(sent.sum(0).min()) < a.shape[1]:
        return None
    even, weights = a / scale, sent.to(a.dtype)
    found = _solve_together(even, b * weights, weights) if a.shape[1] > MOST_DIRECTLY else None
    found = _solve_each(even, b * weights, weights) if found is None else found
    return None if found is None else found / scale[:, None]


def _solve_together(a: Tensor, b: Tensor, weights: Tensor) -> Tensor | None:
    """Return x (n, K) by iterations; None where they do not end, or leave a direction of the null space at zero.

    A known solution goes along with each column's: a direction in the null space is missing there, too.
    """
    probe = torch.randn(a.shape[1], b.shape[1], generator=stream(0, "probe"), dtype=a.dtype).to(a.device)
    both, ended = _iterate(a, torch.cat([b, (a @ probe) * weights], 1), weights.repeat(1, 2))
    found, again = both.chunk(2, 1)
    complete = (again - probe).norm(dim=0) <= SAME * probe.norm(dim=0)
    return found if bool(ended.all() and complete.all()) else None


def _iterate(a: Tensor, b: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (n, K) by conjugate gradients, and which of its columns (K,) converged.

    The matrix of all equations, a^T a, is near to that of each column's own, but for a factor, where what was sent is
    spread evenly. So it preconditions all columns at once.
    """
    x = b.new_zeros(a.shape[1], b.shape[1])
    factor, failed = torch.linalg.cholesky_ex(a.mT @ a)
    if int(failed):
        return x, torch.zeros(b.shape[1], dtype=torch.bool, device=b.device)
    rest = a.mT @ b
    step = torch.cholesky_solve(rest, factor)
    direction, gamma = step, (rest * step).sum(0)
    goal = ITERATED**2 * gamma
    for _ in range(MAX_ITERATIONS):
        check_time_limit()
        if bool((gamma <= goal).all()):
            break
        made = a.mT @ (weights * (a @ direction))
        length = gamma / (direction * made).sum(0).clamp_min(LEAST)
        x = x + length * direction
        rest = rest - length * made
        step = torch.cholesky_solve(rest, factor)
        before, gamma = gamma, (rest * step).sum(0)
        direction = step + gamma / before.clamp_min(LEAST) * direction
    return x, gamma <= goal


def _solve_each(a: Tensor, b: Tensor, weights: Tensor) -> Tensor | None:
    """Return x (n, K) by each column's own matrix, refined once; None if one is singular."""
    factor, failed = torch.linalg.cholesky_ex(_grams(a, weights))
    if bool(failed.any()):
        return None
    x = torch.cholesky_solve((b.mT @ a)[..., None], factor)[..., 0]
    residual = b.mT - weights.mT * (x @ a.mT)
    return (x + torch.cholesky_solve((residual @ a)[..., None], factor)[..., 0]).mT


def _grams(a: Tensor, weights: Tensor) -> Tensor:
    """Return a^T diag(w_k) a (K, n, n) for columns w_k of weights (equations, K)."""
    size = a.shape[1]
    found = a.new_zeros(weights.shape[1], size * size)
    rows = max(1, MAX_STACKED // (size * size))
    for part, weight in zip(a.split(rows), weights.split(rows), strict=True):
        check_time_limit()
        found += weight.mT @ (part[:, :, None] * part[:, None, :]).flatten(1)  # of all products of two numbers
    return found.unflatten(1, (size, size))


def complete_low_rank(matrix: Tensor, sent: Tensor, rank: int) -> Tensor | None:
    """Return a matrix of some rank with the entries that were sent; None where these are too few to tell the others.

    Args:
        matrix: (rows, columns), zero where nothing was sent.
        sent: bool, likewise.
        rank: of the whole.
    """
    rows, columns = matrix.shape
    if rank >= min(rows, columns):
        return None
    heard_rows, heard_columns = (matrix != 0).any(1), (matrix != 0).any(0)
    part, known = matrix[heard_rows][:, heard_columns], sent[heard_rows][:, heard_columns]
    rank = min(rank, *part.shape)
    if not part.numel() or int(known.sum()) < MIN_SPARE * rank * (sum(part.shape) - rank):
        return None
    whole = torch.zeros_like(matrix)
    whole[heard_rows[:, None] & heard_columns] = _alternate(part, known, rank).flatten()
    return torch.where(sent, matrix, whole)


def _alternate(matrix: Tensor, sent: Tensor, rank: int) -> Tensor:
    """Return U V^T fitted to the sent entries by least squares in turn, with a ridge that fades.

    Without a ridge a column of few entries goes with any basis, and then all of the basis with it.
    """
    weights, size = sent.to(matrix.dtype), matrix.norm()
    share = float(weights.mean())
    v, ridge = torch.linalg.svd(matrix, full_matrices=False)[2][:rank].mT, FIRST_RIDGE
    for _ in range(MAX_TURNS):
        check_time_limit()
        u = torch.linalg.qr(_fit_rows(matrix, weights, v, share * ridge))[0]
        v = _fit_rows(matrix.mT, weights.mT, u, share * ridge)
        made = u @ v.mT
        if float(((matrix - made) * weights).norm() / size) < EXACT:
            break
        v, ridge = torch.linalg.qr(v)[0], max(RIDGE_STEP * ridge, LEAST_RIDGE)
    return made


def _fit_rows(matrix: Tensor, weights: Tensor, basis: Tensor, ridge: float) -> Tensor:
    """Return for every row of a matrix its coordinates in a basis (columns, rank), by the entries of weight one."""
    grams = _grams(basis, weights.mT)
    grams.diagonal(dim1=1, dim2=2).add_(ridge)
    factor = torch.linalg.cholesky_ex(grams)[0]
    return torch.cholesky_solve(((matrix * weights) @ basis)[..., None], factor)[..., 0]


class AndersonAcceleration:
    """Extrapolates a fixed point from the last steps towards it (Anderson, 1965; Walker and Ni, 2011).

    With steps f_i = F(s_i) - s_i the next s is sum a_i F(s_i), where a minimizes |sum a_i f_i| and sums to one.

    Args:
        remembered: steps, at most.
    """

    def __init__(self, remembered: int) -> None:
        self.remembered = remembered
        self.made: list[Tensor] = []
        self.steps: list[Tensor] = []

    def extrapolate(self, at: Tensor, made: Tensor) -> Tensor:
        """Return where to go on from.

        Args:
            at: s.
            made: F(s).
        """
        self.made = [*self.made, made.flatten()][-self.remembered :]
        self.steps = [*self.steps, (made - at).flatten()][-self.remembered :]
        changes = torch.stack([self.steps[-1] - step for step in self.steps[:-1]], 1) if len(self.steps) > 1 else None
        if changes is None:
            return made
        shares = torch.linalg.pinv(changes) @ self.steps[-1]
        back = torch.stack([self.made[-1] - before for before in self.made[:-1]], 1) @ shares
        return (self.made[-1] - back).reshape(made.shape)
