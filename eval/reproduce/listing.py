"""What tables and figures come to, by their configs and committed cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from eval.experiment.scale_names import Scale
from eval.reproduce.cells import planned_cells
from eval.reproduce.committed import Committed, count_measured, read_committed, runs_of
from eval.reproduce.cost import experiment_cost
from eval.reproduce.item_status import ItemStatus, ScaleStatus
from eval.reproduce.items import Item, matching, rows_of
from eval.reproduce.listing_cache import ListingCache

FEW = 5
"""Configs that are read without a word about it."""


def list_status(
    items: Sequence[Item],
    committed: Committed | None = None,
    kept: ListingCache | None = None,
    tell: Callable[[str], None] = lambda _words: None,
) -> list[ItemStatus]:
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
    known: dict[str, ItemStatus] = {}
    for item in items:
        if item.name in plain:
            with suppress(LookupError, TypeError, AttributeError):  # not as this version writes it
                known[item.name] = ItemStatus.from_plain(item, plain[item.name])
    new = [item for item in items if item.name not in known]
    if new:
        if len(new) > FEW:
            tell(f"reading {len(new)} configs: this takes up to a minute the first time, and seconds from then on")
        cells = read_committed() if committed is None else committed
        known |= {item.name: _status_of(item, cells) for item in new}
        if kept is not None:
            kept.write(plain | {item.name: known[item.name].to_plain() for item in new if _is_known(known[item.name])})
    return [known[item.name] for item in items]


def _is_known(status: ItemStatus) -> bool:
    """Return whether every cost is known: weights that are not there may be there the next time."""
    return all(own.cost.seconds is not None for own in status.scales.values())


def _status_of(item: Item, committed: Committed) -> ItemStatus:
    rows = rows_of(item.experiment)
    scales: dict[Scale, ScaleStatus] = {}
    for scale in item.own_scales.scales:
        experiment = item.at(scale)
        cells = planned_cells(experiment)
        scales[scale] = ScaleStatus(
            measured=count_measured(experiment, committed, cells),
            cost=experiment_cost(experiment, committed.times, cells),
        )
    runs = runs_of(item.name, committed)
    done = frozenset().union(*(run.rows for run in runs)) if runs else frozenset()
    measured = sum(any(part in done for part in matching(item.experiment, row)) for row in rows)
    most = max(own.measured for own in scales.values())
    changes = tuple(dict.fromkeys(word for run in runs for word in run.changes))
    return ItemStatus(item=item, rows=len(rows), scales=scales, otherwise=max(measured - most, 0), changes=changes)
