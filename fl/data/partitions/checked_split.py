"""Partitions as they are made: what a partition of one's own returns is checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import numpy as np
import torch
from torch import Tensor

from fl.data import Dataset
from fl.data.partitions.partition import Partition, Partitioner, partitions
from fl.runtime.user_code import RUN_ERRORS, place_errors

WHOLE = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
"""Types of whole numbers."""


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
    train = _read_indices(name, "train", made.train, len(dataset.train))
    test = _read_indices(name, "test", made.test, len(dataset.test))
    if empty := [client for client, index in enumerate(train) if not len(index)]:
        raise ValueError(f"partition {name!r}: expected training images for every client, got none for {empty[0]}")
    if not any(len(index) for index in test):
        raise ValueError(f"partition {name!r}: expected test images for some client, got none")
    return Partition(train, test)


def _read_indices(name: str, part: str, clients: Iterable[object], count: int) -> tuple[Tensor, ...]:
    """Return the indices of every client's images, of so many, in int64.

    Raises:
        ValueError: a client's are no indices of these images; says whose, and what to return.
    """
    found = list[Tensor]()
    with place_errors(f"partition {name!r}: its indices"):  # of a generator
        for client, index in enumerate(clients):
            try:
                found.append(_as_indices(index, count))
            except ValueError as error:
                raise ValueError(f"partition {name!r}: {part} images of client {client}: {error}") from error
    return tuple(found)


def _as_indices(given: object, count: int) -> Tensor:
    """Return one client's indices int64 (n,) of so many images: whole numbers in a row, or a mask of all images.

    Raises:
        ValueError: it is neither; says what to return.
    """
    index = _as_tensor(given)
    if index.is_nested:
        raise ValueError("expected indices int64 (n,), got a nested tensor; give one tensor for each client")
    kind = f"{index.dtype} {tuple(index.shape)}"
    if index.is_meta:
        raise ValueError(f"expected indices int64 (n,), got {kind} on the device meta, which has no numbers")
    index = index.cpu()
    if index.layout is not torch.strided or index.is_quantized:
        how = "index.int_repr()" if index.is_quantized else "index.to_dense()"
        raise ValueError(f"expected indices int64 (n,), got {kind} in {_form(index)}; give {how} if that is they")
    if index.ndim == 0:
        raise ValueError(
            f"expected indices int64 (n,), got {index.dtype} (), a number alone; train and test are tuples with the "
            "indices of each client"
        )
    if index.dtype == torch.bool and index.ndim == 1:
        if len(index) != count:
            raise ValueError(
                f"expected indices int64 (n,), or a mask with a value for each of {count} images, got {kind}"
            )
        return index.nonzero().flatten()
    if not index.numel() and index.ndim == 1:
        return torch.empty(0, dtype=torch.int64)  # an empty list is one of floats to torch
    if index.ndim != 1 or index.dtype not in WHOLE:
        hint = "; give index.long() if they are whole" if index.is_floating_point() and index.ndim == 1 else ""
        hint = "; give index.flatten() if they are one client's" if index.ndim > 1 else hint
        raise ValueError(f"expected indices int64 (n,), got {kind}{hint}")
    index = index.to(torch.int64)
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= count:
        raise ValueError(f"expected indices in [0, {count}), one for each image there is, got {low} to {high}")
    return index


def _as_tensor(given: object) -> Tensor:
    """Return what a client's indices are given as in a tensor: an array, a list, a range, a generator.

    Raises:
        ValueError: it is none of these, or holds other than numbers.
    """
    if isinstance(given, Tensor):
        return given.detach()
    kind = type(given).__name__
    if isinstance(given, Mapping | Set | str | bytes) or not (isinstance(given, Iterable) or np.isscalar(given)):
        hint = "; sorted(...) makes a list of it" if isinstance(given, Set) else ""
        raise ValueError(f"expected indices int64 (n,), got {kind}{hint}")
    values = given if isinstance(given, np.ndarray) or not isinstance(given, Iterable) else list(given)
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError("expected indices int64 (n,), got a masked array; give index.compressed()")
    try:
        array = np.asarray(values)
        if isinstance(values, list) and len({isinstance(value, bool | np.bool_) for value in values}) > 1:
            raise ValueError("numbers beside truth values")
        return torch.tensor(array.astype(array.dtype.newbyteorder("=")))
    except RUN_ERRORS as error:
        raise ValueError(f"expected indices int64 (n,), got {kind} that is no array of whole numbers") from error


def _form(index: Tensor) -> str:
    return "a quantized form" if index.is_quantized else f"the layout {index.layout}"
