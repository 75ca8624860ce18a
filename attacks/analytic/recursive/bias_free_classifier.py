"""What flows back into a classifier without bias, from its weight gradient and the loss.

With logits z = W x the gradient is delta x^T, delta = softmax(z) - e_y: of rank one, sigma u v^T. So x = +-t v, and

    |delta(t)| t = sigma,   delta(t) = softmax(+-t W v) - e_y                                   (1)

is one equation for the size t. R-GAP solves it for two classes, where it reads <dL/dW, W> = -mu / (1 + e^mu) with the
margin mu: one solution for a wrong prediction, up to two for a right one. With more classes u fixes the sign of v, as
delta is negative for the true class alone, and tells solutions apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

GRID_POINTS = 4001
"""Sizes tried for the classifier's input, evenly in their logarithm."""


def logit_gradients_without_bias(weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return every dL/dlogits (1, K) that explains the gradient of a classifier without bias under cross entropy.

    Args:
        weight: (K, d), float64.
        gradient: dL/dweight (K, d), in its own unit.
    """
    left, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
    found: list[tuple[float, Tensor]] = []
    for sign in (1.0, -1.0):
        delta, direction = left[:, 0] * sign, right[0] * sign
        if int((delta < 0).sum()) != 1:
            continue
        logits, label = weight @ direction, int(delta.argmin())
        for t in _roots(partial(_length_excess, logits, label, sizes[0]), float(sizes[0])):
            solution = _logit_gradient(logits, label, t)
            found.append((float(functional.cosine_similarity(solution[0], delta, dim=0)), solution))
    best = max((cosine for cosine, _ in found), default=0.0)
    return [solution for cosine, solution in found if cosine >= best - 1e-6]


def _logit_gradient(logits: Tensor, label: int, t: Tensor) -> Tensor:
    """Return softmax(t logits) - e_label, row by row of t (N,)."""
    delta = (logits * t[:, None]).softmax(-1)
    delta[:, label] = -(delta.sum(-1) - delta[:, label])  # exact where the softmax is near 1
    return delta


def _length_excess(logits: Tensor, label: int, size: Tensor, t: Tensor) -> Tensor:
    """Return by how much |delta(t)| t is larger than sigma, `size`: 0 where (1) holds."""
    return _logit_gradient(logits, label, t).norm(dim=-1) * t - size


def _roots(function: Callable[[Tensor], Tensor], unit: float) -> list[Tensor]:
    """Return where `function` changes sign between unit / 2 and unit * 1e6, by bisection.

    The length of delta is at most sqrt 2.
    """
    grid = unit / 2 * torch.logspace(0, 6.4, GRID_POINTS, dtype=torch.float64)
    signs = function(grid) > 0
    roots = []
    for i in (signs[1:] != signs[:-1]).nonzero().flatten().tolist():
        low, high = grid[i : i + 1], grid[i + 1 : i + 2]
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if bool((function(middle) > 0) == signs[i + 1]) else (middle, high)
        roots.append((low + high) / 2)
    return roots
