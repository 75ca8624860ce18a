"""Keeps what has been read off a network while one attack runs, which asks for the same many times.

An attack and the confirmation of its result trace the network of a view, and read its layers, a dozen times, most often
of views that differ in what was sent back alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from fl.view import ServerView

T = TypeVar("T")
MAX_KEPT = 12
"""Readings that are kept at once; the oldest gives way."""
MAX_NUMBERS = 2**20
"""Numbers that a reading may hold: of a larger network it is made anew, as it takes little of what an attack takes."""

_KEPT: ContextVar[dict[Hashable, tuple[tuple[Any, ...], Any]] | None] = ContextVar("kept", default=None)


@contextmanager
def readings_kept() -> Iterator[None]:
    """Keep readings while the block runs, in this thread."""
    token = _KEPT.set({}) if _KEPT.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _KEPT.reset(token)


def kept_reading(view: ServerView, what: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
    """Return what `make` reads off the network of `view`, or read off it before; it is not to be changed.

    Args:
        view: the server's. Networks are the same where client, parameters and buffers are the same objects.
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
        if size(found) > MAX_NUMBERS:
            return found
        while len(kept) >= MAX_KEPT:
            del kept[next(iter(kept))]
        kept[key] = network, found  # as long as they are kept no other object has their identity
    result: T = kept[key][1]
    return result
