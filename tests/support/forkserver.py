"""Worker processes that are forked of one that has imported the packages already, where users' import them anew.

`fl.runtime.workers` spawns them: each loads torch, two seconds of work that dozens of tests would pay for, and to
search its compiler, which is another. Forked of a server they are as clean: it runs no thread and no code of a test.
They get the environment that the server began with.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext
from typing import Any

import pytest

PRELOADED = ["torch", "torch._dynamo", "fl.engines.process", "attacks.parallel", "eval.run.runner", "support.spreading"]
_get_context: Any = multiprocessing.get_context


def use_forkserver(patch: pytest.MonkeyPatch) -> None:
    """Fork what is to be spawned."""

    def get_context(method: str | None = None) -> BaseContext:
        if method != "spawn":
            return _get_context(method)
        forkserver = _get_context("forkserver")
        forkserver.set_forkserver_preload(PRELOADED)
        return forkserver

    patch.setattr(multiprocessing, "get_context", get_context)


def use_spawn(patch: pytest.MonkeyPatch) -> None:
    """Spawn again, as users do."""
    patch.setattr(multiprocessing, "get_context", _get_context)
