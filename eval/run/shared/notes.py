"""What workers note of cells that they have not finished, so that no other tries again in the same run.

```
DIR/shared/failed/ID       a cell that failed: what is to be said of it
DIR/shared/cut_short/ID    an attack that a time limit ended
DIR/shared/logs/NAME       what a worker has to log, a JSON object a line
```
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from eval.io import jsonl
from eval.run.members import SHARED
from eval.run.run_options import Failure
from fl.runtime.atomic_files import make_folder, remove_path

FAILED, CUT_SHORT, LOGS = "failed", "cut_short", "logs"


def note_failure(folder: Path, failure: Failure) -> None:
    """Note a cell that failed."""
    _note(folder, FAILED, failure.id, json.dumps(asdict(failure)))


def note_cut_short(folder: Path, cell: str) -> None:
    """Note an attack that was cut short."""
    _note(folder, CUT_SHORT, cell, "")


def failures(folder: Path) -> dict[str, Failure]:
    """Return the cells that failed, by id."""
    found = {}
    for path in _files(folder, FAILED):
        try:
            found[path.name] = Failure(**jsonl.read_json(path))
        except (OSError, ValueError, TypeError):  # being written
            continue
    return found


def ids_cut_short(folder: Path) -> set[str]:
    """Return the attacks that were cut short."""
    return {path.name for path in _files(folder, CUT_SHORT)}


def forget(folder: Path) -> None:
    """Remove what was noted in a run before."""
    for kind in (FAILED, CUT_SHORT):
        remove_path(folder / SHARED / kind)


class NoteHandler(logging.Handler):
    """Writes what a worker logs for its caller to repeat.

    Args:
        folder: of the run.
        name: of the worker.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(logging.INFO)
        make_folder(folder / SHARED / LOGS)
        self._path = folder / SHARED / LOGS / name
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        line = {"level": record.levelno, "name": record.name, "message": self.format(record)}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            self.handleError(record)


class LogReader:
    """Repeats what workers have logged, each line once.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, int] = {}

    def repeat(self, told_elsewhere: Collection[str] = ()) -> None:
        """Log what is new under the names that it was logged by, with the worker's.

        Args:
            told_elsewhere: parts of names of workers whose words another caller of the same run repeats.
        """
        for path in _files(self._folder, LOGS):
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path.name, 0))
                    text = file.read()
            except OSError:
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path.name] = self._read.get(path.name, 0) + len(whole)
            if not set(path.name.split("-")).isdisjoint(told_elsewhere):
                continue
            for line in whole.splitlines():
                self._log(path.name, line)

    @staticmethod
    def _log(worker: str, line: bytes) -> None:
        try:
            said = jsonl.parse(line)
            logging.getLogger(str(said["name"])).log(int(said["level"]), "%s: %s", worker, said["message"])
        except (ValueError, LookupError, TypeError):
            return


def _note(folder: Path, kind: str, name: str, text: str) -> None:
    make_folder(folder / SHARED / kind)
    jsonl.write_text(folder / SHARED / kind / name, text)


def _files(folder: Path, kind: str) -> list[Path]:
    place = folder / SHARED / kind
    return sorted(path for path in place.iterdir() if path.name[0] != ".") if place.is_dir() else []
