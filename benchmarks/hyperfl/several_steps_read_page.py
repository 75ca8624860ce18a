"""Tables and sentences of `benchmarks.hyperfl.several_steps` on what is read off updates without a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.common import table
from benchmarks.hyperfl.several_steps_read import CLIENTS, EVEN, SIZES, UPDATES
from eval.metrics.statistics import Interval, mean_interval, paired_difference

Row = dict[str, Any]


def written(interval: Interval, number: Callable[[float], str] = lambda value: f"{value:.1f}") -> str:
    """A figure with its interval."""
    low, high = interval.low, interval.high
    if low is None or high is None:
        return number(interval.value)
    return f"{number(interval.value)} [{number(low)}, {number(high)}]"


def grouped(rows: Sequence[Row], *columns: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Rows of equal values in these columns, in order of their first."""
    keys = dict.fromkeys(tuple(row[column] for column in columns) for row in rows)
    for key in keys:
        yield key, [row for row in rows if tuple(row[column] for column in columns) == key]


def of_peel(rows: Sequence[Row]) -> list[str]:
    """Errors by optimiser and local work."""
    body = []
    columns = ("extractor", "embedding", "mean", "start")
    for (optimiser, work), mine in grouped(rows, "optimiser", "work"):
        errors = [written(mean_interval(mine, column), _short) for column in columns]
        body.append([optimiser, work, *errors, f"{sum(row['verified'] for row in mine)} of {len(mine)}"])
    head = ["optimiser", "local work", "extractor", "embedding", "gradient: mean along the round", "at the start"]
    return [
        f"HyperFL's split in {CLIENTS} clients of 600 images, batches of 50, the published step size and clipping, "
        "before any round. Relative errors, mean over clients with its interval. The gradient that is read off the "
        "update is compared, at the factor that suits it best, with the *mean along the round* of what the client's "
        "steps computed (weighted as momentum and clipping do), and with that of all its images *at the start*, which "
        "attacks for one step take it for: 1 is no better than nothing. *Verified* is the peel's own word.",
        "",
        *table([*head, "verified"], body),
    ]


def _short(value: float) -> str:
    return f"{value:.1e}" if value < 0.01 else f"{value:.2f}"


def of_labels(rows: Sequence[Row]) -> list[str]:
    """Shares of labels by rounds of training, rule and size of the batch."""
    body = []
    for (rounds, accuracy, rule), mine in grouped(rows, "rounds", "accuracy", "rule"):
        by_size = {size: [row for row in mine if row["size"] == size] for size in SIZES}
        cells = [written(mean_interval(part, "known"), lambda value: f"{100 * value:.0f}") for part in by_size.values()]
        body.append([f"{rounds} ({accuracy:.0%})", rule, *cells])
    refused = sum(row["refused"] for row in rows)
    return [
        "Percent of an update's labels that a rule tells, each label counted as often as it is there; "
        f"{UPDATES} updates of test images in their order for each batch size, with 95 % intervals, after so many "
        "rounds of FedAvg (accuracy in brackets). *Signs*: every class whose bias has a negative gradient, once. "
        "*Counts*: `attacks/labels/recovery.py`, on one step, on one whose bias was not sent, and on four steps of a "
        f"quarter of the batch each (of one image: of it each time). *{EVEN.capitalize()}*: every class as "
        f"often, drawn without the update: what the size alone tells. {refused} of {len(rows)} guesses were "
        "refused and count as 0.",
        "",
        *table(["rounds", "rule", *(f"B = {size}" for size in SIZES)], body),
        "",
        f"Counts on one step less what is dealt out evenly, B = {SIZES[-1]}:",
        "",
        *(f"- {line}" for line in _over_even(rows)),
    ]


def _over_even(rows: Sequence[Row]) -> Iterator[str]:
    """Paired differences for the largest batch, in points, by rounds."""
    for (rounds,), mine in grouped([row for row in rows if row["size"] == SIZES[-1]], "rounds"):
        counts, even = ([row for row in mine if row["rule"] == rule] for rule in ("counts", EVEN))
        gain = paired_difference(counts, even, "known")
        yield f"rounds of training {rounds}: {written(gain, lambda value: f'{100 * value:+.0f}')} points."
