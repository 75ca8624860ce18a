"""The folder of a run: finished cells, those being computed, checkpoints, and who may write.

```
DIR/cells/ID/             a finished cell: cell.json (settings, seconds, code) and its rows, written once; one whose
                          cell.json can't be read counts as unfinished
DIR/cells/ID.part/        one that is not: what there is so far, and traceback.txt if it failed
DIR/checkpoints/ID/       of a training: round-00010.npz, as long as some unfinished cell needs it
DIR/run.json, log.txt     what the run is and how far it is
```
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eval import store
from eval.cells import Cell, code
from fl.files import PART, force, make, refuse_link, remove, swap, sweep, sync
from fl.guard import leave_if_unguarded
from fl.paths import inside, regular

RUN, ROWS, LOG, CELL, TRACEBACK, LOCK = "run.json", "images.jsonl", "log.txt", "cell.json", "traceback.txt", ".lock"
FOLDERS, NESTED = ("cells", "checkpoints", "images", "partitions", "report"), ("cells", "checkpoints")
"""Folders of a run, and those of them that hold a folder for every cell."""
FOUND = "found"
"""In the folder of an attack that is not finished: what it has found so far."""
OLDER = {"config.yaml", "images.jsonl"}
"""What a result folder held before there were run directories."""
log = logging.getLogger(__name__)
PACKAGES = ("fl", "defenses", "attacks", "eval")
_ROUND = re.compile(r"round-(\d+)\.npz")


class BusyError(ValueError):
    """Another process is writing to the folder."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder that is there; given up when the process ends, however.

    The lock is the process's: who holds a folder twice gives it up with the first end.

    Raises:
        BusyError: another process has it.
    """
    with (path / LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock not inherited by worker processes
        except OSError as error:
            raise BusyError(f"{path} is in use by another process; wait for it or choose another --out") from error
        yield


class Checkpoints:
    """The stored states of one training, by round.

    Args:
        folder: where they lie; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        """The file of the state after `number` rounds."""
        make(self.folder)
        return self.folder / f"round-{number:05d}.npz"

    def rounds(self) -> list[int]:
        """Of which rounds there are states, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self.folder.iterdir() if (found := _ROUND.fullmatch(path.name)))

    def keep(self, wanted: Collection[int]) -> None:
        """Remove all but those of the rounds `wanted`."""
        for number in self.rounds():
            if number not in wanted:
                remove(self.path(number))
        if not wanted and self.folder.is_dir():
            remove(self.folder)
            with suppress(OSError):  # others may have some
                self.folder.parent.rmdir()


def _again(command: object) -> str:
    """The command of a run for whoever wants to go on with it: ours, and nothing that a shell would read more into."""
    words = str(command)
    try:
        ours = words.startswith("hyperleak ") and shlex.join(shlex.split(words)) == words
    except ValueError:  # quotes that don't end
        ours = False
    return f"`{words}`" if ours else "the command that began it"


class RunDir:
    """A run's folder.

    Args:
        path: of the folder; made by `locked`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells = path / "cells"
        self._damaged: set[str] = set()

    def check(self) -> None:
        """Whether the folder may be written: new, empty, or a run's.

        Raises:
            ValueError: there is something else.
        """
        if not self.path.exists() and not self.path.is_symlink():
            return
        if not self.path.is_dir():
            raise ValueError(f"expected a folder for results, got the file {self.path}; choose another --out")
        for name in (LOCK, LOG):
            if os.path.lexists(path := self.path / name) and (path.is_symlink() or not path.is_file()):
                raise ValueError(f"expected {path} as a file, got a link or a pipe; remove it, or choose another --out")
        self._refuse_links()
        entries = {entry.name for entry in self.path.iterdir() if not PART.fullmatch(entry.name)} - {LOCK, LOG}
        if entries and RUN not in entries and not entries >= OLDER:
            raise ValueError(f"{self.path} holds something other than results of hyperleak; choose another --out")

    def _refuse_links(self) -> None:
        """Nothing is computed or written where a link leads elsewhere."""
        for name in FOLDERS:
            refuse_link(self.path / name)
            if name in NESTED and (self.path / name).is_dir():
                for entry in (self.path / name).iterdir():
                    refuse_link(entry)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other processes from writing to it; given up when the process ends, however.

        Raises:
            BusyError: another process has it.
            ValueError: as `check`.
        """
        leave_if_unguarded()
        self.check()
        make(self.path)
        with held(self.path):
            self._sweep()
            yield

    def _sweep(self) -> None:
        """Take away what a process that was killed was about to write."""
        within = [self.path, *(self.path / name for name in FOLDERS)]
        within += [entry for name in NESTED if (self.path / name).is_dir() for entry in (self.path / name).iterdir()]
        for folder in [*within, *(entry / FOUND for entry in within)]:
            if folder.is_dir():
                sweep(folder)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Append what this package logs to the folder's log, and nowhere else: a dependency may log all to stderr."""
        handler = logging.FileHandler(self.path / LOG, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        loggers = [logging.getLogger(name) for name in PACKAGES]
        before = [(logger.level, logger.propagate) for logger in loggers]
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        try:
            yield
        finally:
            for logger, (level, propagate) in zip(loggers, before, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)
                logger.propagate = propagate
            handler.close()

    def finished(self, cell: Cell) -> bool:
        """Whether the cell is finished, and what is known of it can be read."""
        if not (self.cells / cell.id / CELL).is_file():
            return False
        try:
            self.about(cell)
        except (OSError, ValueError) as error:
            if cell.id not in self._damaged:
                log.warning("cells/%s/%s can't be read, so the cell is computed again: %s", cell.id, CELL, error)
                self._damaged.add(cell.id)
            return False
        return True

    def about(self, cell: Cell) -> dict[str, Any]:
        """What is known of a finished cell: settings, seconds, and the code that computed it.

        Raises:
            OSError, ValueError: it can't be read.
        """
        found = store.parse(regular(self.cells / cell.id / CELL).read_bytes())
        if not isinstance(found, dict) or not {"code", "seconds"} <= set(found):
            raise ValueError("expected settings, code and seconds")
        return found

    def about_run(self) -> dict[str, Any]:
        """What `run.json` says; nothing where there is none, or none that can be read."""
        try:
            found = store.parse(regular(inside(self.path, RUN)).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def unfinished(self) -> str | None:
        """Why a run has left nothing to report, and what to do; None where it has, or where there is no run."""
        rows, about = self.path / ROWS, self.about_run()
        if not about or (rows.is_file() and rows.stat().st_size):
            return None
        cells = [cell for cell in about.get("cells", []) if isinstance(cell, dict)]
        failed = [cell for cell in cells if cell.get("status") == "failed"]
        done = sum(cell.get("status") == "finished" for cell in cells)
        why = f"{done} of its {len(cells)} cells are finished, {len(failed)} failed"
        if failed:
            why += f", the first for {failed[0].get('reason')} ({failed[0].get('traceback')})"
        return f"{self.path} holds nothing to report yet: {why}; {_again(about.get('command'))} goes on with it"

    def file(self, cell: Cell, name: str) -> Path:
        """A file of a finished cell."""
        return self.cells / cell.id / name

    def part(self, cell: Cell) -> Path:
        """The folder in which a cell is computed."""
        folder = self.cells / f"{cell.id}.part"
        make(folder)
        return folder

    def finish(self, cell: Cell, seconds: float) -> None:
        """Make the cell's folder the finished one, at once."""
        folder = self.part(cell)
        remove(folder / TRACEBACK)
        about = {"settings": cell.settings, "code": code(), "seconds": round(seconds, 3)}
        store.write_text(folder / CELL, json.dumps(about, indent=2) + "\n")
        remove(folder / FOUND)
        for path in folder.iterdir():
            force(path)
        sync(folder)
        swap(folder, self.cells / cell.id)  # in the place of a damaged one, if there is one

    def fail(self, cell: Cell, text: str) -> Path:
        """Keep the traceback of a cell that failed; returns the file."""
        path = self.part(cell) / TRACEBACK
        store.write_text(path, text)
        return path

    def failure(self, cell: Cell) -> str | None:
        """The last line of an unfinished cell's traceback, or None."""
        path = self.cells / f"{cell.id}.part" / TRACEBACK
        return path.read_text(encoding="utf-8").strip().splitlines()[-1] if path.is_file() else None

    def checkpoints(self, cell: Cell) -> Checkpoints:
        """Of a training cell."""
        return Checkpoints(self.path / "checkpoints" / cell.id)
