"""The committed list of tables and figures, so that none of their configs is read to show it.

`python -m benchmarks.reproduce_list` writes it. Tests hold it equal to what configs and committed cells come to; where
one of these has been changed since, it counts for nothing. Of code that is changed it does not know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eval.io import jsonl
from eval.reproduce.item_status import ItemStatus
from eval.reproduce.items import CELLS, Item

INDEX = Path(__file__).with_name("index.json")
DIGITS = 12
"""Digits of a file's SHA-256 that are kept."""
PRECISION = 4
"""Significant digits of seconds, which are estimates."""


def list_indexed(items: Sequence[Item], tell: Callable[[str], None] = lambda _words: None) -> list[ItemStatus]:
    """Return items with their status: as it is committed, else as it was computed here before, else computed.

    Args:
        items: which.
        tell: told when it will take a while.

    Raises:
        ValueError: a config or an archive can't be read; says which.
    """
    known = read_index(items)
    new = [item for item in items if item.name not in known]
    if new:
        from eval.reproduce.listing import list_status
        from eval.reproduce.listing_cache import ListingCache

        known |= {one.item.name: one for one in list_status(new, kept=ListingCache(), tell=tell)}
    return [known[item.name] for item in items]


def read_index(items: Sequence[Item], path: Path = INDEX) -> dict[str, ItemStatus]:
    """Return what is committed of items by name, as far as their configs and the cells are as they were then.

    An installation comes without cells; there it is taken as it is.
    """
    try:
        data = jsonl.read_json(path)
        cells, entries = data["cells"], dict(data["items"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    if CELLS.is_dir() and cells != _digests_of_cells():
        return {}
    found: dict[str, ItemStatus] = {}
    for item in items:
        with suppress(LookupError, TypeError, AttributeError, OSError):  # not there, or not as this version writes it
            entry = entries[item.name]
            if entry["config"] == _digest(item.path):
                found[item.name] = ItemStatus.from_plain(item, entry)
    return found


def write_index(found: Sequence[ItemStatus], path: Path = INDEX) -> None:
    """Write the list of all items, a line for each."""
    entries = ",\n".join(f"{json.dumps(one.item.name)}: {json.dumps(to_entry(one))}" for one in found)
    cells = json.dumps(_digests_of_cells(), indent=1)
    jsonl.write_text(path, f'{{"cells": {cells},\n"items": {{\n{entries}\n}}}}\n')


def to_entry(status: ItemStatus) -> dict[str, Any]:
    """Return what the committed list has of an item."""
    plain = status.to_plain()
    del plain["item"], plain["title"]
    scales = {name: {**own, "seconds": _rounded(own["seconds"])} for name, own in plain["scales"].items()}
    return {"config": _digest(status.item.path), **plain, "scales": scales}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.{PRECISION}g}")


def _digests_of_cells() -> Mapping[str, str]:
    return {path.name: _digest(path) for path in sorted(CELLS.glob("*.tar.xz"))}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
