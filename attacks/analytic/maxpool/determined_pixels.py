"""Which pixels of a solution are fixed: by equations, or by the outputs that pooling did not pass on."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attacks.analytic.maxpool.confirmed_pixels import confirmed
from attacks.analytic.maxpool.integer_decoding import LOOSE
from attacks.analytic.maxpool.pixel_bounds import spans
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.solution import Solved

SURE = 0.5 / 255
"""How far a pixel may move and still counts as known."""
NEAR = 0.05
"""Median distance to the nearest level, in steps, below which pixels are on levels: of any others it is a quarter."""


def fixed_pixels(solved: Solved, mean: Tensor, std: Tensor) -> Tensor:
    """Which pixels are fixed (I, H, W), with the mean and standard deviation (I,) of an image's normalisation."""
    levels, found = Levels.of(mean, std), solved.found
    mean, std = mean[:, None, None], std[:, None, None]
    if solved.fixed is None:
        off, near = solved.deviations(), _on_levels(solved, levels)
        if near is not None:
            off = off.maximum(near.deviations())
            found = replace(found, gradient=near.found.gradient, forward=near.found.forward)
        fixed = off * std < LOOSE / 255
    else:
        fixed = solved.fixed.clone()
    free = ~fixed
    if bool(free.any()):
        reach = spans(solved.known, found, free, -mean / std, (1 - mean) / std) * std.expand_as(fixed)[free]
        fixed[free] = reach < SURE
    if solved.disputed is not None:
        # inequalities hold of the positions found, and rule out nothing that passes on others
        fixed &= ~solved.disputed
    if levels.hold(found.x) and not solved.known.layer.average and not bool(fixed.all()):
        # what is open may also move the positions by which others are fixed
        fixed &= confirmed(solved.known, found.x, levels.step)
    return fixed


def _on_levels(solved: Solved, levels: Levels) -> Solved | None:
    """The nearest levels, where the picture is taken to be on them although the solution isn't; else None.

    Real numbers follow whatever equations are off by, and leave less of it. Where most of them are next to levels
    nevertheless, the picture is on these, and what is left there says how far off the equations are. Black and white
    are levels of any picture, and so say nothing.
    """
    x, number = solved.found.x, levels.number(solved.found.x)
    inside = (number > 0) & (number < levels.count - 1)
    if levels.hold(x) or not bool(inside.any()):
        return None
    nearest = levels.values(number)
    far = ((x - nearest) / levels.step).abs()[inside].median()
    return solved.at(nearest) if bool(far < NEAR) else None
