"""From rows to figures: means with bootstrap intervals over images and seeds, paired differences, success rates.

Every function takes either rows (mappings, with the name of a column) or an array: (images,) or (images, seeds).
Figures that are missing in the rows (None) are left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, norm

from eval.metrics import PSNR_CAP

Floats = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
Data = Rows | ArrayLike

THRESHOLDS = (20, 25, 30)
"""dB from which a reconstruction counts as a success, from recognisable to near exact."""
_BLOCK = 1 << 18
"""Figures resampled at once: enough to keep numpy busy, few enough for the cache."""


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
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Mean with a two-level percentile bootstrap interval: images are resampled, then the seeds of each.

    Figures of one image under several seeds are not independent, so images are the clusters; each image weighs the
    same, however many seeds it has.

    Args:
        data: rows, or an array (images,) or (images, seeds) with NaN for what is missing.
        column: the figure, in rows.
        image: column that tells images apart across the whole experiment.
        run: column that tells the seeds of one image apart; may be absent.
        seed: of the resampling.
        resamples: number of bootstrap samples.
        level: confidence level in (0, 1).

    Raises:
        ValueError: no figure is left, a figure is infinite, or `level` or `resamples` is out of range.
    """
    table = _table(data, column, image, run)
    return _bootstrap(table, seed, resamples, level)


def paired_difference(
    first: Data,
    second: Data,
    column: str = "psnr",
    *,
    image: str = "image",
    run: str = "seed",
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Mean of `first - second` over the same images and seeds, with the interval of `mean_interval`.

    Raises:
        ValueError: the two do not hold the same images and seeds once each, or as `mean_interval`.
    """
    a, b = (_table(data, column, image, run) for data in (first, second))
    if any(set(a.get(key, {})) != set(b.get(key, {})) for key in {*a, *b}):
        raise ValueError(f"expected the same ({image}, {run}) pairs on both sides, got {_count(a)} and {_count(b)}")
    difference = {key: {r: value - b[key][r] for r, value in runs.items()} for key, runs in a.items()}
    return _bootstrap(difference, seed, resamples, level)


def exact_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a rate (1934): it covers the truth with probability `level` or more."""
    _check_level(level)
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"expected 0 <= successes <= trials and a trial, got {successes} of {trials}")
    tail = (1 - level) / 2
    return at_least(successes, trials, tail), at_most(successes, trials, tail)


def at_most(successes: int, trials: int, significance: float) -> float:
    """Clopper and Pearson's one-sided upper bound on a rate."""
    return 1.0 if successes >= trials else float(beta.ppf(1 - significance, successes + 1, trials - successes))


def at_least(successes: int, trials: int, significance: float) -> float:
    """Clopper and Pearson's one-sided lower bound on a rate."""
    return 0.0 if successes <= 0 else float(beta.ppf(significance, successes, trials - successes + 1))


def success_rate(
    data: Data,
    threshold: float,
    column: str = "psnr",
    *,
    image: str = "image",
    run: str = "seed",
    level: float = 0.95,
) -> Interval:
    """Share of figures at or above `threshold` with Wilson's interval (Wilson, 1927).

    The interval takes figures as independent. It is too narrow for several seeds of few images; for those,
    `mean_interval` of the indicator resamples images.

    Raises:
        ValueError: as `mean_interval`.
    """
    table = _table(data, column, image, run)
    values, missing = _known(table)
    _check_level(level)
    count, z = len(values), float(norm.ppf(0.5 + level / 2))
    rate = float((values >= threshold).mean())
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * float(np.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    images = sum(any(not math.isnan(value) for value in runs.values()) for runs in table.values())
    return Interval(rate, min(low, rate), max(high, rate), images, count, missing)


def median(data: Data, column: str = "psnr") -> float:
    """Median of all figures."""
    return float(np.median(_known(_table(data, column, "image", "seed"))[0]))


def psnr_of_mean_mse(data: Data, column: str = "mse") -> float:
    """PSNR in dB of the mean MSE: never above the mean of the PSNRs, and what some papers print."""
    mean = float(_known(_table(data, column, "image", "seed"))[0].mean())
    return float(min(PSNR_CAP, -10 * np.log10(max(mean, 1e-300))))


def _table(data: Data, column: str, image: str, run: str) -> dict[Any, dict[Any, float]]:
    """Figures by image and seed, NaN where missing."""
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
    """All figures there are, and how many are missing."""
    values = np.array([value for runs in table.values() for value in runs.values()], dtype=np.float64)
    known = values[~np.isnan(values)]
    if not len(known) or np.isinf(known).any():
        raise ValueError(f"expected at least one figure and all of them finite, got {len(known)} of {len(values)}")
    return known, len(values) - len(known)


def _bootstrap(table: Mapping[Any, Mapping[Any, float]], seed: int, resamples: int, level: float) -> Interval:
    values, missing = _known(table)
    _check_level(level)
    if resamples < 1:
        raise ValueError(f"expected resamples >= 1, got {resamples}")
    groups = [[v for v in runs.values() if not math.isnan(v)] for runs in table.values()]
    groups = [group for group in groups if group]
    sizes = np.array([len(group) for group in groups])
    padded = np.zeros((len(groups), sizes.max()))
    for i, group in enumerate(groups):
        padded[i, : len(group)] = group
    value = float((padded.sum(1) / sizes).mean())
    if len(groups) == 1:
        return Interval(value, None, None, 1, len(values), missing)
    tail = (1 - level) / 2
    low, high = np.quantile(_resampled_means(padded, sizes, seed, resamples), [tail, 1 - tail]).tolist()
    return Interval(value, low, high, len(groups), len(values), missing)


def _resampled_means(padded: Floats, sizes: NDArray[np.int64], seed: int, resamples: int) -> Floats:
    """Means of `resamples` two-level samples from rows of `sizes` figures."""
    rng = np.random.default_rng(seed)
    count, width = padded.shape
    block = max(1, _BLOCK // padded.size)
    means = []
    for start in range(0, resamples, block):
        some = min(block, resamples - start)
        images = rng.integers(count, size=(some, count))
        size = sizes[images][..., None]
        runs = (rng.random((some, count, width)) * size).astype(np.int64)
        drawn = padded[images[..., None], runs] * (np.arange(width) < size)
        means.append((drawn.sum(2) / size[..., 0]).mean(1))
    return np.concatenate(means)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"expected level in (0, 1), got {level}")


def _count(table: Mapping[Any, Mapping[Any, float]]) -> int:
    return sum(len(runs) for runs in table.values())
