"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """An open file whose content takes the place of `path`, in one step, when the block ends without an error.

    Args:
        path: of the file; its folder must exist. A file that is there stays as it is until then.
    """
    part = path.with_name(f".{path.name}.part")  # one name: what a dead process left is written over
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make renamings in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
