"""Clients of unequal numbers of images, as most tests of single methods have them, and runs that are read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import worlds

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.simulation import checkpoint
from fl.types import Task

LOCAL: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
"""Local training with everything on, but for weight decay."""


def federation(
    method: Method, *, sizes: Sequence[int] = (3, 4, 5), test: int = 2, task: Task | None = None, **settings: Any
) -> Federation:
    """Clients of `sizes` training and `test` test images, all different; `settings` are the federation's."""
    data = [ClientData(worlds.images(n, "train", i), worlds.images(test, "test", i)) for i, n in enumerate(sizes)]
    return Federation(Client(task or worlds.task(), method), data, **settings)


def read_back(
    make: Callable[[], Federation],
    folder: Path,
    first: Sequence[int] | None = (0, 2),
    then: Sequence[Sequence[int] | None] = (None,),
) -> tuple[Federation, Federation]:
    """A run of two parts, and another made anew that was loaded between them; None is all clients.

    Args:
        make: the federation before its first round.
        folder: for the file.
        first: clients of the round before it was written.
        then: those of the rounds after.
    """
    whole, again = make(), make()
    whole.run_round(first)
    checkpoint.save(folder / "state.npz", whole)
    checkpoint.load(folder / "state.npz", again)
    for run in (whole, again):
        for clients in then:
            run.run_round(clients)
    return whole, again
