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
LEVEL_TOLERANCE = 0.2
"""How near to whole numbers all pixels lie that are at levels of 8 bits, or, of a mean of so many, at parts of them."""


def at_levels(images: Tensor) -> Tensor | None:
    """Return images at whole levels of 8 bits, where all pixels are next to one.

    Those of a mean of two are so only where these differ by even numbers of levels everywhere.
    """
    levels = 255 * images.double()
    return levels.round() / 255 if _is_near_grid(levels) else None


def is_on_coarse_grid(images: Tensor) -> bool:
    """Return whether all levels are multiples of one that divides the largest, which they are not just zero and that.

    The mean of so many black and white pictures lies there, and that of pictures of few shades.
    """
    levels = (255 * images.double()).round().long().clamp(0, 255)
    step = functools.reduce(math.gcd, levels.unique().tolist(), 255)
    return 1 < step < 255


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
