"""The names of scales, apart from what makes an experiment of one, which takes seconds to import."""

from typing import Literal

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")
"""From a check that everything runs, over figures of a fitting order, to what the paper did."""
