"""Settings that say in their types what they can be, and are checked when a dataclass is built.

    lr: StepSize = 0.01
    heads: Annotated[int, Range(1, 64)] = 4

One mechanism for configs, command lines and Python: `fl.registry` puts it in front of every registered dataclass, and
`declared` in front of the sections of an experiment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """What a number can be; NaN never, infinity only where it is said.

    Attributes:
        low: the smallest, or what all are above.
        high: the largest, or what all are below.
        above: whether `low` itself is left out.
        below: whether `high` itself is left out.
        infinite: whether infinity will do where `high` is infinite.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False

    def contains(self, x: float) -> bool:
        """Return whether `x` is in it."""
        if abs(x) == math.inf and not self.infinite:  # isinf takes no int of 400 digits
            return False
        lower = x > self.low if self.above else x >= self.low
        return lower and (x < self.high if self.below else x <= self.high)

    def describe(self, x: object = None) -> str:
        """Return it in words: ">= 0", "in (0, 1]"; a large `high` is only told where `x` is above."""
        low, high = ("" if math.isinf(end) else _number(end) for end in (self.low, self.high))
        far = self.high >= 1000 and not (isinstance(x, int | float) and x >= self.high)
        if low and high and self.high < 1000:
            return f"in {'(' if self.above else '['}{low}, {high}{')' if self.below else ']'}"
        parts = [f"{'>' if self.above else '>='} {low}"] if low else []
        parts += [f"{'<' if self.below else '<='} {high}"] if high and not far else []
        return " and ".join(parts)


@dataclass(frozen=True)
class Length:
    """How many items a sequence can have.

    Attributes:
        least: fewest.
        most: most; None is no limit.
    """

    least: int = 0
    most: int | None = None

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} or more"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


Count = Annotated[int, Range(1, 10**7)]
"""How many of something that is repeated or drawn: at least one, and no more than can be lived to see."""
CountFrom0 = Annotated[int, Range(0, 10**7)]
"""As `Count`, and none at all will do, too."""
Width = Annotated[int, Range(1, 2**16)]
"""Units, channels, pixels of a side: what networks and images are made of."""
Seed = Annotated[int, Range(-(2**63), 2**64, below=True)]
"""A seed, as torch's generators take it."""
StepSize = Annotated[float, Range(0, 1e6)]
"""A learning rate."""
PositiveStep = Annotated[float, Range(0, 1e6, above=True)]
"""A learning rate that is not 0."""
Weight = Annotated[float, Range(0, 1e18)]
"""Of a term in a sum, or a standard deviation of noise; its square is a number in single precision."""
Positive = Annotated[float, Range(0, 1e18, above=True)]
"""A number above 0, whose square is one in single precision."""
Limit = Annotated[float, Range(0, above=True, infinite=True)]
"""What something is cut to; infinity is no limit."""
ClipNorm = Annotated[float, Range(0, 1e18, above=True)]
"""What a gradient is clipped to in local training or on the server; null, where it is allowed, is no limit."""
Share = Annotated[float, Range(0, 1)]
"""A share, both ends included."""
PositiveShare = Annotated[float, Range(0, 1, above=True)]
"""A share that is not nothing."""
ShareBelow1 = Annotated[float, Range(0, 1, below=True)]
"""A share that is not all."""
OpenShare = Annotated[float, Range(0, 1, above=True, below=True)]
"""A share between nothing and all."""


def _number(x: float) -> str:
    power = math.log2(abs(x)) if x else 0.5
    if power >= 40 and power.is_integer():
        return f"{'-' if x < 0 else ''}2^{power:.0f}"
    return f"{x:,.0f}" if x == int(x) and abs(x) < 1e12 else f"{x:.12g}"
