"""Files and folders that are there whole or not at all, and that are never written through a link.

What is being written has a random name in the folder of its place, is made by whoever writes it alone and held by a
lock as long as they live: what a dead process left is known by that lock being free, and goes away.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MAX_NAME_PREFIX = 40
"""Characters of a place's name that the name of what will take it begins with."""
TEMPORARY_NAME = re.compile(r"\.(.*)\.[0-9a-f]{16}\.part")


def before_disk_change(kind: str, path: Path) -> None:
    """Asked before everything that changes the disk or takes much memory; does nothing, unless a test has it fail.

    Args:
        kind: "open", "write", "fsync", "rename", "mkdir", "remove" or "allocate".
        path: of what.
    """


@contextmanager
def atomic_write(path: Path, *, into_new_folder: bool = False) -> Iterator[BinaryIO]:
    """An open file whose content takes the place of `path`, in one step, when the block ends without an error.

    Args:
        path: of the file; its folder must exist. A file that is there stays as it is until then; a link is replaced,
            and what it leads to left alone.
        into_new_folder: nobody else has written to the folder, so that there is nothing that a dead process has left:
            to look for that takes as long as there are files, which of thousands in turn comes to minutes.
    """
    if not into_new_folder:
        remove_leftovers(path.parent, path.name)
    raw = _create_locked_file(path)
    part = Path(raw.name)
    try:
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            before_disk_change("fsync", path)
            with _named(path):
                os.fsync(raw.fileno())
            before_disk_change("rename", path)
            part.replace(path)  # while it is held
    finally:
        part.unlink(missing_ok=True)
    fsync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `path`, with all that is in it, when the block ends without an error.

    Raises:
        ValueError: `path` is a link.
    """
    refuse_link(path)
    with scratch_folder(path) as new:
        yield new
        for name in os.listdir(new):
            fsync_file(new / name)
        fsync_folder(new)
        replace_path(new, path)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` that is gone when the block ends, however it ends."""
    remove_leftovers(path.parent, path.name)
    new, descriptor = _create_locked_folder(path)
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        os.close(descriptor)


def replace_path(new: Path, path: Path) -> None:
    """Put a file or folder in the place of another; where that fails the old one stays."""
    old = _temporary_path(path)
    if path.is_dir() and not path.is_symlink():
        before_disk_change("rename", path)
        path.replace(old)
    try:
        before_disk_change("rename", new)
        new.replace(path)
    except BaseException:
        if old.exists():
            old.replace(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    fsync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where it is not there."""
    if not folder.is_dir():
        before_disk_change("mkdir", folder)
        folder.mkdir(parents=True, exist_ok=True)


def remove_path(path: Path) -> None:
    """Take away a file or folder that may be there; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        before_disk_change("remove", path)
        shutil.rmtree(path)
    elif os.path.lexists(path):
        before_disk_change("remove", path)
        path.unlink()


def refuse_link(path: Path) -> None:
    """Refuse to write through a link, which somebody else may have put into a folder.

    Raises:
        ValueError: `path` is one.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and what is written there would be elsewhere; remove it")


def fsync_file(path: Path) -> None:
    """Make a file's content last."""
    before_disk_change("fsync", path)
    with path.open("rb") as file, _named(path):
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make renamings in a folder last."""
    before_disk_change("fsync", folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with _named(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Take away what processes that are dead were about to put into a folder.

    Args:
        folder: which.
        name: only what was to take the place of this; None takes away all.
    """
    for entry in os.scandir(folder):
        found = TEMPORARY_NAME.fullmatch(entry.name)
        if found is None or entry.is_symlink() or (name is not None and found[1] != name[:MAX_NAME_PREFIX]):
            continue
        with suppress(OSError):  # of others, or gone by now
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
            finally:
                os.close(descriptor)


class _CheckedFile(io.FileIO):
    """A new file, every write to which can be made to fail, and says in whose place it is if it does."""

    def __init__(self, temporary: Path, path: Path) -> None:
        super().__init__(str(temporary), "xb", opener=_opener)
        self.path = path

    def write(self, content: object) -> int:
        before_disk_change("write", Path(str(self.name)))
        with _named(self.path):
            return super().write(content)  # type: ignore[arg-type]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an error of the system name its file, as errors of open files do not (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def _create_locked_file(path: Path) -> _CheckedFile:
    """Return a new file beside `path`, held."""
    while True:
        before_disk_change("open", path)
        raw = _CheckedFile(_temporary_path(path), path)
        if _lock(raw.fileno()):
            return raw
        raw.close()


def _create_locked_folder(path: Path) -> tuple[Path, int]:
    """Return a new folder beside `path`, held."""
    while True:
        before_disk_change("mkdir", path)
        new = _temporary_path(path)
        new.mkdir()
        descriptor = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if _lock(descriptor):
            return new, descriptor
        os.close(descriptor)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name[:MAX_NAME_PREFIX]}.{secrets.token_hex(8)}.part")


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _lock(descriptor: int) -> bool:
    """Return whether what was just made is this process's, and not taken for a dead one's before it was locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where no one can take it for abandoned either
        return True
    return os.fstat(descriptor).st_nlink > 0
