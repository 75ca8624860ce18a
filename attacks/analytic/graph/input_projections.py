r"""What gradients determine of a layer's input, where they leave part of it open.

Layers that share an input x (n, K, H, W) have equations A x_k = G_k for every input channel k (`layer_equations`), with
A made of what flows back into them. If a layer's output goes through an average pooling alone, what flows back is the
same all over each window. Then A has fewer independent columns than x_k has numbers: of a 1x1 convolution it sums each
window, so the gradient tells the means over windows and nothing else. So does any linear map with fewer numbers behind
it than in front.

What is determined is the projection of x_k on the rows of A. Let V_b have an orthonormal basis of the rows of A_b,
the columns of A that belong to image b. Then with A V = U S W^T

    z_k = W S^-1 U^T G_k,    P_b x_bk = V_b z_bk,    P_b = V_b V_b^T,

as far as A V has full rank: images are told apart then. With equal windows P_b puts the mean of its window in place
of every number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.layer_solves import MIN_RATIO, MISFIT_FACTOR, SILENT_CHANNEL, KnownSignal, channel_sizes
from attacks.search_control import check_time_limit

MAX_POSITIONS, MAX_WEIGHTED_POSITIONS = 2048, 4096
"""Numbers of one input channel of one image, at most, for a basis to be found and a matrix between them to be made."""
NO_DIRECTION = 1e-7
"""Share of the largest singular value up to which a direction is in the null space but for rounding."""
CONSISTENT = 1e-5
"""Share of itself by which what is determined may be off where all equations agree."""
ROUNDS, MIN_GOOD_SHARE = 8, 0.75
"""Solutions with other weights of the channels, and the share of channels with a signal that must agree."""
MAX_CONDITION = 1e4
"""Largest condition of the equations for what they determine."""


@dataclass(frozen=True)
class SolvedProjection:
    """What layers' gradients determine of their input.

    Attributes:
        values: (n, K, H, W), P x: the input least in norm that meets the equations.
        projection: (n, H W, H W), P of each image.
        rank: numbers of one input channel of all images that are determined.
        misfit: by which share of itself what is determined may be off.
    """

    values: Tensor
    projection: Tensor
    rank: int
    misfit: float


def solve_projection(signals: Sequence[KnownSignal]) -> SolvedProjection | None:
    """Return what is determined of an input, or None where that is all of it, nothing, or too little to be checked.

    Args:
        signals: of the layers that take the input; of one group of channels.
    """
    layer = signals[0].layer
    n, _, height, width = layer.input_shape
    if height * width > MAX_POSITIONS or _have_gaps(signals):
        return None
    a, g, channel = _weighed_equations(signals)
    norms = a.norm(dim=1)
    if not bool(norms.any()):
        return None
    active = norms > SILENT_CHANNEL * norms[norms > 0].median()  # others tell nothing and would count as equations
    a, g, channel = a[active], g[active], channel[active].unique(return_inverse=True)[1]
    of_images = a.split(height * width, dim=1)
    ranks = list(map(_rank, of_images))
    if not min(ranks) > 0 or sum(ranks) == n * height * width or MIN_RATIO * sum(ranks) > len(a):
        return None
    bases = [_row_basis(part, rank) for part, rank in zip(of_images, ranks, strict=True)]
    reduced = torch.cat([part @ v for part, v in zip(of_images, bases, strict=True)], 1)
    solved = _solve_without_outliers(reduced, g, channel)
    if solved is None:
        return None
    z, off = solved
    parts = [v @ part for v, part in zip(bases, z.split(ranks), strict=True)]  # (H W, K) of each image
    values = torch.stack(parts).mT.reshape(layer.input_shape)
    return SolvedProjection(values, torch.stack([v @ v.mT for v in bases]), sum(ranks), off)


@dataclass(frozen=True)
class WeightedProjection:
    """What layers' gradients say of the input of one image, each direction weighted by its singular value.

    Attributes:
        values: (1, K, H, W), M x.
        matrix: (1, H W, H W), M = V S V^T / max S with A = U S V^T: symmetric, of norm one.
    """

    values: Tensor
    matrix: Tensor


def weighted_projection(signals: Sequence[KnownSignal]) -> WeightedProjection | None:
    """Return the part of one image's input that few gradients determine; None for several images, or a vector.

    Args:
        signals: of the layers that take the input; of one group of channels.
    """
    n, _, height, width = signals[0].layer.input_shape
    if n != 1 or not 1 < height * width <= MAX_WEIGHTED_POSITIONS or _have_gaps(signals):
        return None
    check_time_limit()
    a, g, _ = _weighed_equations(signals)
    if not bool(a.any()):
        return None
    u, s, v = torch.linalg.svd(a, full_matrices=False)
    share = s / s[0]
    values = v.mT @ (u.mT @ g / s[0])
    return WeightedProjection(values.mT.reshape(signals[0].layer.input_shape), ((v.mT * share) @ v)[None])


def _have_gaps(signals: Sequence[KnownSignal]) -> bool:
    """Return whether entries of a gradient were not sent: then channels have no equations in common."""
    return any(known.layer.sent is not None for known in signals)


def _weighed_equations(signals: Sequence[KnownSignal]) -> tuple[Tensor, Tensor, Tensor]:
    """Return A (equations, n H W) and G (equations, K), weighed so that errors are alike, and each one's channel."""
    weights = [1 / channel_sizes(known, known.layer.right_side()) for known in signals]
    a, g = (
        torch.cat([(side * w[:, None, None]).flatten(0, 1) for side, w in zip(sides, weights, strict=True)])
        for sides in (
            [known.layer.signal_matrix(known.masked()) for known in signals],
            [known.layer.right_side() for known in signals],
        )
    )
    taps = torch.cat(
        [torch.full((len(w),), known.layer.weight[0, 0].numel()) for known, w in zip(signals, weights, strict=True)]
    )
    return a, g, torch.arange(len(taps)).repeat_interleave(taps).to(a.device)


def _solve_without_outliers(a: Tensor, g: Tensor, channel: Tensor) -> tuple[Tensor, float] | None:
    """Return z (rank, K) and by which share of itself it may be off; None where equations leave it open.

    One wrong bit of an activation puts its output channel off, and by it all of z. So where equations contradict each
    other, channels that miss more than others are given less and less weight, and none in the end. If too few agree,
    all of them are used.

    Args:
        a: A V (equations, rank).
        g: G (equations, K).
        channel: number of the output channel that each equation is of.
    """
    channels = int(channel.max()) + 1

    def by_channel(squares: Tensor) -> Tensor:
        return squares.new_zeros(channels).index_add_(0, channel, squares).sqrt()

    plain = _weighted_least_squares(a, g, a.new_ones(len(a)))
    if plain is None or plain[1] <= CONSISTENT:
        return plain
    z = plain[0]
    for _ in range(ROUNDS):
        check_time_limit()
        missed = by_channel((g - a @ z).square().sum(1))
        usual = missed.median().clamp_min(1e-300)
        solved = _weighted_least_squares(a, g, (usual / missed.clamp_min(0.3 * usual))[channel])
        if solved is None:
            return plain
        z = solved[0]
    missed = by_channel((g - a @ z).square().sum(1))
    good = missed <= MISFIT_FACTOR * missed.median()
    if int(good.sum()) < MIN_GOOD_SHARE * channels or int(good[channel].sum()) < MIN_RATIO * a.shape[1]:
        return plain
    solved = _weighted_least_squares(a, g, good[channel].to(a))
    return plain if solved is None else solved


def _weighted_least_squares(a: Tensor, g: Tensor, weights: Tensor) -> tuple[Tensor, float] | None:
    """Return z with a z = g (weights for each equation), and by which share of itself it may be off."""
    used = weights > 0
    a, g = (weights[used, None] * side[used] for side in (a, g))
    u, s, w = torch.linalg.svd(a, full_matrices=False)
    if len(a) < a.shape[1] or not bool(s[-1] * MAX_CONDITION > s[0]):
        return None
    z = w.mT @ ((u.mT @ g) / s[:, None])
    left = (g - a @ z).square().sum() / max(1, len(a) - a.shape[1])  # of all input channels, for each equation
    return z, float((left * (1 / s.square()).sum()).sqrt() / z.norm().clamp_min(1e-300))


def _rank(matrix: Tensor) -> int:
    """Return how many directions a matrix's rows have."""
    shorter = matrix if len(matrix) < matrix.shape[1] else matrix.mT
    values = torch.linalg.eigvalsh(shorter @ shorter.mT)
    return int((values > NO_DIRECTION**2 * values[-1]).sum())


def _row_basis(matrix: Tensor, rank: int) -> Tensor:
    """Return an orthonormal basis (columns, rank) of a matrix's rows."""
    return torch.linalg.eigh(matrix.mT @ matrix)[1][:, -rank:]
