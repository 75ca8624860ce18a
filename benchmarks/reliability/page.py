"""The page of all reliability experiments: `python -m benchmarks.reliability.page` writes it from their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import RESULTS, machine, table
from fl.runtime.atomic_files import atomic_write

FOLDER = RESULTS / "reliability"
PAGE = RESULTS / "reliability.md"


@dataclass(frozen=True)
class Figure:
    """One figure of an experiment beside its goal.

    Attributes:
        what: what was counted, in words.
        tried: so many cases.
        goal: what the count should be, in words.
        found: what it is, in words.
        met: whether the goal is met.
    """

    what: str
    tried: int
    goal: str
    found: str
    met: bool


def record(name: str, command: str, figures: Sequence[Figure], details: Mapping[str, Any] | None = None) -> None:
    """Write the results of experiment `name` and the page anew.

    Args:
        name: of the experiment, as of its module.
        command: that measures it again.
        figures: what it found.
        details: further plain data to keep beside them.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine(),
        "command": command,
        "figures": [asdict(figure) for figure in figures],
        "details": dict(details or {}),
    }
    with atomic_write(FOLDER / f"{name}.json") as file:
        file.write(json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")
    write_page()


def write_page() -> None:
    """Write the page from the results that there are."""
    rows, commands = [], []
    for path in sorted(FOLDER.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for figure in (Figure(**entry) for entry in result["figures"]):
            rows.append([figure.what, figure.tried, figure.goal, figure.found, "yes" if figure.met else "**no**"])
        own = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
        commands.append([f"[{path.stem}](reliability/{path.name})", f"`{result['command']}`", own])
    lines = [
        "# Reliability: attempts to make an audit wrong",
        "",
        "Each row is an experiment that tries to get a wrong verdict, a lost file, a traceback or foreign code past",
        "hyperleak. The cases are made by the command below the table, so anybody can count again.",
        "",
        *table(["what was tried", "cases", "goal", "found", "met"], rows),
        "",
        "## Commands and machines",
        "",
        *table(["results", "command", "machine"], commands),
    ]
    with atomic_write(PAGE) as file:
        file.write("\n".join(lines).encode() + b"\n")


if __name__ == "__main__":
    write_page()
