"""The folder of a run: finished cells, those being computed, checkpoints, and who may write.

```
DIR/cells/ID/             a finished cell: cell.json (settings, seconds, code, its files' digests) and its rows, written
                          once; one that is not as its cell.json says counts as unfinished
DIR/cells/ID.part/        one that is not: what there is so far, and traceback.txt if it failed
                          (what an attack that was cut short had found is a cell of its own, by another ID)
DIR/checkpoints/ID/       of a training: round-00010.npz, as long as some unfinished cell needs it
DIR/run.json, log.txt     what the run is and how far it is
DIR/shared/               while several processes compute its cells: who they are, and who has claimed what
```
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.io import file_digests, jsonl
from eval.run.cache_keys import Cell, cut_short, short_hash, source_digest
from eval.run.members import CALLER, MEMBERS, SHARED, Member, Members, MemberState
from fl.runtime.atomic_files import (
    TEMPORARY_NAME,
    fsync_file,
    fsync_folder,
    make_folder,
    refuse_link,
    remove_leftovers,
    remove_path,
    replace_path,
)
from fl.runtime.main_guard import leave_if_unguarded
from fl.runtime.safe_paths import join_inside

RUN, ROWS, LOG, CELL, TRACEBACK, LOCK = "run.json", "images.jsonl", "log.txt", "cell.json", "traceback.txt", ".lock"
FOLDERS, NESTED = ("cells", "checkpoints", "images", "partitions", "report", SHARED), ("cells", "checkpoints")
"""Folders of a run, and those of them that hold a folder for every cell."""
ROUNDS, FILES, SPARED = "rounds.jsonl", "files", ("pictures.npz",)
"""The rows of a training; in `cell.json`, the digests of a cell's files; what an archive of cells may leave out."""
CHECKPOINT = "found"
"""Folder of an unfinished attack with what it has found so far."""
FORMER_FILES = {"config.yaml", "images.jsonl"}
"""What a result folder held before there were run directories."""
log = logging.getLogger(__name__)
PACKAGES = ("fl", "defenses", "attacks", "eval")
_ROUND = re.compile(r"round-(\d+)\.npz")
_CELL_FOLDER = re.compile(r"[0-9a-f]{12}(\.part)?")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of a file system that has no locks."""
SHARED_LOCK_SECONDS = 10.0
"""Seconds to wait for those that share a folder to clear up behind themselves."""


class BusyError(ValueError):
    """Another process is writing to the folder."""


class LostLockError(ValueError):
    """The lock of the folder that is written to is gone, so that another process may be writing there, too."""


@dataclass(frozen=True)
class Lock:
    """The lock of a folder.

    Attributes:
        path: of the lock's file.
        descriptor: of the same, open.
    """

    path: Path
    descriptor: int

    def check(self) -> None:
        """Check that the lock still keeps others out.

        Raises:
            LostLockError: its file was removed, or another is in its place.
        """
        try:
            there = os.stat(self.path, follow_symlinks=False).st_ino
        except OSError:
            there = None
        if there != os.fstat(self.descriptor).st_ino:
            raise LostLockError(
                f"{self.path} was removed or replaced while this run was writing there, so that another process may be "
                "writing, too; nothing more is written. The same command goes on when no other is at work"
            )


@contextmanager
def hold_lock(path: Path) -> Iterator[Lock]:
    """Keep other processes from writing to a folder that is there; given up when the process ends, however.

    The lock is the process's: who holds a folder twice gives it up with the first end.

    Raises:
        BusyError: another process has it.
    """
    with open(path / LOCK, "a", opener=_open_nofollow) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock not inherited by worker processes
        except OSError as error:
            raise BusyError(f"{path} is in use by {_users(path)}; wait for it or choose another --out") from error
        if others := [one for one in Members(path).states() if one.is_alive]:  # where locks don't reach that machine
            raise BusyError(f"{path} is in use by {_described(others)}; wait for it or choose another --out")
        yield Lock(path / LOCK, file.fileno())


@contextmanager
def share_lock(path: Path) -> Iterator[Lock]:
    """Keep processes from a folder that want it for themselves, but not others that share it.

    Raises:
        BusyError: a process has it for itself.
    """
    with open(path / LOCK, "a+", opener=_open_nofollow) as file:
        waited = time.monotonic() + SHARED_LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    break
                if time.monotonic() > waited:
                    raise BusyError(
                        f"{path} is in use by a process that does not share it (a run without --executor); "
                        "wait for it or choose another --out"
                    ) from error
                time.sleep(SHARED_LOCK_SECONDS / 100)
        yield Lock(path / LOCK, file.fileno())


def is_locked(path: Path) -> bool:
    """Return whether some process of this machine, or of those that its locks reach, has the folder or shares it."""
    try:
        file = open(path / LOCK, "r+", opener=_open_nofollow)  # noqa: SIM115 (closed below)
    except OSError:  # never held, or of somebody else
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _NO_LOCKS
    return False


def _users(path: Path) -> str:
    return _described([one for one in Members(path).states() if one.is_alive]) or "another process"


def _described(members: Collection[MemberState]) -> str:
    """Return in words who shares a folder; nothing where nobody does."""
    if not members:
        return ""
    first = next(iter(members))
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return f"a run with --executor ({first.kind} on {first.place}{more}), which another with --executor could join"


def _open_nofollow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def log_to(handler: logging.Handler) -> Iterator[None]:
    """Give a handler what these packages log, and nobody else; close it at the end."""
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


class Checkpoints:
    """The stored states of one training, by round.

    Args:
        folder: where they lie; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        """Return the file of the state after `number` rounds."""
        make_folder(self.folder)
        return self.folder / f"round-{number:05d}.npz"

    def rounds(self) -> list[int]:
        """Return the rounds that have a saved state, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self.folder.iterdir() if (found := _ROUND.fullmatch(path.name)))

    def keep(self, wanted: Collection[int]) -> None:
        """Remove all states but those of the rounds `wanted`."""
        for number in self.rounds():
            if number not in wanted:
                remove_path(self.path(number))
        if not wanted and self.folder.is_dir():
            remove_path(self.folder)
            with suppress(OSError):  # others may have some
                self.folder.parent.rmdir()


def _again(command: object) -> str:
    """Return the command that goes on with a run: ours, and nothing that a shell would read more into."""
    words = str(command)
    try:
        ours = words.startswith("hyperleak ") and shlex.join(shlex.split(words)) == words
    except ValueError:  # quotes that don't end
        ours = False
    return f"`{words}`" if ours else "the command that began it"


def default_folder(config: Path) -> Path:
    """Return the folder of a run: `results/NAME`; for the config of a run its own folder, which then goes on.

    Args:
        config: the file that the run is described in.
    """
    return config.parent if (config.parent / RUN).is_file() else Path("results") / config.stem


def about_cell(folder: Path) -> dict[str, Any]:
    """Return what the `cell.json` in a finished cell's folder says.

    Raises:
        OSError, ValueError: it can't be read, or has changed since it was written.
    """
    found = jsonl.read_json(folder / CELL)
    if not isinstance(found, dict) or not {"code", "seconds"} <= set(found):
        raise ValueError("expected settings, code and seconds")
    file_digests.check_digest(found)
    return found


def check_cell(folder: Path, name: str) -> bool:
    """Check a finished cell against what it states of itself; return whether it states anything, as older ones don't.

    Args:
        folder: of the cell.
        name: that it should have: the hash of its settings.

    Raises:
        OSError, ValueError: it is damaged, or another cell; says which file.
    """
    about = about_cell(folder)
    settings = about.get("settings")
    if not isinstance(settings, dict) or short_hash(settings) != name:
        raise ValueError("its settings are those of another cell")
    if FILES in about:
        for file, wrong in file_digests.changed_files(folder, about[FILES]):
            if file not in SPARED or (folder / file).exists():
                raise ValueError(f"{file} {wrong}")
    _check_rows(folder, settings)
    return FILES in about


def _check_rows(folder: Path, settings: dict[str, Any]) -> None:
    """Check that a cell has the rows it must have, whoever wrote it."""
    if settings.get("kind") == "training":
        path, least = folder / ROUNDS, int(settings["federation"]["rounds"]) + 1
    else:
        path, least = folder / ROWS, 1
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    rows = jsonl.read_rows(path)
    if len(rows) < least:
        raise ValueError(f"{path.name} has {len(rows)} rows, not {least}{' or more' if path.name == ROWS else ''}")
    if path.name == ROUNDS and [row.get("round") for row in rows] != list(range(len(rows))):
        raise ValueError(f"{path.name} does not have the rounds in their order, each once")


def _damage(folder: Path, name: str) -> str:
    """Return what is wrong with a finished cell, in words for the log, or nothing."""
    try:
        about_cell(folder)
    except (OSError, ValueError) as error:
        return f"/{CELL} can't be read, so the cell is computed again: {error}"
    try:
        check_cell(folder, name)
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f" is damaged, so the cell is computed again: {error}"
    return ""


def _mark(folder: Path) -> tuple[Any, ...]:
    """Return what changes with the files of a folder."""
    found = ((entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder))
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found))


class RunDir:
    """A run's folder.

    Args:
        path: of the folder; made by `locked`.

    Attributes:
        claim_check: where several processes compute cells, raises if a cell is not this one's; None with only one.
        member: what this process is among those that share the folder; None while it shares nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells = path / "cells"
        self.claim_check: Callable[[Cell], None] | None = None
        self.member: Member | None = None
        self._looked: dict[str, tuple[Any, str]] = {}
        self._lock: Lock | None = None

    def check(self) -> None:
        """Check that the folder may be written: new, empty, or a run's.

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
        entries = {entry.name for entry in self.path.iterdir() if not TEMPORARY_NAME.fullmatch(entry.name)} - {
            LOCK,
            LOG,
        }
        if (self.path / SHARED / MEMBERS).is_dir():  # others are about to write the first of it
            entries -= {SHARED}
        if entries and RUN not in entries and not entries >= FORMER_FILES and not self._is_left_over(entries):
            raise ValueError(f"{self.path} holds something other than results of hyperleak; choose another --out")

    def _is_left_over(self, entries: Collection[str]) -> bool:
        """Return whether all that is there are cells, as where the folder was removed while a run wrote to it."""
        folders = [one.name for name in set(NESTED) & {*entries} for one in (self.path / name).iterdir()]
        return {*entries} <= {*NESTED} and bool(folders) and all(map(_CELL_FOLDER.fullmatch, folders))

    def _refuse_links(self) -> None:
        """Refuse a folder in which a link leads elsewhere, or a file is where a folder belongs."""
        for name in FOLDERS:
            refuse_link(self.path / name)
            if (self.path / name).exists() and not (self.path / name).is_dir():
                raise ValueError(
                    f"expected {self.path / name} as a folder, got a file; remove it, or choose another --out"
                )
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
        make_folder(self.path)
        with hold_lock(self.path) as self._lock:
            remove_path(self.path / SHARED)  # of processes that are dead
            self._sweep()
            try:
                yield
            finally:
                self._lock = None

    @contextmanager
    def shared(self, kind: str = CALLER, name: str = "", about: Mapping[str, Any] | None = None) -> Iterator[Member]:
        """Make the folder and keep it from processes that want it for themselves; others may share it.

        Who is the last to leave clears up behind all.

        Args:
            kind: of member that this process is there.
            name: of the member.
            about: what else others may know of it.

        Raises:
            BusyError: a process has it for itself.
            ValueError: as `check`.
        """
        self.check()
        make_folder(self.path)
        with share_lock(self.path) as lock:
            self._lock = lock
            self.member = Member(Members(self.path), kind, name or f"{kind}-{os.getpid()}", about)
            try:
                yield self.member
            finally:
                self.member.leave()
                self._lock = self.member = None
                self._clear_shared(lock)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Keep others that share the folder from writing the files for readers at the same time."""
        if not (self.path / SHARED).is_dir():
            yield
            return
        with open(self.path / SHARED / "publishing", "a", opener=_open_nofollow) as file:
            with suppress(OSError):  # no locks there
                fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def _clear_shared(self, lock: Lock) -> None:
        """Remove what those that share the folder left for each other, if nobody is there any more."""
        with suppress(OSError):
            fcntl.lockf(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # those who come now wait a little
            if not any(one.is_alive for one in Members(self.path).states()):
                remove_path(self.path / SHARED)
                self._sweep()

    def check_writable(self, cell: Cell) -> None:
        """Check that this process is still the one to write what belongs to a cell.

        Raises:
            LostLockError: it is not.
        """
        if self._lock is not None:
            self._lock.check()
        if self.claim_check is not None:
            self.claim_check(cell)

    def _sweep(self) -> None:
        """Take away what a process that was killed was about to write."""
        within = [self.path, *(self.path / name for name in FOLDERS)]
        within += [entry for name in NESTED if (self.path / name).is_dir() for entry in (self.path / name).iterdir()]
        for folder in [*within, *(entry / CHECKPOINT for entry in within)]:
            if folder.is_dir():
                remove_leftovers(folder)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Append what this package logs to the folder's log, and nowhere else: a dependency may log all to stderr."""
        handler = logging.FileHandler(self.path / LOG, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        with log_to(handler):
            yield

    def finished(self, cell: Cell) -> bool:
        """Return whether the cell is finished and its files as they were then; looks again where they have changed."""
        folder = self.cells / cell.id
        if not (folder / CELL).is_file():
            return False
        mark = _mark(folder)
        if cell.id not in self._looked or self._looked[cell.id][0] != mark:
            damage = _damage(folder, cell.id)
            self._looked[cell.id] = mark, damage
            if damage:
                log.warning("cells/%s%s", cell.id, damage)
        return not self._looked[cell.id][1]

    def latest(self, cell: Cell) -> Cell | None:
        """Return the cell if it is finished, else that of what was found when it was cut short; or None."""
        return next((one for one in (cell, cut_short(cell)) if self.finished(one)), None)

    def about(self, cell: Cell) -> dict[str, Any]:
        """Return what is known of a finished cell: settings, seconds, the code that computed it, its files' digests.

        Raises:
            OSError, ValueError: it can't be read.
        """
        return about_cell(self.cells / cell.id)

    def damaged_files(self, cell: Cell) -> list[str]:
        """Return the files of a finished cell that are not there, though it is whole without them."""
        files = self.about(cell).get(FILES, {})
        return [name for name in SPARED if name in files and not self.file(cell, name).is_file()]

    def about_run(self) -> dict[str, Any]:
        """Return what `run.json` says; nothing where there is none, or none that can be read."""
        try:
            found = jsonl.read_json(join_inside(self.path, RUN))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def unfinished(self) -> str | None:
        """Return why a run has left nothing to report, and what to do; None where it has, or where there is no run."""
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
        """Return a file of a finished cell."""
        return self.cells / cell.id / name

    def part(self, cell: Cell) -> Path:
        """Return the folder in which a cell is computed."""
        folder = self.part_path(cell)
        make_folder(folder)
        return folder

    def part_path(self, cell: Cell) -> Path:
        """Return where a cell is computed, whether there is anything or not."""
        return self.cells / f"{cell.id}.part"

    def finish(self, cell: Cell, seconds: float, whole: Cell | None = None) -> None:
        """Make the cell's folder the finished one, at once.

        Args:
            cell: whose folder.
            seconds: that it took.
            whole: the cell that was to be computed, where this one is what was found of it.
        """
        folder = self.part(cell)
        remove_path(folder / TRACEBACK)
        remove_path(folder / CHECKPOINT)
        remove_path(folder / CELL)
        remove_leftovers(folder)
        files = {path.name: file_digests.file_digest(path) for path in sorted(folder.iterdir())}
        about = {"settings": cell.settings, "code": source_digest(), "seconds": round(seconds, 3), FILES: files}
        jsonl.write_text(folder / CELL, json.dumps(file_digests.with_digest(about), indent=2) + "\n")
        for path in folder.iterdir():
            fsync_file(path)
        self.check_writable(whole or cell)
        fsync_folder(folder)
        replace_path(folder, self.cells / cell.id)  # in the place of a damaged one, if there is one

    def finish_cut_short(self, cell: Cell, seconds: float) -> None:
        """Put what an attack has found so far into a cell of its own; what of it is whole stays to go on from."""
        self.check_writable(cell)
        remove_path(self.cells / f"{cut_short(cell).id}.part")
        folder, aside = self.part(cell), self.part(cut_short(cell))
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.name != TRACEBACK:
                replace_path(path, aside / path.name)
        self.finish(cut_short(cell), seconds, whole=cell)

    def forget_cut_short(self, cell: Cell) -> None:
        """Remove what an attack had found when it was cut short, as the whole is there now."""
        remove_path(self.cells / cut_short(cell).id)

    def fail(self, cell: Cell, text: str) -> Path:
        """Keep the traceback of a cell that failed; returns the file."""
        path = self.part(cell) / TRACEBACK
        jsonl.write_text(path, text)
        return path

    def failure(self, cell: Cell) -> str | None:
        """Return the last line of an unfinished cell's traceback, or None."""
        path = self.part_path(cell) / TRACEBACK
        return path.read_text(encoding="utf-8").strip().splitlines()[-1] if path.is_file() else None

    def checkpoints(self, cell: Cell) -> Checkpoints:
        """Return the checkpoints of a training cell."""
        return Checkpoints(self.path / "checkpoints" / cell.id)
