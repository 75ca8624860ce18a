"""Flat areas: a pixel that the equations hardly tell is most likely what its neighbours are."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attacks.analytic.maxpool.integer_decoding import WORSE, judged
from attacks.analytic.maxpool.likelihood import APART, misfit, usual
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.solution import Doubt, Solved

LOOSE = 0.02
"""Standard deviation, in steps between two levels, from which a pixel is tried: with less, equations alone tell it."""
TOLD = 1 / 6
"""Standard deviation up to which a pixel says of others what area they are in."""
SURE = 3.0
"""Standard deviations by which a flat area may explain less than what explained most."""
FAR = 10.0
"""How much more the levels nearest to the input may leave than they may in the end: with more, it is on no levels."""
MANY = 400
"""Pixels tried, the loosest first, and moves after which no further pass begins."""


def flatten(now: Solved, levels: Levels) -> Solved:
    """The same with loose pixels on the level of the area around them, where the equations bear it.

    At the rim of an image few outputs see a pixel, and along its edges many real pictures are exactly flat. Each move
    is tried on the equations themselves, positions included: these may follow wrong pixels, which then look certain.

    Args:
        now: a solution whose equations are explained but for a few pixels.
        levels: of its pixels.

    Returns:
        `now` itself where nothing moves, or the input is on no levels. A pixel of which two levels explain about as
        much is not fixed.
    """
    number, loose = levels.number(now.found.x), now.deviations() / levels.step
    area = partial(_area, told=loose < TOLD, height=now.known.layer.alone[1], top=levels.count - 1)
    order = loose.masked_fill(loose <= LOOSE, 0).flatten().argsort(descending=True).tolist()
    tried = [index for index in order[: int((loose > LOOSE).sum())] if area(number, index) is not None][:MANY]
    if not tried:
        return now
    best, moved = now.at(levels.values(number)), False
    bound = WORSE * max(now.found.error, now.known.noise)
    if not best.found.error < FAR * bound:  # on no levels: a few moves would not change that
        return now
    doubt = Doubt.none(best.found.x)
    scale = usual(best.known, best.found)
    left, least = MANY, misfit(best.known, best.found, scale)
    while left > 0:
        before = number.clone()
        for index in tried:
            level = area(number, index)
            if level is None:
                continue
            other = number.clone()
            other.view(-1)[index] = level
            found = now.at(levels.values(other))
            left -= 1
            more = misfit(found.known, found.found, scale) - least
            if abs(more) < APART**2:
                doubt |= Doubt.between(best, found)
            if more < SURE**2:
                number, best, least, moved = other, found, least + min(more, 0.0), True
        if torch.equal(number, before):
            break
    if not best.found.error < bound:
        return now
    if not moved:
        return now.doubted(doubt)
    return judged(best, levels).doubted(doubt, now)  # what was open stays so


def _area(number: Tensor, index: int, told: Tensor, height: int, top: int) -> float | None:
    """The level of the area around a pixel in its image of `height` rows, if there is one and it is not on that itself.

    Half of its neighbours are on it, and none that is `told` is on another, but where it is the lowest or the `top`:
    of the corners of CIFAR-10 four in five are on such a level, one in ten on one that only two of three have.
    """
    channel, row, column = (int(i) for i in torch.unravel_index(torch.tensor(index), number.shape))
    first = row // height * height
    around = (channel, slice(max(row - 1, first), min(row + 2, first + height)), slice(max(column - 1, 0), column + 2))
    own = float(number[channel, row, column])
    levels = number[around].flatten().tolist()
    sure = [level for level, is_told in zip(levels, told[around].flatten().tolist(), strict=True) if is_told]
    if told[channel, row, column]:
        sure.remove(own)
    levels.remove(own)
    level = max(levels, key=levels.count)
    flat = 2 * levels.count(level) >= len(levels) and (level in (0, top) or set(sure) <= {level})
    return level if flat and level != own else None
