"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what shall stand at `path`; it is moved there, in one step, when the block ends without an error.

    Args:
        path: of the file; its folder must exist. A file that is there stays as it is until then.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-", ignore_cleanup_errors=True) as folder:
        part = Path(folder) / path.name
        yield part
        with part.open("r+b") as written:
            os.fsync(written.fileno())
        part.replace(path)
