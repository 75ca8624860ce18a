"""Names that come out of files, and the files that they name: never outside of the folder that they are of."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def join_inside(folder: Path, *names: str) -> Path:
    """Return the path of `folder/NAME/...`, for names from a file or a folder that somebody else may have made.

    Args:
        folder: that is asked for; it may itself be a link.
        names: one for each level, as plain as `0001.png`.

    Raises:
        ValueError: a name is a path, or a link leads out of the folder; says which.
    """
    for name in names:
        if name in {"", ".", ".."} or "/" in name or "\0" in name or os.sep in name:
            raise ValueError(f"expected the plain name of a file in {folder}, got {printable_name(name, 100)!r}")
    path = folder.joinpath(*names)
    root, real = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([root, real]) != root:
        raise ValueError(
            f"{path} is a link that leads out of {folder}; put a copy in its place (`cp -rL` copies without links)"
        )
    return path


def require_inside(path: Path, folder: Path) -> Path:
    """Return `path`, found in a folder, if it does not leave it.

    Raises:
        ValueError: it is a link, or in one, that leads out of the folder.
    """
    return join_inside(folder, *path.relative_to(folder).parts) if path.is_symlink() else path


def require_regular_file(path: Path) -> Path:
    """Return `path`, if it is a file with an end: reading a pipe waits for ever.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is a pipe, a device, a socket or a folder.
    """
    kind = path.stat().st_mode
    if not stat.S_ISREG(kind):
        what = "folder" if stat.S_ISDIR(kind) else "pipe" if stat.S_ISFIFO(kind) else "device or socket"
        raise ValueError(f"expected a file, got a {what}: {path}")
    return path


def printable_name(name: str, most: int = 255) -> str:
    """Return a file's name as text that UTF-8 has, whatever its bytes are, without its end where it is long."""
    words = name.encode("utf-8", "backslashreplace").decode()
    return words if len(words) <= most else f"{words[:most]}..."


def is_accessible_file(path: Path) -> bool:
    """Return whether there is such a file, in a place that may be looked at."""
    try:
        return path.is_file()
    except OSError:
        return False
