"""How often an interval of a mean holds the truth: `python -m benchmarks.reliability.intervals` (2 CPU minutes).

Each family draws the PSNR of so many images again and again. A family is even, skewed, or a mixture of images that an
attack solves and images that it misses. The truth is the mean of a million draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.reliability.page import Figure, record
from eval.metrics.statistics import mean_interval

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
IMAGES = (6, 8, 12, 16, 32, 50)
DRAWS = 2000
GOAL = 0.93
CHANCE = 0.01
"""What a count over `DRAWS` may fall short of the goal by chance: two standard errors."""


@dataclass(frozen=True)
class Family:
    """A distribution of PSNR over images.

    Attributes:
        draw: so many of its values.
        kind: what it stands for, in words.
        holds: whether intervals are meant to hold for it from six images on.
    """

    draw: Draw
    kind: str
    holds: bool = True


def _normal(mean: float, spread: float) -> Draw:
    return lambda rng, count: np.clip(rng.normal(mean, spread, count), 0, 100)


def _mixture(share: float, solved: Draw, missed: Draw) -> Draw:
    return lambda rng, count: np.where(rng.random(count) < share, solved(rng, count), missed(rng, count))


def _exact(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.full(count, 100.0)


EVEN, SKEWED, MIXED, RARE = "even figures", "skewed figures", "solved and missed images", "rare successes"
FAMILIES = {
    "normal": Family(_normal(20, 3), EVEN),
    "wide normal": Family(_normal(30, 12), EVEN),
    "uniform": Family(lambda rng, count: rng.uniform(5, 45, count), EVEN),
    "gamma": Family(lambda rng, count: np.minimum(10 + rng.gamma(2, 4, count), 100), SKEWED),
    "exponential": Family(lambda rng, count: np.minimum(12 + rng.exponential(5, count), 100), SKEWED, holds=False),
    **{f"{p:.0%} exact": Family(_mixture(p, _exact, _normal(15, 3)), MIXED) for p in (0.5, 0.7, 0.8, 0.9, 0.95)},
    "90% at 36 dB": Family(_mixture(0.9, _normal(36, 1), _normal(12, 1)), MIXED),
    **{
        f"{p:.0%} above 40 dB": Family(_mixture(p, _normal(75, 10), _normal(15, 3)), MIXED)
        for p in (0.5, 0.7, 0.8, 0.9, 0.95)
    },
    **{f"{p:.0%} exact": Family(_mixture(p, _exact, _normal(15, 3)), RARE, holds=False) for p in (0.1, 0.2, 0.3)},
}


def coverage(family: Family, images: int, draws: int, seed: int) -> tuple[float, float]:
    """Return the share of intervals that hold the truth, and their mean width in dB."""
    rng = np.random.default_rng(seed)
    truth = float(family.draw(rng, 1_000_000).mean())
    held, width = 0, 0.0
    for _ in range(draws):
        found = mean_interval(family.draw(rng, images))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
        width += found.high - found.low
    return held / draws, width / draws


def main() -> None:
    """Count and publish."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = {
        name: {str(images): coverage(family, images, DRAWS, 1) for images in IMAGES}
        for name, family in FAMILIES.items()
    }
    figures = []
    for kind in (EVEN, SKEWED, MIXED, RARE):
        own = [value[0] for name, family in FAMILIES.items() if family.kind == kind for value in found[name].values()]
        figures.append(
            Figure(
                f"95 % intervals of a mean, {kind}, {IMAGES[0]} to {IMAGES[-1]} images",
                len(own) * DRAWS,
                f"{GOAL:.0%} or more hold the truth, within {CHANCE:.0%} for chance",
                f"{min(own):.1%} at least, {sum(own) / len(own):.1%} on average",
                min(own) >= GOAL - CHANCE,
            )
        )
    record("intervals", "python -m benchmarks.reliability.intervals", figures, {"coverage and width": found})


if __name__ == "__main__":
    main()
