"""Jointly Gaussian outputs whose largest value is known: which one has it, and the moments of all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations


def condition_on_maximum(
    equations: Equations, mean: Tensor, covariance: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is known of a cell's outputs once their largest is its target.

    A mixture over the position p that is the largest: y_p is the target, and the others, given that, are below it.
    The others are truncated one by one, as if they were independent. Where a target is no more than a bound, all are.

    Args:
        equations: of the layer, with the targets.
        mean: of the outputs without the bias (O, K, P).
        covariance: of them (O, K, P, P).
        noise: variance of the targets, one that broadcasts to (O, K, 1).

    Returns:
        Probabilities of the positions (O, K, P), mean (O, K, P) and covariance (O, K, P, P).
    """
    target = equations.target_minus_bias[..., None]
    parts = [_condition_on_position(p, target, mean, covariance, noise) for p in range(mean.shape[-1])]
    log_weights, means, covariances = zip(*parts, strict=True)
    selection = torch.softmax(torch.stack(log_weights, -1), -1)
    mixed_mean, mixed_covariance = _mixture_moments(selection, torch.stack(means, -2), torch.stack(covariances, -3))
    if bool(equations.target_known.all()):
        return selection, mixed_mean, mixed_covariance
    below, shrunk, _ = _truncate_above(mean, covariance, target, noise)
    truncated = shrunk[..., :, None] * covariance * shrunk[..., None, :]
    known = equations.target_known[..., None]
    selection = torch.where(known, selection, equations.uniform_selection)
    return selection, torch.where(known, mixed_mean, below), torch.where(known[..., None], mixed_covariance, truncated)


def _condition_on_position(
    p: int, target: Tensor, mean: Tensor, covariance: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability (O, K), mean (O, K, P) and covariance (O, K, P, P) where position p is the largest."""
    variance = covariance[..., p, p] + noise[..., 0]
    column = covariance[..., p]
    given = mean + column / variance[..., None] * (target - mean[..., p, None])
    rest = covariance - column[..., :, None] * column[..., None, :] / variance[..., None, None]
    below, shrunk, log_mass = _truncate_above(given, rest, target, noise)
    log_mass[..., p] = 0.0
    below[..., p] = given[..., p]
    shrunk[..., p] = 1.0
    log_density = -0.5 * (target[..., 0] - mean[..., p]) ** 2 / variance - 0.5 * variance.log()
    return log_density + log_mass.sum(-1), below, shrunk[..., :, None] * rest * shrunk[..., None, :]


def _mixture_moments(weights: Tensor, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of a mixture.

    Its weights are (..., C), its means (..., C, P), its covariances (..., C, P, P).
    """
    mean = (weights[..., None] * means).sum(-2)
    apart = means - mean[..., None, :]
    covariance = (weights[..., None, None] * (covariances + apart[..., :, None] * apart[..., None, :])).sum(-3)
    return mean, covariance


def _truncate_above(mean: Tensor, covariance: Tensor, bound: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each output truncated above `bound` by itself: new mean, factor on the deviation, log-probability."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12 * noise)
    deviation = (variance + noise).sqrt()
    at = ((bound - mean) / deviation).clamp(-30, 30)
    log_mass = torch.special.log_ndtr(at)
    ratio = torch.exp(-0.5 * at**2 - 0.5 * math.log(2 * math.pi) - log_mass)
    share = variance / (variance + noise)
    return mean - deviation * ratio * share, (1 - at * ratio - ratio**2).clamp(1e-6, 1).sqrt(), log_mass
