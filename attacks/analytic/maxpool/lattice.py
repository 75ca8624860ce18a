"""Whole numbers behind linear equations that, were the numbers real, would leave some combinations of them open.

The closest-vector problem of integer least squares: a basis is reduced (Lenstra, Lenstra and Lovasz, 1982), and the
nearest planes are followed (Babai, 1986).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

RULED_OUT_DEVIATIONS = 6.0
"""Standard deviations by which two candidates differ, at least, where the equations tell them apart."""
MAX_INVERSE_VARIANCE = 3e7
"""Inverse variance of a number that is more than enough: with more, double precision does not do for loose ones."""
LOVASZ = 0.99
MAX_SWAPS = 100
"""Swaps of neighbors in a basis, times its size squared: more are made by rounding alone."""

OFFSETS = np.array([0.0, -1.0, 1.0, -2.0, 2.0])
"""Whole numbers tried beside the one that is nearest in a plane."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Lattice:
    """All vectors of whole numbers, measured by a positive definite matrix: their distance in standard deviations.

    Attributes:
        matrix: (n, n), the inverse covariance of the numbers if they were real.
    """

    matrix: Array

    @cached_property
    def reduced_basis(self) -> tuple[Array, Array]:
        """A basis of short, nearly orthogonal vectors (n, n), one a column, and its triangular factor.

        By the algorithm of Lenstra, Lenstra and Lovasz, with the factor kept up to date by rotations.

        Raises:
            numpy.linalg.LinAlgError: if double precision does not suffice for the matrix.
        """
        factor: Array = np.array(np.linalg.cholesky(self.matrix).T, dtype=np.float64)
        basis: Array = np.eye(len(factor))
        k, left = 1, MAX_SWAPS * len(factor) ** 2
        while k < len(factor):
            _shorten(factor, basis, k, k - 1)
            if factor[k, k] ** 2 + factor[k - 1, k] ** 2 >= LOVASZ * factor[k - 1, k - 1] ** 2:
                j = k - 1
                while len(long := np.flatnonzero(np.abs(factor[:j, k]) > np.abs(factor.diagonal()[:j]) / 2)):
                    j = int(long[-1])
                    _shorten(factor, basis, k, j)
                k += 1
                continue
            left -= 1
            if not left:
                raise np.linalg.LinAlgError("the basis does not get shorter: rounding is in the way")
            for x in (factor, basis):
                x[:, [k - 1, k]] = x[:, [k, k - 1]]
            length = np.hypot(factor[k - 1, k - 1], factor[k, k - 1])
            cos, sin = factor[k - 1, k - 1] / length, factor[k, k - 1] / length
            factor[k - 1 : k + 1] = np.array([[cos, sin], [-sin, cos]]) @ factor[k - 1 : k + 1]
            factor[k, k - 1] = 0.0
            k = max(k - 1, 1)
        return basis, factor

    @cached_property
    def _inverse(self) -> Array:
        """The inverse of the basis (n, n); its entries are whole numbers, too."""
        return np.round(np.linalg.inv(self.reduced_basis[0]))

    @property
    def determined(self) -> NDArray[np.bool_]:
        """Which numbers are the same in all candidates (n,) that are less than `RULED_OUT_DEVIATIONS` apart.

        A vector that takes part in the basis from place i on is at least as long as the shortest remainder there, so
        what the vectors before the last short remainder do not touch is determined.
        """
        basis, factor = self.reduced_basis
        short = np.abs(np.diag(factor)) < RULED_OUT_DEVIATIONS
        open_ones = int(short.nonzero()[0].max()) + 1 if short.any() else 0
        return np.logical_not(basis[:, :open_ones].any(axis=1))

    def nearest(self, center: Array, matrix: Array) -> Array:
        """Return whole numbers (n,) near `center` (n,), as `matrix` (n, n) measures it, by Babai's nearest plane."""
        return self.nearest_candidates(center, matrix, 1)[0]

    def nearest_candidates(self, center: Array, matrix: Array, count: int) -> Array:
        """Return some whole numbers (at most `count`, n) near `center`, nearest first.

        Babai's nearest plane, with the best `count` kept from one plane to the next.

        Args:
            center: the real solution (n,).
            matrix: the metric (n, n); it may hold more than this lattice's own, or a little else, for which its basis
                is short too.
            count: how many.
        """
        basis, _ = self.reduced_basis
        factor = np.linalg.cholesky(basis.T @ matrix @ basis).T
        real = self._inverse @ center
        whole, far = np.zeros((1, len(real))), np.zeros(1)
        for i in range(len(real) - 1, -1, -1):
            wanted = real[i] + (real - whole)[:, i + 1 :] @ factor[i, i + 1 :] / factor[i, i]
            values = np.round(wanted)[:, None] + (OFFSETS if count > 1 else OFFSETS[:1])
            total = far[:, None] + (factor[i, i] * (values - wanted[:, None])) ** 2
            kept = np.argsort(total, axis=None, kind="stable")[:count]
            whole, far = whole[kept // values.shape[1]], total.flat[kept]
            whole[:, i] = values.flat[kept]
        return np.round(whole @ basis.T)


def _shorten(factor: Array, basis: Array, k: int, j: int) -> None:
    """Take as much of vector `j` from vector `k` as brings them nearest to a right angle, in place."""
    times = np.round(factor[j, k] / factor[j, j])
    if times:
        factor[: j + 1, k] -= times * factor[: j + 1, j]
        basis[:, k] -= times * basis[:, j]
