"""Work of files beside this one that forks: in a process of its own, so that what it forks has no threads."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def script(name: str, folder: Path, *words: str) -> Any:
    """Return what `main(folder, *words)` of the module `support.NAME` returns, in another process.

    It is forked of the one that has imported the packages, if tests start their workers so (`support.forkserver`).
    """
    here, there = multiprocessing.Pipe(duplex=False)
    with here:
        process = multiprocessing.get_context("spawn").Process(target=_run, args=(there, name, folder, words))
        process.start()
        there.close()
        try:
            error, found = here.recv()
        except EOFError:
            error, found = "it died", None
        process.join()
    assert not error, error
    return found


def _run(there: Connection, name: str, folder: Path, words: tuple[str, ...]) -> None:
    sys.path.append(str(folder))
    try:
        there.send(("", importlib.import_module(f"support.{name}").main(folder, *words)))
    except BaseException:
        there.send((traceback.format_exc(), None))
        raise
