"""Eigenvalues of many small symmetric matrices."""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 2**14
"""Matrices whose eigenvalues are asked for together: of 40,000 a GPU's library failed (mujocolab/mjlab, issue 732)."""


def eigenvalues(matrices: Tensor) -> Tensor:
    """Of symmetric matrices (..., m, n, n), rising (..., m, n)."""
    parts = matrices.flatten(0, -3).split(AT_ONCE)
    return torch.cat([torch.linalg.eigvalsh(part) for part in parts]).view(matrices.shape[:-1])


def bounded(matrices: Tensor, low: Tensor, high: Tensor | None = None) -> Tensor:
    """Symmetric matrices (..., m, n, n) with their eigenvalues moved into [low, high]."""
    parts = (0.5 * (matrices + matrices.mT)).flatten(0, -3).split(AT_ONCE)
    values, vectors = (torch.cat(side) for side in zip(*map(torch.linalg.eigh, parts), strict=True))
    values, vectors = values.view(matrices.shape[:-1]), vectors.view(matrices.shape)
    return (vectors * values.clamp(low, high)[..., None, :]) @ vectors.mT
