"""Sentences on clients that share images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.io.run_layout import PARTITIONS


def shared_images(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a sentence on every partition in which clients share images.

    Args:
        found: for each partition of the run the labels of its `methods`, how many `images` there are, and how many of
            them are `shared`, in the parts `train` and `test`.
    """
    said = []
    for number, about in enumerate(found, 1):
        shared = [
            f"{about['shared'][part]} of {about['images'][part]} {name} images"
            for part, name in (("train", "training"), ("test", "test"))
            if about["shared"][part]
        ]
        if shared:
            whose = f" ({', '.join(about['methods'])})" if len(found) > 1 else ""
            said.append(
                f"Clients share images{whose}: {' and '.join(shared)} belong to more than one client, so that accuracy "
                f"and leakage of different clients are not independent; {PARTITIONS}/{number}.txt says who shares how "
                "many."
            )
    return said
