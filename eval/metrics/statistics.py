"""Statistics of rows: means with intervals over images, paired differences, success rates.

Every function takes either rows (mappings, with the name of a column) or an array: (images,) or (images, seeds).
Figures that are missing in the rows (None) are left out and counted.

**The interval of a mean.** Images are the units: with x_i the mean of image i over its seeds, m, s and g the mean, the
standard deviation and the skewness of the n values x_i, and t the quantile of Student's distribution with n - 1 degrees
of freedom, it is m +- t s / sqrt(n). On the side of the longer tail it is widened by s |g| (2 t^2 + 1) / (6 n), the
second-order term of Johnson (1978) and Hall (1992), times 1 + `FEW` / n, since few values show less skewness than there
is. That fails where an attack solves most images and misses some, as
long as few of one kind were seen: their share is then hardly known. So where the values fall into two kinds - a gap
wider than `GAP`, or some solved and others not (`COLUMNS`) - the share p of the upper kind is bounded by Clopper
and Pearson's interval [p_l, p_u], and what p_l and p_u make of the means of both kinds widens it further. Misses that
were not seen beside solved images count at the lower end of the range. Successes that were not seen are in no mean's
interval: the share of them (`success_rate`) says how many there may be. How often the truth is inside is counted by
`python -m benchmarks.reliability.intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from eval.metrics.image import PSNR_CAP

Floats = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
Data = Rows | ArrayLike

THRESHOLDS = (20, 25, 30)
"""dB from which a reconstruction counts as a success, from recognizable to near exact."""


@dataclass(frozen=True)
class Column:
    """What is known of the figures of a column.

    Attributes:
        low: the least there can be.
        high: the most.
        solved: from which on an image counts as solved and not as guessed; None where the figure does not tell.
        kinds: whether the figures may be of two kinds of images, those that an attack solves and those that it misses.
    """

    low: float
    high: float
    solved: float | None = None
    kinds: bool = True


COLUMNS = {
    "psnr": Column(0.0, PSNR_CAP, 30.0),
    "gain": Column(-40.0, PSNR_CAP, 18.0),  # PSNR above a guess, which hardly ever scores 40 dB itself
    "ssim": Column(-1.0, 1.0, 0.99),
    "accuracy": Column(0.0, 1.0, kinds=False),
    "lpips": Column(0.0, math.inf, kinds=False),
}
"""By their names up to the first underscore; others are not known. Of a guess's figure the range alone is."""
FEWEST_SUCCESSES = 10
"""Found by simulation: with it, intervals of six exponential figures hold the truth in 92.6 %, without in 90 %."""
GAP = 0.1
"""Share of a column's highest value that lies empty between two kinds of images."""


@dataclass(frozen=True)
class Interval:
    """An estimate and how far to trust it.

    Attributes:
        value: the estimate.
        low: lower end of the confidence interval; None where one image can't tell.
        high: its upper end.
        images: images it rests on.
        count: figures it rests on, over all seeds.
        missing: figures that could not be taken.
    """

    value: float
    low: float | None
    high: float | None
    images: int
    count: int
    missing: int = 0


def mean_interval(
    data: Data,
    column: str = "psnr",
    *,
    image: str = "image",
    run: str = "seed",
    level: float = 0.95,
) -> Interval:
    """Return the mean over images, each weighing the same however many seeds it has, with this module's interval.

    Args:
        data: rows, or an array (images,) or (images, seeds) with NaN for what is missing.
        column: the figure, in rows; of an array, what it holds.
        image: column that tells images apart across the whole experiment.
        run: column that tells the seeds of one image apart; may be absent.
        level: confidence level in (0, 1).

    Raises:
        ValueError: no figure is left, a figure is infinite, or `level` is out of range.
    """
    return _interval(_table(data, column, image, run), level, _known_of(column))


def paired_difference(
    first: Data,
    second: Data,
    column: str = "psnr",
    *,
    image: str = "image",
    run: str = "seed",
    level: float = 0.95,
) -> Interval:
    """Return the mean of `first - second` over the same images and seeds, with the interval of `mean_interval`.

    Differences that are all alike say nothing of a kind that was not seen: their interval is Student's.

    Raises:
        ValueError: the two do not hold the same images and seeds once each, or as `mean_interval`.
    """
    a, b = (_table(data, column, image, run) for data in (first, second))
    if any(set(a.get(key, {})) != set(b.get(key, {})) for key in {*a, *b}):
        raise ValueError(f"expected the same ({image}, {run}) pairs on both sides, got {_count(a)} and {_count(b)}")
    difference = {key: {r: value - b[key][r] for r, value in runs.items()} for key, runs in a.items()}
    known = _known_of(column)
    span = known and Column(known.low - known.high, known.high - known.low, kinds=known.kinds)
    return _interval(difference, level, span)


def exact_interval(successes: float, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a rate (1934): it covers the truth at probability `level` or more."""
    _check_level(level)
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"expected 0 <= successes <= trials and a trial, got {successes} of {trials}")
    tail = (1 - level) / 2
    return rate_lower_bound(successes, trials, tail), rate_upper_bound(successes, trials, tail)


def rate_upper_bound(successes: float, trials: int, significance: float) -> float:
    """Return Clopper and Pearson's one-sided upper bound on a rate."""
    if successes >= trials:
        return 1.0
    return float(special.betaincinv(successes + 1, trials - successes, 1 - significance))


def rate_lower_bound(successes: float, trials: int, significance: float) -> float:
    """Return Clopper and Pearson's one-sided lower bound on a rate."""
    if successes <= 0:
        return 0.0
    return float(special.betaincinv(successes, trials - successes + 1, significance))


def success_rate(
    data: Data,
    threshold: float,
    column: str = "psnr",
    *,
    image: str = "image",
    run: str = "seed",
    level: float = 0.95,
) -> Interval:
    """Return the share of figures at or above `threshold`, each image weighing the same, with its exact interval.

    Images are the trials: an image that succeeds under some of its seeds counts as that part of a success.

    Raises:
        ValueError: as `mean_interval`.
    """
    table = _table(data, column, image, run)
    values, missing = _known(table)
    hits = [[float(v >= threshold) for v in runs.values() if not math.isnan(v)] for runs in table.values()]
    shares = [sum(own) / len(own) for own in hits if own]
    low, high = exact_interval(sum(shares), len(shares), level)
    return Interval(sum(shares) / len(shares), low, high, len(shares), len(values), missing)


def median(data: Data, column: str = "psnr") -> float:
    """Return the median of all figures."""
    return float(np.median(_known(_table(data, column, "image", "seed"))[0]))


def psnr_of_mean_mse(data: Data, column: str = "mse") -> float:
    """Return PSNR in dB of the mean MSE: never above the mean of the PSNRs, and what some papers print."""
    mean = float(_known(_table(data, column, "image", "seed"))[0].mean())
    return float(min(PSNR_CAP, -10 * np.log10(max(mean, 1e-300))))


def _known_of(column: str) -> Column | None:
    """Return what is known of a column by its name."""
    if not column.startswith("floor_"):
        return COLUMNS.get(column.partition("_")[0])
    known = COLUMNS.get(column.split("_")[2])  # floor_mean_psnr
    return known and replace(known, kinds=False)


def _table(data: Data, column: str, image: str, run: str) -> dict[Any, dict[Any, float]]:
    """Return figures by image and seed, NaN where missing."""
    table: dict[Any, dict[Any, float]] = {}
    if isinstance(data, Sequence) and data and isinstance(data[0], Mapping):
        for row in cast("Rows", data):
            if column not in row or image not in row:
                raise ValueError(f"expected rows with columns {column!r} and {image!r}, got {sorted(row)}")
            runs, key = table.setdefault(row[image], {}), row.get(run, 0)
            if key in runs:
                raise ValueError(f"expected one row per ({image}, {run}), got two for ({row[image]!r}, {key!r})")
            runs[key] = float("nan") if row[column] is None else float(row[column])
        return table
    array = np.asarray(data, dtype=np.float64)
    if array.ndim not in (1, 2):
        raise ValueError(f"expected rows, or an array (images,) or (images, seeds), got shape {array.shape}")
    return {i: dict(enumerate(np.atleast_1d(values).tolist())) for i, values in enumerate(array)}


def _known(table: Mapping[Any, Mapping[Any, float]]) -> tuple[Floats, int]:
    """Return all figures there are, and how many are missing."""
    values = np.array([value for runs in table.values() for value in runs.values()], dtype=np.float64)
    known = values[~np.isnan(values)]
    if not len(known) or np.isinf(known).any():
        raise ValueError(f"expected at least one figure and all of them finite, got {len(known)} of {len(values)}")
    return known, len(values) - len(known)


def _interval(table: Mapping[Any, Mapping[Any, float]], level: float, known: Column | None) -> Interval:
    figures, missing = _known(table)
    _check_level(level)
    groups = ([v for v in runs.values() if not math.isnan(v)] for runs in table.values())
    values = np.array([math.fsum(group) / len(group) for group in groups if group])
    value = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(value, None, None, 1, len(figures), missing)
    if known is not None and (values.min() < known.low or values.max() > known.high):
        known = None  # an array of other figures
    low, high = _student(values, level)
    if known is not None:
        lower, upper = _mixed(values, level, known) if known.kinds else (low, high)
        low, high = max(min(low, lower), known.low), min(max(high, upper), known.high)
    return Interval(value, min(low, value), max(high, value), len(values), len(figures), missing)


def _student(values: Floats, level: float) -> tuple[float, float]:
    """Return Student's interval of a mean, wider on the side of the longer tail; of one value that value itself."""
    middle, count = float(values.mean()), len(values)
    if count < 2:
        return middle, middle
    quantile, spread = float(special.stdtrit(count - 1, 0.5 + level / 2)), float(values.std(ddof=1))
    half = quantile * spread / math.sqrt(count)
    if count < 3 or spread == 0:
        return middle - half, middle + half
    skewness = float(((values - middle) ** 3).mean() / values.std() ** 3)
    tail = (1 + FEWEST_SUCCESSES / count) * spread * skewness * (2 * quantile**2 + 1) / (6 * count)
    return middle - half + min(tail, 0.0), middle + half + max(tail, 0.0)


def _mixed(values: Floats, level: float, known: Column) -> tuple[float, float]:
    """Return the interval of a mean of two kinds of images, as this module defines it; an empty one of one kind.

    Args:
        values: one for each image (n,).
        level: of confidence.
        known: of their column.
    """
    ranked = np.sort(values)
    gaps = np.diff(ranked)
    if gaps.max() > GAP * known.high:
        split = int(gaps.argmax()) + 1
    elif known.solved is not None and ranked[-1] >= known.solved:
        split = int((ranked < known.solved).sum())
    else:
        return math.inf, -math.inf
    below, above = ranked[:split], ranked[split:]
    fewest, most = exact_interval(len(above), len(values), level)
    low_above, high_above = _student(above, level)
    low_below, high_below = _student(below, level) if len(below) else (known.low, low_above)
    return fewest * low_above + (1 - fewest) * low_below, most * high_above + (1 - most) * high_below


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"expected level in (0, 1), got {level}")


def _count(table: Mapping[Any, Mapping[Any, float]]) -> int:
    return sum(len(runs) for runs in table.values())
