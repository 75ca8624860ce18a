"""Flat regions of an image: a pixel that the equations hardly tell is most likely what its neighbors are."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attacks.analytic.maxpool.integer_decoding import MAX_ERROR_RATIO, mark_determined
from attacks.analytic.maxpool.lattice import RULED_OUT_DEVIATIONS
from attacks.analytic.maxpool.likelihood import misfit, typical_deviation
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.solution import Ambiguity, LayerSolution

MIN_STD = 0.02
"""Standard deviation, in steps between two levels, from which a pixel is tried: with less, equations alone tell it."""
INFORMATIVE_STD = 1 / 6
"""Standard deviation up to which a pixel says of others what region they are in."""
CONFIDENT_DEVIATIONS = 3.0
"""Standard deviations by which a flat region may explain less than what explained most."""
ON_LEVELS_ERROR = 10.0
"""How much more the levels nearest to the input may leave than they may in the end: with more, it is on no levels."""
MAX_MOVES = 400
"""Pixels tried, the loosest first, and moves after which no further pass begins."""


def snap_flat_regions(now: LayerSolution, levels: PixelLevels) -> LayerSolution:
    """Move loose pixels to the level of the region around them where the equations allow it; return the solution.

    At the rim of an image few outputs see a pixel, and along its edges many real pictures are exactly flat. Each move
    is tried on the equations themselves, positions included: these may follow wrong pixels, which then look certain.

    Args:
        now: a solution whose equations are explained but for a few pixels.
        levels: of its pixels.

    Returns:
        `now` itself where nothing moves, or the input is on no levels. A pixel whose two levels explain about as
        much is not determined.
    """
    indices, std = levels.indices(now.fit.x), now.deviations() / levels.step
    height, top = now.equations.layer.image_shape[1], levels.count - 1
    region = partial(_region_level, informative=std < INFORMATIVE_STD, height=height, top=top)
    order = std.masked_fill(std <= MIN_STD, 0).flatten().argsort(descending=True).tolist()
    entries = [entry for entry in order[: int((std > MIN_STD).sum())] if region(indices, entry) is not None][:MAX_MOVES]
    if not entries:
        return now
    best, moved = now.with_input(levels.values(indices)), False
    allowed = MAX_ERROR_RATIO * max(now.fit.error, now.equations.gradient_noise)
    if not best.fit.error < ON_LEVELS_ERROR * allowed:  # on no levels: a few moves would not change that
        return now
    ambiguity = Ambiguity.none(best.fit.x)
    scale = typical_deviation(best.equations, best.fit)
    moves_left, least = MAX_MOVES, misfit(best.equations, best.fit, scale)
    while moves_left > 0:
        before = indices.clone()
        for entry in entries:
            level = region(indices, entry)
            if level is None:
                continue
            other = indices.clone()
            other.view(-1)[entry] = level
            found = now.with_input(levels.values(other))
            moves_left -= 1
            more = misfit(found.equations, found.fit, scale) - least
            if abs(more) < RULED_OUT_DEVIATIONS**2:
                ambiguity |= Ambiguity.between(best, found)
            if more < CONFIDENT_DEVIATIONS**2:
                indices, best, least, moved = other, found, least + min(more, 0.0), True
        if torch.equal(indices, before):
            break
    if not best.fit.error < allowed:
        return now
    if not moved:
        return now.with_ambiguity(ambiguity)
    return mark_determined(best, levels).with_ambiguity(ambiguity, now)  # what was open stays so


def _region_level(indices: Tensor, entry: int, informative: Tensor, height: int, top: int) -> float | None:
    """Return the level of the region around a pixel in its image, if there is one and the pixel is not on that itself.

    Half of its neighbors are on it, and none that is `informative` is on another, but where it is the lowest or the
    `top`: of the corners of CIFAR-10 four in five are on such a level, one in ten on one that only two of three have.

    Args:
        indices: of all pixels' levels (I, H, W).
        entry: which pixel, counted along the input.
        informative: which pixels say what region others are in (I, H, W).
        height: of an image.
        top: index of the highest level.
    """
    channel, row, column = (int(i) for i in torch.unravel_index(torch.tensor(entry), indices.shape))
    first = row // height * height
    around = (channel, slice(max(row - 1, first), min(row + 2, first + height)), slice(max(column - 1, 0), column + 2))
    own = float(indices[channel, row, column])
    levels = indices[around].flatten().tolist()
    sure = [level for level, known in zip(levels, informative[around].flatten().tolist(), strict=True) if known]
    if informative[channel, row, column]:
        sure.remove(own)
    levels.remove(own)
    level = max(levels, key=levels.count)
    flat = 2 * levels.count(level) >= len(levels) and (level in (0, top) or set(sure) <= {level})
    return level if flat and level != own else None
