"""Partitions as they are made: what a partition of one's own returns is checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl.data import Dataset
from fl.data.partitions.partition import Partition, Partitioner, partitions
from fl.runtime.user_code import place_errors


def split_checked(partitioner: Partitioner, dataset: Dataset) -> Partition:
    """Return the partition of a data set.

    Raises:
        ValueError: what is returned is no partition of the data set, or something was raised; says what and in which
            line.
    """
    name = str(partitions.spec(partitioner).get("name", type(partitioner).__name__))
    with place_errors(f"partition {name!r}: it"):
        made = partitioner(dataset)
    if not isinstance(made, Partition):
        raise ValueError(
            f"partition {name!r}: expected a Partition(train=..., test=...), indices of every client's images, "
            f"got {type(made).__name__}"
        )
    if not len(made):
        raise ValueError(f"partition {name!r}: expected at least one client, got none")
    for part, indices, batch in (("train", made.train, dataset.train), ("test", made.test, dataset.test)):
        for client, index in enumerate(indices):
            if problem := _find_problem(index, len(batch)):
                raise ValueError(f"partition {name!r}: {part} images of client {client}: {problem}")
    if empty := [client for client, index in enumerate(made.train) if not len(index)]:
        raise ValueError(f"partition {name!r}: expected training images for every client, got none for {empty[0]}")
    if not any(len(index) for index in made.test):
        raise ValueError(f"partition {name!r}: expected test images for some client, got none")
    return Partition(_as_int64(made.train), _as_int64(made.test))


def _find_problem(index: object, count: int) -> str:
    """Return what is wrong with one client's indices of so many images; empty where nothing is."""
    if not isinstance(index, Tensor):
        return f"expected a tensor int64 (n,), got {type(index).__name__}; torch.as_tensor(...) makes one"
    if index.dtype == torch.bool:
        return "expected indices int64 (n,), got torch.bool; mask.nonzero().flatten() makes them of a mask"
    if index.ndim != 1 or index.is_floating_point() or index.is_complex():
        return f"expected indices int64 (n,), got {index.dtype} {tuple(index.shape)}"
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < count):
        return f"expected indices in [0, {count}), one for each image there is, got {int(index.min())} to {index.max()}"
    return ""


def _as_int64(indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(index.to(torch.int64) for index in indices)
