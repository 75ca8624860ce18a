"""All tables and figures with their scales: what each costs, and how much of it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eval.experiment.scales import SCALES, Scale
from eval.reproduce.cells import planned_cells
from eval.reproduce.committed import Committed, count_measured, read_committed, runs_of
from eval.reproduce.cost import Cost, describe_seconds, experiment_cost
from eval.reproduce.items import Item, matching, rows_of
from eval.reproduce.kept import KeptListing

FEW = 5
"""Configs that are read without a word about it."""
LEGEND = (
    "Rows: figures that the paper prints, or where none is in the config each method and each attack on it.",
    "Measured: rows of which all cells are committed in docs/results/cells, with exactly the settings of the scale; "
    "a data set counts as itself where only a part of its images was at hand.",
    "Otherwise: rows that committed runs of the same config have with other settings, such as another data set.",
    "Cost: an estimate for one CPU core, by committed cells of the same kind, else from counts and unit costs; four of "
    "five are within a factor of two.",
)


@dataclass(frozen=True, kw_only=True)
class AtScale:
    """A table at a scale.

    Attributes:
        measured: rows that are committed.
        cost: of all of it.
    """

    measured: int
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Listed:
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
    scales: Mapping[Scale, AtScale]
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
    def from_plain(cls, item: Item, data: Mapping[str, Any]) -> Listed:
        """Return what `to_plain` made plain data of."""
        scales: dict[Scale, AtScale] = {}
        for scale in SCALES:
            if (own := data["scales"].get(scale)) is not None:
                cost = Cost(trainings=own["trainings"], attacks=own["attacks"], seconds=own["seconds"])
                scales[scale] = AtScale(measured=own["measured"], cost=cost)
        changes = tuple(data["changes"])
        return cls(item=item, rows=data["rows"], scales=scales, otherwise=data["otherwise"], changes=changes)


def list_status(
    items: Sequence[Item],
    committed: Committed | None = None,
    kept: KeptListing | None = None,
    tell: Callable[[str], None] = lambda _words: None,
) -> list[Listed]:
    """Return items with what of them is measured, and what each scale costs.

    Args:
        items: which.
        committed: cells; None reads those of the checkout.
        kept: where their figures are taken from, and kept for the next time; None computes all. With `committed` it
            has to be None.
        tell: told when it will take a while.

    Raises:
        ValueError: a config or an archive can't be read; says which.
    """
    plain = {} if kept is None else kept.read()
    known: dict[str, Listed] = {}
    for item in items:
        if item.name in plain:
            with suppress(LookupError, TypeError, AttributeError):  # not as this version writes it
                known[item.name] = Listed.from_plain(item, plain[item.name])
    new = [item for item in items if item.name not in known]
    if new:
        if len(new) > FEW:
            tell(f"reading {len(new)} configs: this takes up to a minute the first time, and seconds from then on")
        cells = read_committed() if committed is None else committed
        known |= {item.name: _listed(item, cells) for item in new}
        if kept is not None:
            kept.write(plain | {item.name: known[item.name].to_plain() for item in new if _is_known(known[item.name])})
    return [known[item.name] for item in items]


def _is_known(one: Listed) -> bool:
    """Return whether every cost is known: weights that are not there may be there the next time."""
    return all(own.cost.seconds is not None for own in one.scales.values())


def columns(shown: Sequence[Scale] = SCALES) -> list[str]:
    """Return the heads of the columns of `as_rows`."""
    return ["item", "rows", *(f"{scale}: measured, cost" for scale in shown), "otherwise"]


def as_rows(found: Sequence[Listed], shown: Sequence[Scale] = SCALES) -> list[list[str]]:
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


def _words(own: AtScale | None) -> str:
    if own is None:
        return "-"
    return f"{own.measured or '-'}, {describe_seconds(own.cost.seconds)}"


def _listed(item: Item, committed: Committed) -> Listed:
    rows = rows_of(item.experiment)
    scales: dict[Scale, AtScale] = {}
    for scale in item.own_scales.scales:
        experiment = item.at(scale)
        cells = planned_cells(experiment)
        scales[scale] = AtScale(
            measured=count_measured(experiment, committed, cells),
            cost=experiment_cost(experiment, committed.times, cells),
        )
    runs = runs_of(item.name, committed)
    done = frozenset().union(*(run.rows for run in runs)) if runs else frozenset()
    measured = sum(any(part in done for part in matching(item.experiment, row)) for row in rows)
    most = max(own.measured for own in scales.values())
    changes = tuple(dict.fromkeys(word for run in runs for word in run.changes))
    return Listed(item=item, rows=len(rows), scales=scales, otherwise=max(measured - most, 0), changes=changes)
