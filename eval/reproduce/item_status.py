"""What is told of a table or figure: its rows, what each scale costs, and how much of it is measured.

Imports nothing that takes time, as a committed list is shown by this alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.experiment.scale_names import SCALES, Scale
from eval.reproduce.items import Item

LEGEND = (
    "Rows: figures that the paper prints, or where none is in the config each method and each attack on it.",
    "Measured: rows of which all cells are committed in docs/results/cells, with exactly the settings of the scale; "
    "a data set counts as itself where only a part of its images was at hand.",
    "Otherwise: rows that committed runs of the same config have with other settings, such as another data set.",
    "Cost: an estimate for one CPU core, by committed cells of the same kind, else from counts and unit costs; four of "
    "five are within a factor of two.",
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an experiment comes to.

    Attributes:
        trainings: cells of trainings.
        attacks: cells of attacks.
        seconds: of all of them on one core; None where some network's cost is not known.
    """

    trainings: int
    attacks: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class ScaleStatus:
    """A table at a scale.

    Attributes:
        measured: rows that are committed.
        cost: of all of it.
    """

    measured: int
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class ItemStatus:
    """A table or figure with what is known of it.

    Attributes:
        item: which.
        rows: how many it has.
        scales: what it is at each scale.
        otherwise: rows that committed runs of its config have with other settings.
        changes: the settings that were changed there.
    """

    item: Item
    rows: int
    scales: Mapping[Scale, ScaleStatus]
    otherwise: int
    changes: tuple[str, ...]

    def to_plain(self, shown: Sequence[Scale] = SCALES) -> dict[str, Any]:
        """Return it as plain data, of all scales or some."""
        scales = {
            scale: {
                "measured": own.measured,
                "trainings": own.cost.trainings,
                "attacks": own.cost.attacks,
                "seconds": own.cost.seconds,
            }
            for scale, own in self.scales.items()
            if scale in shown
        }
        return {
            "item": self.item.name,
            "title": self.item.title,
            "rows": self.rows,
            "scales": scales,
            "otherwise": self.otherwise,
            "changes": list(self.changes),
        }

    @classmethod
    def from_plain(cls, item: Item, data: Mapping[str, Any]) -> ItemStatus:
        """Return what `to_plain` made plain data of."""
        scales: dict[Scale, ScaleStatus] = {}
        for scale in SCALES:
            if (own := data["scales"].get(scale)) is not None:
                cost = Cost(trainings=own["trainings"], attacks=own["attacks"], seconds=own["seconds"])
                scales[scale] = ScaleStatus(measured=own["measured"], cost=cost)
        changes = tuple(data["changes"])
        return cls(item=item, rows=data["rows"], scales=scales, otherwise=data["otherwise"], changes=changes)


def columns(shown: Sequence[Scale] = SCALES) -> list[str]:
    """Return the heads of the columns of `as_rows`."""
    return ["item", "rows", *(f"{scale}: measured, cost" for scale in shown), "otherwise"]


def as_rows(found: Sequence[ItemStatus], shown: Sequence[Scale] = SCALES) -> list[list[str]]:
    """Return a row of words for each item, under `columns`, and one of sums.

    Args:
        found: the items.
        shown: scales that have a column.
    """
    lines = [
        [
            one.item.name,
            str(one.rows),
            *(_words(one.scales.get(scale)) for scale in shown),
            str(one.otherwise) if one.otherwise else "-",
        ]
        for one in found
    ]
    sums = [str(sum(one.scales[scale].measured for one in found if scale in one.scales)) for scale in shown]
    whole = sum(one.rows for one in found)
    return [*lines, ["all", str(whole), *sums, str(sum(one.otherwise for one in found))]]


def _words(own: ScaleStatus | None) -> str:
    if own is None:
        return "-"
    return f"{own.measured or '-'}, {describe_seconds(own.cost.seconds)}"


def describe_seconds(seconds: float | None) -> str:
    """Return a duration as people say it: `40 s`, `3 min`, `2 h`, `5 days`; `unknown` of None."""
    if seconds is None:
        return "unknown"
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
