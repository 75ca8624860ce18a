"""Attacks that tell where and with what they are run; importable by worker processes."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from attacks.base import Attack, Reconstruction, Result
from eval.run.run_directory import RunDir
from fl.view import ServerView

TOLD = "told"
"""Name of what it says: process, threads, views together, seed."""


def leaving() -> None:
    """Have this process say when it ends in order."""
    atexit.register(sys.stderr.write, "left")


def locking(folder: Path) -> None:
    """Take the lock of a run's directory and give it back."""
    with RunDir(folder).locked():
        pass


@dataclass(frozen=True, kw_only=True)
class Telling(Attack):
    """After a while says in which process it is, of how many threads, and with how many views.

    Attributes:
        home: the process that asks.
        seconds: how long it takes, in that process and in others.
        at_home, abroad: what it does there: "tell", "raise" or "die".
    """

    name: ClassVar[str] = "telling"
    home: int
    seconds: tuple[float, float] = (0.0, 0.0)
    at_home: str = "tell"
    abroad: str = "tell"
    together: int = 1

    def view_batches(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        return [range(i, min(i + self.together, len(views))) for i in range(0, len(views), self.together)]

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        here = os.getpid() == self.home
        time.sleep(self.seconds[0 if here else 1])
        action = self.at_home if here else self.abroad
        if action == "die":
            os._exit(1)
        if action == "raise":
            raise ValueError("no good")
        told = [os.getpid(), torch.get_num_threads(), len(views)]
        return [Reconstruction(inputs=None, private={TOLD: torch.tensor([*told, seed])}) for seed in seeds]
