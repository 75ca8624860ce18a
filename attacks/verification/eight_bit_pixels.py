"""Says whether pixels lie where those of pictures of 8 bits do, or where those of means of some do."""

from __future__ import annotations

import functools
import math

from torch import Tensor

MOST_AVERAGED = 4
"""Pictures at levels of 8 bits whose mean is recognized by where its pixels lie."""
MIN_BETWEEN, LEAST_SHARE_BETWEEN = 12, 0.25
"""Pixels between levels of what counts as a mean of pictures, or their share of a small one, at least: a few lie at
parts of levels by chance, as dark ones that an update hardly tells. A mean with no more, of pictures a level apart, is
off by no more than a quarter of a level (root mean square)."""
MIN_SHADES = 24
"""Levels between black and white of a picture that is no mixture, at least: of 4,000 mixtures of two pictures of up to
eight shades with so many levels, two in a thousand lie at whole ones."""
LEVEL_TOLERANCE = 0.2
"""How near to whole numbers all pixels lie that are at levels of 8 bits, or, of a mean of so many, at parts of them."""


def at_levels(images: Tensor) -> Tensor | None:
    """Return images at whole levels of 8 bits, where all pixels are next to one.

    Those of a mean of two are so only where these differ by even numbers of levels everywhere.
    """
    levels = 255 * images.double()
    return levels.round() / 255 if _is_near_grid(levels) else None


def are_levels_of_no_mixture(images: Tensor) -> bool:
    """Return whether pictures at levels of 8 bits are no mixtures of others, which lie there by chance alone.

    Each has to have many levels, or black and white alone: a mixture of pictures of few shades has few levels, each of
    which may be a whole number, and two black and white ones mixed have one or two.

    Args:
        images: (N, C, H, W) at levels.
    """
    levels = (255 * images.double()).round().long().clamp(0, 255)
    return not any(_may_be_by_chance(own.unique().tolist()) for own in levels)


def _may_be_by_chance(levels: list[int]) -> bool:
    """Return whether a mixture may have these levels: few, or multiples of one that divides the largest.

    The mean of so many black and white pictures has the latter, and that of pictures of few shades.
    """
    step = functools.reduce(math.gcd, levels, 255)
    return 0 < sum(0 < level < 255 for level in levels) < MIN_SHADES or 1 < step < 255


def are_between_levels(images: Tensor) -> bool:
    """Return whether all pixels lie where those of a mean of some pictures at levels of 8 bits do, and many between."""
    levels = 255 * images.double()
    between = ((levels - levels.round()).abs() >= LEVEL_TOLERANCE).sum()
    if int(between) < min(MIN_BETWEEN, LEAST_SHARE_BETWEEN * levels.numel()):
        return False
    return any(_is_near_grid(count * levels) for count in range(2, MOST_AVERAGED + 1))


def _is_near_grid(values: Tensor) -> bool:
    """Return whether all values are next to whole numbers."""
    return bool(((values - values.round()).abs() < LEVEL_TOLERANCE).all())
