"""Who holds which images in a run, left for readers: lists, the same in words, and whether clients share any.

`partitions/1.json` has the index lists and their digest as `fl.data.partitions.partition.Partition.load` reads them,
beside them the methods that were trained on them; `partitions/1.txt` says it in words. A run has one of each for every
data set that it splits and every way in which it does; neither depends on what was computed, or where.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.io import jsonl
from eval.io.run_layout import PARTITIONS
from eval.run.federation_data import FederationData
from eval.run.plan import Plan
from fl.data.partitions import overlap
from fl.runtime.atomic_files import atomic_folder


def distinct_partitions(plan: Plan) -> list[tuple[FederationData, dict[str, Any]]]:
    """Return the different partitions of a run, each with what its file says beside the lists (see `notes`)."""
    found: dict[str, tuple[FederationData, dict[str, None]]] = {}
    for training in plan.trainings:
        found.setdefault(training.data.digest, (training.data, {}))[1][training.method.label] = None
    return [(data, _about(data, methods)) for data, methods in found.values()]


def write_partitions(plan: Plan, folder: Path) -> None:
    """Put the partitions of a run in place of those that were in its folder."""
    with atomic_folder(folder / PARTITIONS) as new:
        for number, (data, about) in enumerate(distinct_partitions(plan), 1):
            data.partition.save(new / f"{number}.json", data.dataset, about)
            words = [f"methods: {', '.join(about['methods'])}"]
            words += overlap.format_report(overlap.describe_partition(data.partition, data.dataset))
            jsonl.write_text(new / f"{number}.txt", "\n".join(words) + "\n")


def _about(data: FederationData, methods: Iterable[str]) -> dict[str, Any]:
    images = {"train": len(data.dataset.train), "test": len(data.dataset.test)}
    return {"methods": list(methods), "images": images, "shared": data.partition.overlap}
