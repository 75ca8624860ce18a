"""Symmetric matrices: products, factors and inverses of large positive definite ones, eigenvalues of many small ones.

Large ones go to the LAPACK that scipy ships (OpenBLAS) on a CPU: of 3,072 rows factor and inverse take .6 of the time
on an AMD processor that they take in torch, whose LAPACK is Intel's. On another device torch does it. All matrices have
at least one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import get_blas_funcs, get_lapack_funcs
from threadpoolctl import ThreadpoolController
from torch import Tensor

from attacks.search_control import check_time_limit

Numbers = npt.NDArray[np.floating]
BLOCK = 256
"""Rows copied to the other side of the diagonal at once."""
BATCH = 2**14
"""Matrices whose eigenvalues are asked for together: of 40,000 a GPU's library failed (mujocolab/mjlab, issue 732)."""
LOCK = Lock()


class Factor(ABC):
    """The Cholesky factor of one matrix."""

    @classmethod
    def of(cls, matrix: Tensor) -> Factor | None:
        """Return the factor of a symmetric matrix (n, n), n > 0, in either precision.

        None where it is not positive definite.
        """
        check_time_limit()
        return _Lapack.of(matrix) if matrix.device.type == "cpu" else _Torch.of(matrix)

    @abstractmethod
    def solve(self, right: Tensor) -> Tensor:
        """Return the inverse times `right` (n,) or (n, k)."""

    @abstractmethod
    def variances(self) -> Tensor:
        """Return the diagonal of the inverse (n,), at half its cost: the summed squares of the factor's inverse."""

    @abstractmethod
    def inverse(self) -> Tensor:
        """Return the inverse (n, n)."""


@dataclass(frozen=True)
class _Lapack(Factor):
    """On a CPU.

    Attributes:
        lower: the factor, column by column, with anything above the diagonal (n, n).
    """

    lower: Numbers

    @classmethod
    def of(cls, matrix: Tensor) -> _Lapack | None:
        columns = _to_numpy(matrix).T
        (potrf,) = get_lapack_funcs(("potrf",), (columns,))
        with _match_torch_threads():
            lower, failed = potrf(columns, lower=True, clean=False)
        return None if failed or not np.isfinite(lower.diagonal()).all() else cls(lower)

    def solve(self, right: Tensor) -> Tensor:
        columns = _to_numpy(right)
        (potrs,) = get_lapack_funcs(("potrs",), (self.lower,))
        with _match_torch_threads():
            solved, _ = potrs(self.lower, columns, lower=True)
        return torch.from_numpy(solved).view_as(right)

    def variances(self) -> Tensor:
        (trtri,) = get_lapack_funcs(("trtri",), (self.lower,))
        with _match_torch_threads():
            lower, _ = trtri(self.lower, lower=True)
        columns = (column[i:] for i, column in enumerate(lower.T))
        return torch.from_numpy(np.array([column @ column for column in columns]))

    def inverse(self) -> Tensor:
        (potri,) = get_lapack_funcs(("potri",), (self.lower,))
        with _match_torch_threads():
            half, _ = potri(self.lower, lower=True)
        return _mirror_lower_half(half)


@dataclass(frozen=True)
class _Torch(Factor):
    """On any other device.

    Attributes:
        lower: the factor (n, n), zero above the diagonal.
    """

    lower: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> _Torch | None:
        lower, failed = torch.linalg.cholesky_ex(matrix)
        return None if bool(failed) or not bool(lower.diagonal().isfinite().all()) else cls(lower)

    def solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right.reshape(len(right), -1), self.lower).reshape(right.shape)

    def variances(self) -> Tensor:
        whole = torch.eye(len(self.lower), dtype=self.lower.dtype, device=self.lower.device)
        return torch.linalg.solve_triangular(self.lower, whole, upper=False).square().sum(0)

    def inverse(self) -> Tensor:
        return torch.cholesky_inverse(self.lower).contiguous()


def spd_inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a positive definite matrix (n, n).

    Raises:
        ValueError: if it is not positive definite.
    """
    factor = Factor.of(matrix)
    if factor is None:
        raise ValueError("the matrix is not positive definite")
    return factor.inverse()


def gram(rows: Tensor) -> Tensor:
    """Return all products of the columns of `rows` (m, n) with each other (n, n), each computed once on a CPU."""
    if rows.device.type != "cpu":
        return rows.mT @ rows
    columns = _to_numpy(rows).T
    (syrk,) = get_blas_funcs(("syrk",), (columns,))
    with _match_torch_threads():
        half = syrk(1.0, columns, lower=True)
    return _mirror_lower_half(half)


def eigenvalues(matrices: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric matrices (..., m, n, n), rising (..., m, n)."""
    parts = matrices.flatten(0, -3).split(BATCH)
    return torch.cat([torch.linalg.eigvalsh(part) for part in parts]).view(matrices.shape[:-1])


def clamp_eigenvalues(matrices: Tensor, low: Tensor, high: Tensor | None = None) -> Tensor:
    """Return symmetric matrices (..., m, n, n) with their eigenvalues moved into [low, high].

    Args:
        matrices: symmetric ones (..., m, n, n).
        low: least eigenvalues, to be broadcast to (..., m, n).
        high: largest eigenvalues, likewise.
    """
    parts = (0.5 * (matrices + matrices.mT)).flatten(0, -3).split(BATCH)
    values, vectors = (torch.cat(side) for side in zip(*map(torch.linalg.eigh, parts), strict=True))
    values, vectors = values.view(matrices.shape[:-1]), vectors.view(matrices.shape)
    return (vectors * values.clamp(low, high)[..., None, :]) @ vectors.mT


def _mirror_lower_half(half: Numbers) -> Tensor:
    """Return the symmetric matrix whose lower triangle is given column by column."""
    rows = half.T  # as torch has it: now what is there lies above the diagonal
    for i in range(0, len(rows), BLOCK):
        here = rows[i : i + BLOCK, i : i + BLOCK]
        here[:] = np.triu(here) + np.triu(here, 1).T
        for j in range(i + BLOCK, len(rows), BLOCK):
            rows[j : j + BLOCK, i : i + BLOCK] = rows[i : i + BLOCK, j : j + BLOCK].T
    return torch.from_numpy(rows)


def _to_numpy(values: Tensor) -> Numbers:
    return values.detach().contiguous().numpy()


@cache
def _thread_controller() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def _match_torch_threads() -> Iterator[None]:
    """Use as many threads as torch: their number changes the rounding, and worker processes share the cores.

    The limit is the process's own, so that only one Python thread at a time sets it.
    """
    with LOCK, _thread_controller().limit(limits=torch.get_num_threads(), user_api="blas"):
        yield
