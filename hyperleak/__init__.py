"""The command `hyperleak` and the package's Python face; the work is done in `fl`, `defenses`, `attacks` and `eval`.

Importing this package imports none of them, nor torch: what it offers is looked up when it is first used.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt` (malloc.h)."""
KEPT_BYTES = 1 << 30
"""Blocks up to this size are kept when they are freed."""
PACKAGES = ("fl", "defenses", "attacks", "eval")
LAZY = {
    **dict.fromkeys(("AuditOptions", "RunResult", "audit", "load", "run"), "hyperleak.api"),
    "assert_no_leak": "hyperleak.no_leak",
}
"""The modules in which public names lie that are imported when they are first asked for."""


def main() -> None:
    """Run the command, unless modules of the user's own stand in its way."""
    if problem := shadowed_package():
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(2)
    keep_freed_memory()
    from eval.cli import app

    app()


def keep_freed_memory() -> None:
    """Have glibc keep memory that is freed, here and in the processes that are started from here.

    By default it gives large blocks back to the system and asks for them anew at every step of a search. What the user
    has set by environment variables stays.
    """
    if not sys.platform.startswith("linux"):
        return
    wanted = {"MALLOC_TRIM_THRESHOLD_": M_TRIM_THRESHOLD, "MALLOC_MMAP_THRESHOLD_": M_MMAP_THRESHOLD}
    chosen = {name: option for name, option in wanted.items() if name not in os.environ}
    os.environ.update(dict.fromkeys(chosen, str(KEPT_BYTES)))  # read by worker processes when they start
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    for option in chosen.values():
        mallopt(option, KEPT_BYTES)


def shadowed_package() -> str:
    """Return whose module or folder Python finds in place of one of our packages, and what to do; or nothing."""
    root = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = find_spec(name)
        places = [*(spec.submodule_search_locations or ())] if spec is not None else []
        if (root / name) not in {Path(place).resolve() for place in places}:
            other = "nothing" if spec is None else places[0] if places else spec.origin
            return (
                f"hyperleak's package {name!r} is hidden: Python finds {other} in its place; start it in another "
                "folder, take that one off PYTHONPATH, or give what is there another name"
            )
    return ""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("hyperleak")
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY, "__version__"})
