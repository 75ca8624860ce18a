"""Append-only result files: one JSON object per line, one line per image, never a line cut in half."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fl.runtime.atomic_files import atomic_write, make_folder
from fl.runtime.safe_paths import require_regular_file

LONGEST = 2**26
"""Bytes of a line; a longer one is cut, so that it is no JSON."""
LARGEST = 2**28
"""Bytes of a JSON file."""


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a JSON-lines file, all of them or none.

    Old and new lines go to a temporary file in the same folder, which then takes the place of the old one. Processes
    that append at the same time wait for each other.

    Args:
        path: of the file; it and its folder are created.
        rows: JSON-able mappings; may be a generator, and what it raises leaves the file as it was.

    Raises:
        ValueError: a row holds NaN or infinity (None and a reason belong there).
        TypeError: a row holds something JSON cannot express.
    """
    path, lines = Path(path), list(_lines(rows))
    make_folder(path.parent)
    with locked(path.parent), atomic_write(path) as file:
        if path.exists():
            with path.open("rb") as old:
                shutil.copyfileobj(old, file)
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        file.writelines(lines)


def replace_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file in one piece, in place of what was there.

    Raises:
        ValueError, TypeError: as `write_rows`.
    """
    write_text(path, b"".join(_lines(rows)).decode())


def write_text(path: Path, text: str) -> None:
    """Write a file in one piece, in place of what was there."""
    with atomic_write(path) as file:
        file.write(text.encode())


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return all rows of a JSON-lines file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not one JSON object, or holds NaN or infinity; says which file and line.
    """
    rows = []
    with require_regular_file(Path(path)).open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
            try:
                row = parse(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
            rows.append(row)
    return rows


def read_json(path: Path) -> Any:
    """Return what a JSON file says.

    Raises:
        OSError: it can't be read.
        ValueError: as `parse`, or it is longer than any of ours.
    """
    size = require_regular_file(path).stat().st_size
    if size > LARGEST:
        raise ValueError(f"expected at most {LARGEST} bytes, got {size}")
    return parse(path.read_bytes())


def parse(text: str | bytes) -> Any:
    """Return what a JSON document says.

    Raises:
        ValueError: it is none, holds NaN or infinity, or its values lie too deep in each other.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("its values lie too deep in each other") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from a folder, once they are done with it; given up when the process ends however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        try:
            yield json.dumps(dict(row), allow_nan=False).encode() + b"\n"
        except ValueError as error:
            raise ValueError(f"row {number} is not JSON ({error}); expected None and a reason for a number") from error


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
