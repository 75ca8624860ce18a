"""Flat areas: a pixel that the equations hardly tell is most likely what its neighbours are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.exact.decode import WORSE
from attacks.exact.levels import Levels
from attacks.exact.polish import decided, fit
from attacks.exact.solved import Solved

LOOSE = 0.02
"""Standard deviation, in steps between two levels, from which a pixel is tried: with less, equations alone tell it."""
ALIKE = 1.02
"""How much more a flat area may leave unexplained. On Fashion-MNIST every move within it was right (37 of 37 in 15
pictures), and the best of 274 wrong ones left 1.06 times as much."""
SURE = 10.0
"""Standard deviations beyond which a pixel moves only if that explains more: of many equations 1.02 may hide one that
contradicts. Of the right moves that explained less the furthest was 3.4."""
APART = 1.5
"""How much more another level has to leave unexplained to be out of the question."""
FAR = 10.0
"""How much more the levels nearest to the input may leave than they may in the end: with more, it is on no levels."""
MANY = 400
"""Pixels tried, the loosest first, and moves after which no further pass begins."""


def flatten(now: Solved, levels: Levels) -> Solved:
    """The same with loose pixels on the level of at least half of their neighbours, where the equations bear it.

    At the rim of an image few outputs see a pixel, and along its edges many real pictures are exactly flat. Each move
    is tried on the equations themselves, positions included: these may follow wrong pixels, which then look certain.

    Args:
        now: a solution whose equations are explained but for a few pixels.
        levels: of its pixels.

    Returns:
        `now` itself where nothing moves, or the input is on no levels. A pixel of which two levels explain about as
        much is not fixed; nothing is once a pixel has moved.
    """
    number, height = levels.number(now.found.x), now.known.layer.alone[1]
    loose = now.deviations() / levels.step
    order = loose.masked_fill(loose <= LOOSE, 0).flatten().argsort(descending=True).tolist()
    tried = [index for index in order[: int((loose > LOOSE).sum())] if _flat(number, index, height) is not None][:MANY]
    if not tried:
        return now
    best, moved = _at(now, number, levels), False
    bound = WORSE * max(now.found.error, now.known.noise)
    if not best.found.error < FAR * bound:  # on no levels: a few moves would not change that
        return now
    opened = torch.zeros_like(number, dtype=torch.bool)
    left, noise = MANY, now.known.noise
    while left > 0:
        before = number.clone()
        for index in tried:
            level = _flat(number, index, height)
            if level is None:
                continue
            other = number.clone()
            other.view(-1)[index] = level
            found = _at(now, other, levels)
            left -= 1
            ratio = max(found.found.error, noise) / max(best.found.error, noise)
            if 1 / APART < ratio < APART:
                opened.view(-1)[index] = True
            far = abs(level - float(number.view(-1)[index])) / float(loose.view(-1)[index])
            if ratio < 1 or (ratio < ALIKE and far < SURE):
                number, best, moved = other, found, True
        if torch.equal(number, before):
            break
    if not best.found.error < bound:
        return now
    if moved:
        return replace(best, fixed=torch.zeros_like(opened))
    return now if now.fixed is None else replace(now, fixed=now.fixed & ~opened)


def _at(now: Solved, number: Tensor, levels: Levels) -> Solved:
    """The solution with these levels, at the positions that follow."""
    x = levels.first + number * levels.step
    found = fit(now.known, x)
    return replace(now, found=fit(now.known, x, decided(now.known, found)))


def _flat(number: Tensor, index: int, height: int) -> float | None:
    """The level of at least half of a pixel's neighbours in its image of `height` rows, if it is not on that itself."""
    channel, row, column = (int(i) for i in torch.unravel_index(torch.tensor(index), number.shape))
    first = row // height * height
    around = (
        number[channel, max(row - 1, first) : min(row + 2, first + height), max(column - 1, 0) : column + 2]
        .flatten()
        .tolist()
    )
    own = float(number[channel, row, column])
    around.remove(own)
    level = max(around, key=around.count)
    return level if level != own and 2 * around.count(level) >= len(around) else None
