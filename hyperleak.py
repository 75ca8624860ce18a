"""Starts the command: `hyperleak`, or `python -m hyperleak`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("fl", "defenses", "attacks", "eval")


def main() -> None:
    """Run the command, unless modules of the user's own stand in its way."""
    if taken := _taken():
        sys.stderr.write(f"error: {taken}\n")
        sys.exit(2)
    from eval.cli import app

    app()


def _taken() -> str:
    """Whose module or folder is found in place of one of this installation's packages, and what to do; or nothing."""
    here = Path(__file__).resolve().parent
    for name in PACKAGES:
        found = find_spec(name)
        places = [*(found.submodule_search_locations or ())] if found is not None else []
        if (here / name) not in {Path(place).resolve() for place in places}:
            other = "nothing" if found is None else places[0] if places else found.origin
            return (
                f"hyperleak's package {name!r} is hidden: Python finds {other} in its place; start it in another "
                "folder, take that one off PYTHONPATH, or give what is there another name"
            )
    return ""


if __name__ == "__main__":
    main()
