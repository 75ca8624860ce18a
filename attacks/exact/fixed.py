"""Which pixels of a solution are fixed: by equations, or by the outputs that pooling did not pass on."""

from __future__ import annotations

from torch import Tensor

from attacks.exact.bounds import spans
from attacks.exact.confirmed import confirmed
from attacks.exact.decode import LOOSE
from attacks.exact.levels import Levels
from attacks.exact.solved import Solved

SURE = 0.5 / 255
"""How far a pixel may move and still counts as known."""


def fixed_pixels(solved: Solved, mean: Tensor, std: Tensor) -> Tensor:
    """Which pixels are fixed (I, H, W), with the mean and standard deviation (I,) of an image's normalisation."""
    levels, x = Levels.of(mean, std), solved.found.x
    mean, std = mean[:, None, None], std[:, None, None]
    fixed = solved.deviations() * std < LOOSE / 255 if solved.fixed is None else solved.fixed.clone()
    free = ~fixed
    if bool(free.any()):
        off = spans(solved.known, solved.found, free, -mean / std, (1 - mean) / std) * std.expand_as(fixed)[free]
        fixed[free] = off < SURE
    if solved.disputed is not None:
        # inequalities hold of the positions found, and rule out nothing that passes on others
        fixed &= ~solved.disputed
    if levels.hold(x) and not solved.known.layer.average and not bool(fixed.all()):
        # what is open may also move the positions by which others are fixed
        fixed &= confirmed(solved.known, x, levels.step)
    return fixed
