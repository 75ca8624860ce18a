"""How well an input explains the equations, measured by how well these are known."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import MIN_RELATIVE_NOISE, Equations
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.lattice import RULED_OUT_DEVIATIONS
from attacks.analytic.maxpool.refinement import Fit
from attacks.analytic.maxpool.solution import Ambiguity, LayerSolution

MIN_VARIANCE_RATIO = 1e-6
"""Smallest variance, relative to rounding: a smaller one is no better."""
OUTLIER_DEVIATIONS = 12.0
"""Times the typical by which no output misses its target unless something is wrong; seven were seen."""
NORMAL_MEDIAN = 0.6745
"""Median of what is normally distributed, without its sign, in standard deviations."""


def target_deviation(equations: Equations) -> Tensor:
    """Return the standard deviation of the targets by rounding (O, K)."""
    return (equations.target_std.square() + (MIN_RELATIVE_NOISE * equations.output_scale) ** 2).sqrt()


def output_deviations(equations: Equations, fit: Fit) -> Tensor:
    """Return how far the pooled outputs of `fit` are from their targets (O, K), in standard deviations by rounding."""
    off = equations.layer.pooled_outputs(fit.x) - equations.target
    return torch.where(equations.target_known, off, off.clamp_min(0)) / target_deviation(equations)


def typical_deviation(equations: Equations, fit: Fit) -> float:
    """Return how far outputs are from their targets as a rule, in standard deviations by rounding, which bounds it."""
    median = float(output_deviations(equations, fit).abs()[equations.target_known].median())
    return max(median / NORMAL_MEDIAN, MIN_VARIANCE_RATIO**0.5)


def has_outlier(equations: Equations, fit: Fit) -> bool:
    """Return whether an output is too far from its target: of a corner few equations tell, so all others may hold."""
    largest = output_deviations(equations, fit).abs()[equations.target_known].max()
    return bool(largest > OUTLIER_DEVIATIONS * typical_deviation(equations, fit))


def misfit(equations: Equations, fit: Fit, scale: float) -> float:
    """Return minus twice the logarithm of the likelihood of `fit`, up to a constant.

    With r_o what is left of filter o's gradient in units of rounding, and d_ok what an output is off by,

        M sum_o log(mean r_o^2) + 2 sum_ok log(1 + (d_ok / scale)^2).

    A wrong position spoils the gradient of its filter and one output. So the former is taken for known up to a factor
    of its own for each filter, estimated from what is left, and outputs for scattered as Cauchy's distribution has it:
    what is wrong already hides nothing else.

    Args:
        equations: of the layer.
        fit: an input.
        scale: of the outputs' scatter, in standard deviations by rounding (`typical_deviation`).
    """
    left = (equations.residual(fit.x, fit.selection).square() / equations.rounding_variance).mean(1)
    gradient = equations.gradient.shape[1] * torch.log(left + MIN_VARIANCE_RATIO).sum()
    outputs = 2 * torch.log1p((output_deviations(equations, fit) / scale).square()).sum()
    total = float(gradient + outputs)
    return total if math.isfinite(total) else math.inf


def select_likeliest(
    now: LayerSolution, others: Iterable[LayerSolution], prior: GaussianPrior, allowed: float
) -> tuple[LayerSolution, Ambiguity]:
    """Return the likeliest of `now` and `others`, and the numbers of `now` that equally good others contradict.

    Args:
        now: what is compared with.
        others: other inputs.
        prior: what is expected of the input.
        allowed: error up to which another one is believed.
    """
    scale = typical_deviation(now.equations, now.fit)
    own = misfit(now.equations, now.fit, scale)
    best, least = now, own + prior.penalty(now.fit.x)
    ambiguity = Ambiguity.none(now.fit.x)
    for other in others:
        explained = misfit(other.equations, other.fit, scale)
        if not explained < own + RULED_OUT_DEVIATIONS**2:
            continue
        ambiguity |= Ambiguity.between(now, other)
        total = explained + prior.penalty(other.fit.x)
        if total < least and other.fit.error < allowed:
            least, best = total, other
    return best, ambiguity
