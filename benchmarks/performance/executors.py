"""A run by workers: `python -m benchmarks.performance.executors [--engines local slurm dask ray] [--workers 1 2]`.

The same grid of 40 cells under every executor and number of workers, each from an empty folder, by the wall clock, so
that it says something on idle cores only. Ten trainings with three searches each; every cell takes about as long as the
next of its kind, so that two workers could take half the time of one. Files are compared with those of a run by one
process. Engines whose package is missing are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hyperleak
from benchmarks.common import RESULTS, publish, table

NAME = "executors"
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("torch", {"name": "local"}),
    "slurm": ("submitit", {"name": "slurm", "cluster": "local", "timeout_min": 60}),
    "dask": ("distributed", {"name": "dask"}),
    "ray": ("ray", {"name": "ray"}),
}
"""Name, the package that it needs, and its settings."""
GOAL = 1.9
"""Times as fast with two workers as with one."""
EXPERIMENT: dict[str, Any] = {
    "title": "A grid for workers",
    "task": {"dataset": {"name": "faces", "size": 28}, "model": "hyperfl-grey"},
    "federation": {"partition": {"name": "iid", "clients": 4}, "rounds": 10, "evaluate_every": 10},
    "method": [{"name": "fedavg", "lr": 0.05}, {"name": "fedavg", "as": "slow", "lr": 0.01}],
    "attack": [
        {"name": "ig", "iterations": 500},
        {"name": "ig", "as": "smooth", "iterations": 500, "tv_weight": 0.01},
        {"name": "ig", "as": "rough", "iterations": 500, "tv_weight": 0.0},
    ],
    "observe": {"images": 4, "batch_size": 1, "method": {"steps": 1}},
    "seeds": [0, 1, 2, 3, 4],
    "score": {"lpips": "off"},
}
HEAD = ["executor", "workers", "seconds", "seconds in cells", "times as fast as one worker", "same bytes"]
FILES = ("table.md", "images.jsonl", "config.yaml")


def time_run(folder: Path, executor: Mapping[str, Any] | None, workers: int) -> dict[str, Any]:
    """Run the grid in an empty folder, and return its seconds on the wall and in its cells."""
    began = time.perf_counter()
    result = hyperleak.run(EXPERIMENT, folder, workers=workers, executor=None if executor is None else dict(executor))
    seconds = time.perf_counter() - began
    if result.failures:
        raise RuntimeError(f"cells failed: {result.failures}")
    cells = [json.loads(path.read_text())["seconds"] for path in sorted(folder.glob("cells/*/cell.json"))]
    return {"seconds": seconds, "in_cells": sum(cells), "cells": len(cells)}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that have to be the same, pictures among them."""
    paths = [*(folder / name for name in FILES), *sorted((folder / "images").iterdir())]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def measure(engines: Sequence[str], numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Return the figures so far after each run: of one process, then of all engines and numbers of workers."""
    with tempfile.TemporaryDirectory() as place:
        alone = Path(place) / "alone"
        found: dict[str, Any] = {"alone": time_run(alone, None, 1), "idle": idle_cores(), "runs": [], "missing": []}
        expected = contents(alone)
        for engine in engines:
            package, executor = ENGINES[engine]
            if find_spec(package) is None:
                found["missing"].append(engine)
                continue
            for workers in numbers:
                folder = Path(place) / f"{engine}-{workers}"
                run = time_run(folder, executor, workers)
                found["runs"].append(
                    {"engine": engine, "workers": workers, **run, "same": contents(folder) == expected}
                )
                say(f"{engine}, {workers} workers: {run['seconds']:.1f} s")
                yield found


def idle_cores() -> float:
    """Return how many cores had nothing to do in the last minute."""
    return max((os.cpu_count() or 1) - os.getloadavg()[0], 0.0)


def page(found: Mapping[str, Any]) -> list[str]:
    """Return the page of results."""
    runs = found["runs"]
    one = {run["engine"]: run["seconds"] for run in runs if run["workers"] == 1}
    rows = [
        [
            run["engine"],
            run["workers"],
            f"{run['seconds']:.1f}",
            f"{run['in_cells']:.1f}",
            f"{one[run['engine']] / run['seconds']:.2f}" if run["engine"] in one else "-",
            "yes" if run["same"] else "no",
        ]
        for run in runs
    ]
    alone = found["alone"]
    lines = [
        "# Workers of an executor",
        "",
        f"A grid of {alone['cells']} cells (ten trainings, three searches on each) from an empty folder, "
        "by the wall clock. "
        f"One process without an executor took {alone['seconds']:.1f} s, {alone['in_cells']:.1f} s of it in cells. "
        "Seconds in cells grow where workers disturb each other. A worker starts anew and plans the experiment itself, "
        f"which is part of the time. The goal is {GOAL} times with two workers on two idle cores; "
        f"before the measurement {found['idle']:.1f} cores were idle.",
        "",
        *table(HEAD, rows),
    ]
    if found["missing"]:
        lines += ["", f"Not installed, and so not measured: {', '.join(found['missing'])}."]
    return [*lines, "", "`python -m benchmarks.performance.executors` makes this page again."]


def say(words: str) -> None:
    """Say how far the measurement is."""
    sys.stderr.write(f"{words}\n")


def main() -> None:
    """Measure, and publish after each run: all of them take twenty minutes."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--engines", nargs="*", default=[*ENGINES], choices=[*ENGINES])
    asked.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    given = asked.parse_args()
    for found in measure(given.engines, given.workers):
        publish(NAME, found, page(found))
    say(f"written to {RESULTS / NAME}.md")


if __name__ == "__main__":
    main()
