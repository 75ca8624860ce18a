"""Who holds which images together with whom: what a membership attack and a careful reader need to know of a split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl.data import Dataset
from fl.data.partitions.partition import Partition
from fl.types import Batch

MAX_LISTED = 5
"""How many pairs of clients, and classes of each client, `format_report` names."""
IMAGES_PER_CHUNK = 4096
"""Shared images that are looked at in one go: all those of thousands of clients would not fit into memory."""


def describe_partition(partition: Partition, dataset: Dataset) -> dict[str, Any]:
    """Return what the clients hold, as plain data.

    Returns:
        `digest`, `clients`, `class_names`, and for each of `train` and `test`: `images` in the set; `owners`, where
        entry n is how many of them n clients hold; `shared`, how many more than one holds; `pairs`, ascending rows
        [client, client, images they share]; `sizes` of the clients; `counts`, for each client its images per class.
    """
    parts = {
        "train": _describe_part(partition.train, dataset.train, dataset.num_classes),
        "test": _describe_part(partition.test, dataset.test, dataset.num_classes),
    }
    names = list(dataset.class_names)
    return {"digest": partition.digest, "clients": len(partition), "class_names": names, **parts}


def format_report(found: dict[str, Any]) -> list[str]:
    """Return a `describe_partition` as lines of text."""
    result = [f"{found['clients']} clients, partition {found['digest'][:12]}"]
    for key, what in (("train", "training"), ("test", "test")):
        part = found[key]
        held = part["images"] - part["owners"][0]
        low, high = min(part["sizes"]), max(part["sizes"])
        size = f"{low} to {high}" if low < high else str(low)
        result.append(f"{what}: {held} of {part['images']} images, {size} per client")
        if not part["shared"]:
            result.append("  no image has more than one owner")
            continue
        owners = [f"{count} have {n}" for n, count in enumerate(part["owners"]) if n > 1 and count]
        result.append(f"  {part['shared']} images have more than one owner: {', '.join(owners)}")
        most = sorted(part["pairs"], key=lambda row: -row[2])[:MAX_LISTED]
        named = ", ".join(f"{a} and {b} share {count}" for a, b, count in most)
        more = len(part["pairs"]) - len(most)
        result.append(f"  clients {named}" + (f"; {more} more pairs" if more else ""))
    rows = enumerate(found["train"]["counts"])
    return result + [
        f"client {client} trains on {_most_frequent_classes(row, found['class_names'])}" for client, row in rows
    ]


def _most_frequent_classes(counts: list[int], names: list[str]) -> str:
    """Return the classes that a client has most of, and how many images there are of the others."""
    ranked = sorted((k for k, count in enumerate(counts) if count), key=lambda k: (-counts[k], k))
    named = [f"{names[k]}: {counts[k]}" for k in ranked[:MAX_LISTED]]
    rest = ranked[MAX_LISTED:]
    return ", ".join(named + ([f"{len(rest)} more: {sum(counts[k] for k in rest)}"] if rest else []))


def _describe_part(indices: Sequence[Tensor], batch: Batch, num_classes: int) -> dict[str, Any]:
    owners = torch.bincount(torch.cat(tuple(indices)), minlength=len(batch))
    return {
        "images": len(batch),
        "owners": torch.bincount(owners).tolist(),
        "shared": int((owners > 1).sum()),
        "pairs": _overlapping_pairs(indices, owners),
        "sizes": [len(index) for index in indices],
        "counts": [torch.bincount(batch.labels[index], minlength=num_classes).tolist() for index in indices],
    }


def _overlapping_pairs(indices: Sequence[Tensor], owners: Tensor) -> list[list[int]]:
    """Return rows [client, client, count] of those who share images; only the shared images are looked at."""
    whose = torch.arange(len(indices)).repeat_interleave(torch.tensor([len(index) for index in indices]))
    held = torch.cat(tuple(indices))
    common = torch.zeros(len(indices), len(indices), dtype=torch.int64)
    for some in (owners > 1).nonzero().flatten().split(IMAGES_PER_CHUNK):
        inside = torch.isin(held, some)
        holds = torch.zeros(len(indices), len(some))
        holds[whose[inside], torch.searchsorted(some, held[inside])] = 1
        common += (holds @ holds.T).long()
    return [[int(a), int(b), int(common[a, b])] for a, b in common.triu(diagonal=1).nonzero()]
