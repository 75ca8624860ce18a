"""Runs modules without their gradient checkpoints, in the thread that asks for it alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import checkpoint

NAMES = ("_checkpoint_hook", "CheckpointFunction")
"""What torch's two kinds of checkpoints go by."""


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Keep what gradient checkpoints would drop and compute anew in the backward pass, which changes no number.

    A module that is called with weights of others has its own tensors again by then, and what it computed anew would be
    of those. Torch's functions are exchanged in the whole process, as long as any thread is in here: those in their
    place do as torch's own in all other threads.
    """
    with _LOCK:
        if not _STATE.calls:
            _STATE.own = {name: getattr(checkpoint, name) for name in NAMES}
            checkpoint._checkpoint_hook = _hook  # type: ignore[misc, assignment]
            checkpoint.CheckpointFunction = _KeptFunction()  # type: ignore[misc, assignment]
        _STATE.calls += 1
    _INSIDE.depth = getattr(_INSIDE, "depth", 0) + 1
    try:
        yield
    finally:
        _INSIDE.depth -= 1
        with _LOCK:
            _STATE.calls -= 1
            if not _STATE.calls:
                for name, value in _STATE.own.items():
                    setattr(checkpoint, name, value)


@dataclass
class _State:
    """What is exchanged, and for how many calls.

    Attributes:
        calls: of all threads, that are in there.
        own: torch's, by name; kept after the last call, as another thread may still be about to call what stood there.
    """

    calls: int = 0
    own: dict[str, Any] = field(default_factory=dict)


_STATE, _LOCK, _INSIDE = _State(), threading.Lock(), threading.local()


def _is_inside() -> bool:
    """Return whether this thread runs without checkpoints."""
    return bool(getattr(_INSIDE, "depth", 0))


def _hook(frame: Any) -> AbstractContextManager[Any]:
    """Stand for the checkpoint that is not reentrant."""
    hook: AbstractContextManager[Any] = nullcontext() if _is_inside() else _STATE.own["_checkpoint_hook"](frame)
    return hook


class _KeptFunction:
    """Stands for the reentrant checkpoint, which trains nothing where none of its inputs has a gradient."""

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Return what the function returns."""
        if _is_inside() and any(isinstance(value, Tensor) and value.requires_grad for value in args):
            return function(*args)
        return _STATE.own["CheckpointFunction"].apply(function, preserve, *args)
