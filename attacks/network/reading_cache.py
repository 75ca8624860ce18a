"""Keeps what has been read off a network while one attack runs, which asks for the same many times.

An attack and the confirmation of its result trace the network of a view, and read its layers, a dozen times, most often
of views that differ in what was sent back alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from fl.view import ServerView

T = TypeVar("T")
MAX_KEPT = 12
"""Readings that are kept at once."""
MAX_NUMBERS = 2**28
"""Numbers that they may hold together: a recorded network of two hundred million is made anew each time."""


@dataclass(frozen=True)
class _Kept:
    """A reading.

    Attributes:
        network: what it was read off; as long as that is kept, no other object has its identity.
        found: the reading.
        size: numbers that it holds.
    """

    network: tuple[Any, ...]
    found: Any
    size: int


_KEPT: ContextVar[dict[Hashable, _Kept] | None] = ContextVar("kept", default=None)


@contextmanager
def readings_cached() -> Iterator[None]:
    """Keep readings while the block runs, in this thread."""
    token = _KEPT.set({}) if _KEPT.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _KEPT.reset(token)


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


def _first_to_go(kept: Mapping[Hashable, _Kept]) -> Hashable:
    """Return the reading that gives way: the oldest where there are too many, else the largest."""
    return next(iter(kept)) if len(kept) >= MAX_KEPT else max(kept, key=lambda key: kept[key].size)
