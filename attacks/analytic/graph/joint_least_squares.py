r"""Least squares of two kinds of equations for what layers take, where their gradients alone are too few.

Of layers that share an input x (n, K, H, W) are known

    (1) A x_k = G_k    for every input channel k: their gradients, with one matrix A for all channels
    (2) F x = t        what else is linear in x, such as outputs of the layers that were solved for

A mixes the positions of all images, each channel for itself. F mixes channels, each image for itself. A has no more
rows with more images, F has as many for each. So a batch that is too large for (1) leaves some directions open, or A
ill-conditioned, and (2) says how much of each is in x.

Both are weighed by their rounding, and solved by conjugate gradients on the normal equations, in coordinates in which
A^T A is diagonal:

    (S + w V^T F^T F V) y = V^T (A^T G + w F^T t),    A^T A = V S V^T,    x = V y.

Positions that no equation of A ties together, such as those that a stride keeps apart, make blocks of V. With C the
eigenvectors of the channels' part of F^T F, the preconditioner divides by S_i + w p_i m_j in the coordinates V and C.
m_j is an eigenvalue of that part, averaged over positions, and p_i how much F hears of direction i, relative to others.

The weight w is 1 by rounding alone. Where A hears many directions a little, F cannot tell all of them, and the system
is ill-conditioned: there w is less, so that A counts more in all directions but as many as F can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fl.seeds import stream

MAX_ITERATIONS, LARGEST_GRADIENT = 200, 1e-3
"""Of conjugate gradients, and what share of the gradient at zero may be left after them."""
PROBES = 4
"""Random inputs of which the preconditioner is estimated."""
MAX_TOLD_SHARE = 0.4
"""Directions that are left to F, as a share of its equations for one channel."""
LEAST_WEIGHT = 1e-3
"""Weight of F's equations, at least."""
UNHEARD = 1e-12
"""Share of the largest eigenvalue below which equations do not hear a direction."""
LEAST_HEARD = 1e-3
"""Share of the largest number of the preconditioner that each is taken to have at least."""


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
class GradientEquations:
    """A x_k = G_k for every channel k.

    Attributes:
        matrix: A (equations, n H W), weighed.
        right: G (equations, K), weighed alike.
        as_images: from rows of x (n H W, K) to (n, K, H, W).
        as_rows: the way back.
    """

    matrix: Tensor
    right: Tensor
    as_images: Callable[[Tensor], Tensor]
    as_rows: Callable[[Tensor], Tensor]


def solve_together(
    gradients: GradientEquations, others: LinearEquations, start: Tensor | None = None, tolerance: float = 1e-8
) -> Tensor | None:
    """Return x (n H W, K) that leaves least of both kinds of equations; None if they leave numbers open.

    They do where a direction is in neither kind, or where they leave so much open that iterations do not end.

    Args:
        gradients: A and G.
        others: F and t.
        start: x (n H W, K) to begin with.
        tolerance: share of the gradient at zero, in the preconditioner's norm, at which it ends. After `MAX_ITERATIONS`
            it may be above, up to `LARGEST_GRADIENT`.
    """
    a, as_images, as_rows = gradients.matrix, gradients.as_images, gradients.as_rows
    basis = _Eigenbasis.of(a.mT @ a)
    estimate = _Preconditioner.of(basis, gradients, others)
    if estimate is None:
        return None
    precondition, weight = estimate
    right = basis.to(a.mT @ gradients.right + weight * as_rows(others.pull(others.right_side())))

    def product(y: Tensor) -> Tensor:
        heard = as_rows(others.pull(others.push(as_images(basis.back(y)))))
        return basis.values[:, None] * y + weight * basis.to(heard)

    step = precondition(right)
    whole = float((right * step).sum())
    y = step if start is None else basis.to(start)
    rest = right - product(y)
    direction = precondition(rest)
    gamma = float((rest * direction).sum())
    for _ in range(MAX_ITERATIONS):
        if not gamma > tolerance**2 * whole:
            break
        made = product(direction)
        length = gamma / float((direction * made).sum())
        y = y + length * direction
        rest = rest - length * made
        step = precondition(rest)
        following = float((rest * step).sum())
        direction, gamma = step + following / gamma * direction, following
    return basis.back(y) if gamma <= max(tolerance, LARGEST_GRADIENT) ** 2 * whole else None


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
        """Return the eigenvectors of a matrix, of which what its zeros keep apart is looked at apart."""
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
    """Divides by S_i + w p_i m_j.

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
        heard, mixed = basis.values.new_zeros(n), basis.values.new_zeros(k, k)
        for _ in range(PROBES):
            probe = (2.0 * torch.randint(0, 2, (n, k), generator=draw) - 1).to(basis.values)
            answer = basis.to(gradients.as_rows(others.pull(others.push(gradients.as_images(basis.back(probe))))))
            heard += (probe * answer).sum(1) / (k * PROBES)
            mixed += probe.mT @ answer / (n * PROBES)
        values, channels = torch.linalg.eigh((mixed + mixed.mT) / 2)
        unheard = basis.values <= UNHEARD * float(basis.values.max())
        if bool((unheard & (heard <= UNHEARD * float(heard.max()))).any()):
            return None
        if bool(unheard.any()) and float(values.min()) <= UNHEARD * float(values.max()):
            return None
        values = values.clamp_min(LEAST_HEARD * float(values.max()))
        heard = heard.clamp_min(LEAST_HEARD * float(heard.max())) / heard.mean()
        told = min(int(MAX_TOLD_SHARE * others.count / k), n - 1)
        level = float(basis.values.sort().values[told]) / float(values.mean())
        weight = min(1.0, max(level, LEAST_WEIGHT))
        return cls(channels, basis.values[:, None] + weight * heard[:, None] * values), weight

    def __call__(self, y: Tensor) -> Tensor:
        """Return what y (n, K) is divided to."""
        return ((y @ self.channels) / self.divisors) @ self.channels.mT
