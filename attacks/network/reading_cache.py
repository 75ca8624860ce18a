"""Keeps what has been read off a network or a tensor while one attack runs, which asks for the same many times.

An attack and the confirmation of its result trace the network of a view, and read its layers, a dozen times, most often
of views that differ in what was sent back alone. They ask as often whether a tensor of the update lies on a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl.view import ServerView

T = TypeVar("T")
MAX_KEPT = 12
"""Readings that are kept at once."""
MAX_NUMBERS = 2**28
"""Numbers that they may hold together: a recorded network of two hundred million is made anew each time."""
MAX_TENSORS = 1024
"""Readings of tensors that are kept at once, beside those."""


@dataclass(frozen=True)
class _Kept:
    """A reading.

    Attributes:
        source: what it was read off; as long as that is kept, no other object has its identity, nor its memory.
        found: the reading.
        size: numbers that it holds.
    """

    source: tuple[Any, ...]
    found: Any
    size: int


_KEPT: ContextVar[dict[Hashable, _Kept] | None] = ContextVar("kept", default=None)
_OF_TENSORS: ContextVar[dict[Hashable, _Kept] | None] = ContextVar("of tensors", default=None)


@contextmanager
def readings_cached() -> Iterator[None]:
    """Keep readings while the block runs, in this thread."""
    if _KEPT.get() is not None:
        yield
        return
    token, of_tensors = _KEPT.set({}), _OF_TENSORS.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)
        _OF_TENSORS.reset(of_tensors)


def cached_reading(view: ServerView, what: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
    """Return what `make` reads off the network of `view`, or read off it before; it is not to be changed.

    Args:
        view: what the server saw. Networks are the same where client, parameters and buffers are the same objects.
        what: is read: for each, `make` does the same.
        make: reads it.
        size: numbers that it holds.
    """
    kept = _KEPT.get()
    if kept is None:
        return make()
    network = (view.client, *view.shared.values(), *view.buffers.values())
    key = (what, *map(id, network))
    if key not in kept:
        found = make()
        numbers = size(found)
        if numbers > MAX_NUMBERS:
            return found
        while kept and (len(kept) >= MAX_KEPT or numbers + sum(one.size for one in kept.values()) > MAX_NUMBERS):
            del kept[_first_to_go(kept)]
        kept[key] = _Kept(network, found, numbers)
    result: T = kept[key].found
    return result


def cached_tensor_reading(values: Tensor, what: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` reads off numbers, or read off the same memory before, where nobody has written to it since.

    Args:
        values: the numbers, which are kept as long as the reading is.
        what: is read: for each, `make` does the same.
        make: reads it; it holds few numbers.
    """
    kept = _OF_TENSORS.get()
    if kept is None or values.is_inference() or values.layout is not torch.strided:  # which count no writes
        return make()
    place = (values.data_ptr(), values._version, values.shape, values.stride(), values.dtype, values.device)
    key = (what, *place)
    if key not in kept:
        found = make()
        while kept and (
            len(kept) >= MAX_TENSORS or values.numel() + sum(one.size for one in kept.values()) > MAX_NUMBERS
        ):
            del kept[next(iter(kept))]
        kept[key] = _Kept((values,), found, values.numel())
    result: T = kept[key].found
    return result


def _first_to_go(kept: Mapping[Hashable, _Kept]) -> Hashable:
    """Return the reading that gives way: the oldest where there are too many, else the largest."""
    return next(iter(kept)) if len(kept) >= MAX_KEPT else max(kept, key=lambda key: kept[key].size)
