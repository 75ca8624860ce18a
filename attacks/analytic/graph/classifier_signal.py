r"""Finds what flows back into the classifier, where the features above it are known up to a factor for each image.

The classifier takes f_b of image b, and d_b flows back into what it makes of that. Its weight and bias have

    G = sum_b d_b [f_b, 1]^T                                                                    (1)

as their gradient. Tensors below tell f_b up to one number: with one of them a_b times as large, f_b(a_b) follows.
Normalizations by statistics of one image leave such numbers open.

1. Where G has as many independent rows as there are images, each [f_b, 1] is a combination of these. So each a_b is
   looked for by itself, as the one that brings f_b(a_b) nearest to that span.
2. All a_b and d_b together then solve (1), by Gauss-Newton steps, which are as precise as the gradient is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.search_control import check_time_limit

MOST_DECADES, STEPS = 8.0, 64
"""Powers of ten by which a tensor's size may be off to either side, and steps in which that is looked for."""
NARROWINGS, POINTS = 6, 8
"""Times that a step is divided, and into how many."""
GAUSS_NEWTON_STEPS, DIFFERENCE = 8, 1e-6
"""Steps towards (1), and the relative change of a size by which features are derived."""
MIN_DIRECTION = 1e-6
"""Share of the gradient's largest singular value below which a direction is rounding."""
MIN_TOLD = 1e-4
"""Share of its features that a change of an image's size must take away from what all signals explain."""
MAX_MISS = 1e-3
"""Share of the gradient that sizes and signals may leave."""

Features = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ClassifierSignal:
    """What flows back into the classifier, and by what the tensors below must be multiplied.

    Attributes:
        signal: d (B, n).
        sizes: a (B,).
    """

    signal: Tensor
    sizes: Tensor


def find_classifier_signal(gradient: Tensor, features: Features, images: int) -> ClassifierSignal | None:
    """Return the signal and sizes that explain the classifier's gradient, or None where none or any do.

    Features that are proportional to a size, of a classifier without a bias, are explained whatever it is.

    Args:
        gradient: G (n, m), of a weight (n, m - 1) and a bias, or of a weight alone.
        features: returns [f_b(a_b), 1], or without a bias f_b(a_b), (B, m) for sizes a (B,).
        images: B.

    Raises:
        StoppedError: the time limit has passed.
    """
    scales, span = torch.linalg.svd(gradient, full_matrices=False)[1:]
    if len(scales) < images or not bool(scales[images - 1] > MIN_DIRECTION * scales[0]):
        return None
    sizes = _find_sizes(span[:images], features, images)
    for _ in range(GAUSS_NEWTON_STEPS):
        signal = _fit_signal(gradient, features(sizes))
        sizes = _improve_sizes(gradient, features, signal, sizes)
    taken = features(sizes)
    if not bool((_unexplained_slope(features, sizes).norm(dim=1) > MIN_TOLD * taken.norm(dim=1)).all()):
        return None
    signal = _fit_signal(gradient, taken)
    missed = float((gradient - signal.mT @ taken).norm() / gradient.norm())
    return ClassifierSignal(signal, sizes) if missed <= MAX_MISS else None


def _find_sizes(span: Tensor, features: Features, images: int) -> Tensor:
    """Return for each image the size (B,) that brings its features nearest to the span of orthonormal rows (B, m)."""

    def nearest(exponents: Tensor) -> Tensor:
        """Return of exponents (k, B) the best one of each image (B,)."""
        misses = []
        for some in exponents:
            check_time_limit()
            taken = features(10**some)
            misses.append((taken - taken @ span.mT @ span).norm(dim=1) / taken.norm(dim=1))
        return exponents.gather(0, torch.stack(misses).argmin(0)[None])[0]

    steps = torch.arange(-STEPS, STEPS + 1, dtype=span.dtype, device=span.device)
    step = MOST_DECADES / STEPS
    found = nearest((step * steps)[:, None].expand(-1, images))
    for _ in range(NARROWINGS):
        around = torch.arange(-POINTS, POINTS + 1, dtype=span.dtype, device=span.device) / POINTS
        found = nearest(found + step * around[:, None])
        step /= POINTS
    return 10**found


def _fit_signal(gradient: Tensor, taken: Tensor) -> Tensor:
    """Return the signal (B, n) that makes most of a gradient (n, m) of what was taken (B, m)."""
    return torch.linalg.lstsq(taken.mT, gradient.mT).solution


def _improve_sizes(gradient: Tensor, features: Features, signal: Tensor, sizes: Tensor) -> Tensor:
    """Return sizes (B,) that explain the gradient better, given how far the signal follows them; these if none do."""
    left = gradient - signal.mT @ features(sizes)
    moved = signal[:, :, None] * _unexplained_slope(features, sizes)[:, None, :]  # (B, n, m)
    change = torch.linalg.lstsq(moved.flatten(1).mT, left.flatten()[:, None]).solution[:, 0]
    better = sizes * change.clamp(-1, 1).exp()
    after = features(better)
    missed = (gradient - _fit_signal(gradient, after).mT @ after).norm()
    return better if bool(missed < left.norm()) else sizes


def _unexplained_slope(features: Features, sizes: Tensor) -> Tensor:
    """Return the derivative of features (B, m) by the logarithm of their sizes, but for what signals make up for."""
    taken = features(sizes)
    slope = (features(sizes * (1 + DIFFERENCE)) - taken) / DIFFERENCE
    basis = torch.linalg.qr(taken.mT)[0]
    return slope - slope @ basis @ basis.mT
