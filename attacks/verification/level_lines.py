"""Decides pictures of whole levels that features tell but for one direction.

A normalization over an image, as group and layer normalization, takes its contrast off. Then all pictures

    x + s d,  s a number,

have the same features as the picture x, and d is x less what the network takes for gray. If x is of whole levels of 8
bits, few other pictures of the line are, or none: each of its numbers must be at one. Those are looked at one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 255
MAX_OFF_LINE = 0.01
"""Levels by which pictures that meet the features may lie off the line."""
MOVED = 0.5
"""Levels by which the farthest of them must lie away from the picture, for a line to be known."""
AT_LEVEL, ERRORS = 0.05, 3.0
"""Levels by which a number may miss a whole one where a picture of the line counts as one of whole levels, and times
what the direction may be off there."""


def pictures_on_lines(images: Tensor, others: Tensor) -> list[Tensor] | None:
    """Return the other pictures of whole levels on the lines of others through images, one of a batch changed in each.

    None where others do not lie on one line through each image.

    Args:
        images: (B, C, H, W), in [0, 1], near to whole levels.
        others: (n, B, C, H, W), pictures that have the same features.
    """
    levels = (LEVELS * images.double()).round()
    moved = LEVELS * (others.double() - images.double())
    found = []
    for place in range(len(images)):
        on_line = _whole_levels(levels[place].flatten(), moved[:, place].flatten(1))
        if on_line is None:
            return None
        for numbers in on_line:
            changed = levels.clone()
            changed[place] = numbers.reshape(levels[place].shape)
            found.append((changed / LEVELS).to(images))
    return found


def _whole_levels(levels: Tensor, moved: Tensor) -> list[Tensor] | None:
    """Return the other whole levels on the line of steps (n, N) through some (N,); None where these are on no line."""
    farthest = float(moved.abs().max())
    if farthest <= MOVED:
        return []
    direction = torch.linalg.svd(moved, full_matrices=False)[2][0]
    off = float((moved - (moved @ direction)[:, None] * direction).abs().max())
    if off > MAX_OFF_LINE:
        return None
    direction = direction / direction[direction.abs().argmax()]  # a step of one moves some number by one level
    steps = torch.arange(1.0, LEVELS + 1, dtype=levels.dtype, device=levels.device)
    found = []
    for step in torch.cat([steps, -steps]):
        at = levels + step * direction
        room = max(AT_LEVEL, ERRORS * float(step.abs()) * off / farthest)
        within = bool((at > -room).all() and (at < LEVELS + room).all())
        if within and bool(((at - at.round()).abs() <= room).all()):
            found.append(at.round())
    return found
