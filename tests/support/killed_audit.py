"""Kill an audit with SIGKILL after its first attack, let it go on, and run it undisturbed.

It forks, so that a run costs no imports, and every run has imported the same: call it by `support.scripts.script`.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from support.brief import few_candidates
from support.killed import finish
from typer.testing import CliRunner

from eval import cli

PRELOADED = ("torch._dynamo", "torchvision", "matplotlib.backends.backend_svg", "eval.report.writer")
"""What an audit imports on its way and takes most of the time for."""


def audit(folder: Path, name: str, words: tuple[str, ...]) -> int:
    """Start `hyperleak audit WORDS` in a process of its own, into `folder/name`."""
    number = os.fork()
    if number == 0:
        torch.set_num_threads(1)
        os.chdir(folder)
        os.fsync = lambda _: None  # a killed process loses nothing that it has written
        with few_candidates():
            os._exit(CliRunner().invoke(cli.app, ["audit", *words, "--out", name]).exit_code)
    return number


def finished(folder: Path) -> dict[str, int]:
    """The cells that are done and when each was written."""
    done = [path for path in folder.iterdir() if path.suffix == ""] if folder.is_dir() else []
    return {path.name: (path / "cell.json").stat().st_mtime_ns for path in done}


def main(folder: Path, *words: str) -> dict[str, Any]:
    for name in PRELOADED:
        importlib.import_module(name)
    cells, running, until = folder / "killed" / "cells", audit(folder, "killed", words), time.monotonic() + 90
    while not finished(cells) and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(running, signal.SIGKILL)
    finish(running)
    before = finished(cells)
    codes = [finish(audit(folder, name, words)) for name in ("killed", "whole")]
    kept = before.items() & finished(cells).items()
    return {"codes": codes, "finished": len(before), "kept": len(kept)}
