"""The command `hyperleak` and the package's Python face; the work is done in `fl`, `defenses`, `attacks` and `eval`.

Importing this package imports none of them, nor torch: what it offers is looked up when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("fl", "defenses", "attacks", "eval")
LAZY = dict.fromkeys(("AuditOptions", "RunResult", "audit", "load", "run"), "hyperleak.api")
"""The modules in which public names lie that are imported when they are first asked for."""


def main() -> None:
    """Run the command, unless modules of the user's own stand in its way."""
    if problem := shadowed_package():
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(2)
    from eval.cli import app

    app()


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
