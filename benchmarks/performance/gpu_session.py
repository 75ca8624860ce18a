"""What is to be done on a GPU that is at hand for minutes: `python -m benchmarks.performance.gpu_session FOLDER`.

In this order, each in a process of its own and in the time that is left:

1. the tests marked `gpu`;
2. `benchmarks.performance.gpu`, whose parts are written as they are done;
3. the papers' tables at the papers' size (`hyperleak reproduce ITEM --scale paper`), those of least work first. A table
   that is not finished goes on where it was, if its folder of `FOLDER/runs` is there again.

It needs no network. `FOLDER` then has the output of each step (`*.log`), the page of the measurements, the finished
cells of the tables (`cells.tar.xz`, without pictures), and what came of each step (`session.json`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine

TESTS_SHARE, MEASUREMENTS_SHARE = 0.3, 0.6
"""Of the whole time, up to which tests and then measurements may go on."""
SPARE = 20.0
"""Seconds at the end for ending a process and for packing."""
GRACE = 5.0
"""Seconds that a process has to end by itself."""
LEAST = 30.0
"""Seconds below which no table is begun."""
ROOT = Path(__file__).parents[2]
NOT_PACKED = (".pt", ".safetensors", ".npz", ".png", ".part", ".lock")
"""Ends of names that are left out of the archive: pictures, weights and unfinished cells."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """A process that ran.

    Attributes:
        name: of it.
        seconds: of the clock.
        exit_code: None where it was stopped as its time was over.
    """

    name: str
    seconds: float
    exit_code: int | None


def run_step(name: str, words: Sequence[str], folder: Path, seconds: float) -> Step:
    """Run a process for at most so many seconds, its output in `folder/NAME.log`; what it started ends with it."""
    began = time.monotonic()
    with (folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:  # also where Ctrl-C ends the wait, which does not reach what was started
            if code is None:
                _end(process)
    step = Step(name, round(time.monotonic() - began, 1), code)
    log.info("%s: %s after %.0f s", name, "stopped" if code is None else f"exit code {code}", step.seconds)
    return step


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process and all that it started to end, and kill what is still there after some seconds."""
    for asked in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, asked)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def cheapest_first(listed: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables with rows to measure at the paper's size, those of least work first, of unknown work last.

    Args:
        listed: what `hyperleak reproduce --list --json` prints.
    """
    to_do = [
        (inf if (seconds := item["scales"]["paper"]["seconds"]) is None else seconds, item["item"])
        for item in listed
        if item["scales"].get("paper") and item["scales"]["paper"]["measured"] < item["rows"]
    ]
    return [name for _, name in sorted(to_do)]


def pack(runs: Path, archive: Path) -> int:
    """Put the finished cells of all runs into one archive, and return how many files it has."""
    count = 0
    with tarfile.open(archive, "w:xz") as file:
        for path in sorted(runs.glob("*/**/*")):
            inside = path.relative_to(runs)
            left_out = any(part == "checkpoints" or part.endswith(NOT_PACKED) for part in inside.parts)
            if path.is_file() and not left_out:
                file.add(path, str(inside))
                count += 1
    return count


@dataclass
class Session:
    """The steps of a session.

    Attributes:
        folder: where everything is written.
        seconds: for everything together.
        steps: those that are done.
        began: by the clock that only goes forward.
    """

    folder: Path
    seconds: float
    steps: list[Step] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the time is over, without those that are kept for the end."""
        return share * self.seconds - (time.monotonic() - self.began) - SPARE

    def take(self, name: str, words: Sequence[str], seconds: float) -> Step:
        """Run a step, and write what came of all so far."""
        step = run_step(name, words, self.folder, seconds)
        self.steps.append(step)
        found = {"machine": machine(), "steps": [asdict(step) for step in self.steps]}
        (self.folder / "session.json").write_text(json.dumps(found, indent=1) + "\n")
        return step

    def test(self) -> None:
        """Run the tests that need a GPU, if there is time for them."""
        if (seconds := self.left(TESTS_SHARE)) > 0:
            self.take("tests", ["-m", "pytest", "-n", "0", "-q", "-m", "gpu", "tests"], seconds)

    def measure(self) -> None:
        """Measure searches and rounds, if there is time for them, and copy the page that they leave."""
        if (seconds := self.left(MEASUREMENTS_SHARE)) <= 0:
            return
        before = {path: path.stat().st_mtime_ns for path in RESULTS.glob("gpu.*")}
        self.take("measurements", ["-m", "benchmarks.performance.gpu"], seconds)
        for path in RESULTS.glob("gpu.*"):
            if path.stat().st_mtime_ns != before.get(path):  # else it is of another session, perhaps on another GPU
                shutil.copy(path, self.folder)

    def fill_tables(self, items: Sequence[str], device: str) -> None:
        """Run one table after the other until the time is over, and pack what is finished."""
        for item in items:
            if self.left() < LEAST:
                break
            out = self.folder / "runs" / item.replace("/", "-")
            words = ["reproduce", item, "--scale", "paper", "--device", device, "--offline", "--out", str(out)]
            # Not by `--minutes`, which cuts searches short: what is stopped goes on from its checkpoint another time.
            self.take(out.name, ["-m", "hyperleak", *words], self.left())
        pack(self.folder / "runs", self.folder / "cells.tar.xz")


def next_tables() -> list[str]:
    """Return the tables to measure, as `hyperleak reproduce --list` has them.

    Raises:
        subprocess.CalledProcessError: the list could not be made.
    """
    words = [sys.executable, "-m", "hyperleak", "reproduce", "--list", "--json"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    return cheapest_first(json.loads(listed.stdout))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is written")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--device", default="cuda", help="of the tables' runs")
    parser.add_argument("--items", nargs="+", help="tables, in this order; by default those of least work first")
    parser.add_argument(
        "--without", nargs="+", default=[], choices=["tests", "measurements"], help="steps to leave out"
    )
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    session = Session(chosen.folder.resolve(), 60 * chosen.minutes)
    if "tests" not in chosen.without:
        session.test()
    if "measurements" not in chosen.without:
        session.measure()
    session.fill_tables(chosen.items or next_tables(), chosen.device)


if __name__ == "__main__":
    main()
