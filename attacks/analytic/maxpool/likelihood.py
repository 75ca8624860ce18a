"""How well an input explains what is known of a layer, measured by how well that is known."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import SMALLEST, Equations, Prior
from attacks.analytic.maxpool.refinement import Fit
from attacks.analytic.maxpool.solution import Doubt, Solved

APART = 6.0
"""Standard deviations beyond which another level is out of the question."""
LEAST = 1e-6
"""Of variances: below that share of rounding less is no better."""
ASTRAY = 12.0
"""Times the usual by which no output misses its target unless something is wrong; seven were seen."""
MEDIAN = 0.6745
"""Of what is normally distributed, without its sign, in standard deviations."""


def missed(known: Equations, found: Fit) -> Tensor:
    """How far the pooled outputs of `found` are from their targets (O, K), in standard deviations by rounding."""
    off = known.layer.pooled_outputs(found.x) - known.target
    return torch.where(known.seen, off, off.clamp_min(0)) / deviation(known)


def deviation(known: Equations) -> Tensor:
    """Standard deviation of the targets by rounding (O, K)."""
    return (known.loose.square() + (SMALLEST * known.forward_scale) ** 2).sqrt()


def usual(known: Equations, found: Fit) -> float:
    """How far outputs are from their targets as a rule, in standard deviations by rounding, which bounds it."""
    return max(float(missed(known, found).abs()[known.seen].median()) / MEDIAN, LEAST**0.5)


def astray(known: Equations, found: Fit) -> bool:
    """Whether an output is too far from its target: of a corner few equations tell, so that all others may hold."""
    return bool(missed(known, found).abs()[known.seen].max() > ASTRAY * usual(known, found))


def misfit(known: Equations, found: Fit, usual: float) -> float:
    """Minus twice the logarithm of the likelihood of `found`, but for a constant.

    A wrong position spoils the gradient of its filter and one output. So the former is taken for known up to a factor
    of its own for each filter, estimated from what is left, and outputs for scattered as Cauchy's distribution has it,
    of which `usual` is the scale: what is wrong already hides nothing else.
    """
    left = (known.residual(found.x, found.shares).square() / known.rounded).mean(1)
    gradient = known.gradient.shape[1] * torch.log(left + LEAST).sum()
    total = float(gradient + 2 * torch.log1p((missed(known, found) / usual).square()).sum())
    return total if math.isfinite(total) else math.inf


def likeliest(now: Solved, others: Iterable[Solved], prior: Prior, allowed: float) -> tuple[Solved, Doubt]:
    """The likeliest of `now` and what explains about as much or more, and the doubt that this leaves of `now`.

    Only what leaves less than `allowed` unexplained is believed.
    """
    scale = usual(now.known, now.found)
    told = misfit(now.known, now.found, scale)
    best, least = now, told + prior.against(now.found.x)
    doubt = Doubt.none(now.found.x)
    for other in others:
        explained = misfit(other.known, other.found, scale)
        if not explained < told + APART**2:
            continue
        doubt |= Doubt.between(now, other)
        total = explained + prior.against(other.found.x)
        if total < least and other.found.error < allowed:
            least, best = total, other
    return best, doubt
