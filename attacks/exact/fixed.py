"""Which pixels of a solution are fixed: by equations, or by the outputs that pooling did not pass on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.exact.bounds import spans
from attacks.exact.confirmed import confirmed
from attacks.exact.decode import LOOSE
from attacks.exact.equations import SMALLEST
from attacks.exact.levels import Levels
from attacks.exact.polish import Fit
from attacks.exact.solved import Solved

SURE = 0.5 / 255
"""How far a pixel may move and still counts as known."""
NEAR = 0.05
"""Median distance to the nearest level, in steps, below which pixels are on levels: anywhere else it is a quarter."""


def fixed_pixels(solved: Solved, mean: Tensor, std: Tensor) -> Tensor:
    """Which pixels are fixed (I, H, W), with the mean and standard deviation (I,) of an image's normalisation."""
    levels, x = Levels.of(mean, std), solved.found.x
    told, doubt = _on_levels(solved, levels)
    mean, std = mean[:, None, None], std[:, None, None]
    fixed = doubt * solved.deviations() * std < LOOSE / 255 if solved.fixed is None else solved.fixed.clone()
    free = ~fixed
    if bool(free.any()):
        off = spans(solved.known, told, free, -mean / std, (1 - mean) / std) * std.expand_as(fixed)[free]
        fixed[free] = off < SURE
    if solved.disputed is not None:
        # inequalities hold of the positions found, and rule out nothing that passes on others
        fixed &= ~solved.disputed
    if levels.hold(x) and not solved.known.layer.average and not bool(fixed.all()):
        # what is open may also move the positions by which others are fixed
        fixed &= confirmed(solved.known, x, levels.step)
    return fixed


def _on_levels(solved: Solved, levels: Levels) -> tuple[Fit, float]:
    """What a solution leaves of equations that can't be trusted further, and the factor by which that is more.

    Real numbers follow whatever equations are off by, and leave less of it. Where almost all of them are on levels
    nevertheless, the picture is, and what is left there says how far off the equations are.
    """
    x, nearest = solved.found.x, levels.nearest(solved.found.x)
    far = float(((x - nearest) / levels.step).abs().median())
    if solved.fixed is not None or torch.equal(x, nearest) or not far < NEAR:
        return solved.found, 1.0
    left = solved.at(nearest).found
    more = max(1.0, left.error / max(solved.found.error, SMALLEST))
    return replace(solved.found, gradient=left.gradient, forward=left.forward), more
