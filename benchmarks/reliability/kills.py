"""Runs that are killed at random points, their reports included: `python -m benchmarks.reliability.kills`.

A tiny run is killed by SIGKILL and started again with the same folder. Afterwards every file in it, but for the log, is
compared with those of a run that nobody disturbed: cells, what readers get, report, pictures, and what the run says of
itself. Clocks stand still in these runs, so that the times in the files are equal, too. Processes are forked from one
that has all modules loaded, so that a kill costs no imports.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from attacks.parallel import AttackPool
from benchmarks.reliability.page import Figure, record
from eval.experiment import yaml_config
from eval.io import yaml12
from eval.run import runner
from eval.run.execute import run_and_publish
from eval.run.run_directory import LOCK, LOG, RunDir
from fl import engines

CONFIG = """
title: A tiny experiment
task: {dataset: {name: faces, size: 8}, model: tiny}
federation: {partition: {name: iid, clients: 3, train_size: 12, test_size: 6}, rounds: 4, client_fraction: 0.67}
method: [{name: fedavg, lr: 0.1, batch_size: 6}]
attack: [{name: ig, iterations: 8, restarts: 1}]
observe: {images: 4, batch_size: 1, rounds: [0, 2, 4], method: {steps: 1}}
score: {lpips: off}
"""


def stopped_clock() -> float:
    """Return the time: always the same."""
    return 0.0


def go(path: Path, workers: int = 1) -> None:
    """The whole run with its report, as `hyperleak run` does it."""
    torch.set_num_threads(1)
    mock.patch.object(time, "perf_counter", stopped_clock).start()
    # workers are started at once, not when a run has taken as long as they take to start
    mock.patch.object(engines, "START_SECONDS", 0.0).start()
    mock.patch.object(runner, "AttackPool", partial(AttackPool, patience=0.0)).start()
    experiment = yaml_config.read(yaml12.parse(CONFIG))
    folder = RunDir(path)
    with folder.locked(), folder.logged():
        plan = runner.prepare(experiment, device="cpu")
        run_and_publish(plan, folder, runner.Options(checkpoint_seconds=0.05, workers=workers, name="tiny"))


def child(path: Path, workers: int = 1) -> int:
    """Start the run in a process of its own; returns its number."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            go(path, workers)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return number


def finish(number: int) -> int:
    """Return the exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def files(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder but the log and the lock."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in {LOG, LOCK}}


def differing(folder: Path, calm: Path) -> list[str]:
    """Return the files that two runs do not have alike."""
    one, other = files(folder), files(calm)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def kill(folder: Path, calm: Path, after: float, workers: int = 1) -> tuple[bool, list[str]]:
    """Kill a run after so many seconds and start it again; whether it was still at work, and what differs then."""
    number = child(folder, workers)
    time.sleep(after)
    os.kill(number, signal.SIGKILL)
    hit = finish(number) != 0
    code = finish(child(folder, workers))
    return hit, differing(folder, calm) if code == 0 else [f"exit code {code}"]


def measure(points: int, seed: int, workers: int, place: Path) -> dict[str, object]:
    """Kill runs at so many random points of their time.

    Returns:
        How many runs there were, and of each that differed which files did.
    """
    draw, calm = random.Random(seed), place / f"calm{workers}"
    began = time.monotonic()
    if finish(child(calm, workers)):
        raise RuntimeError("the run that nobody disturbs has failed")
    whole = time.monotonic() - began
    differ, late, phases, number = {}, 0, dict[str, int](), 0
    while number < points:
        folder, share = place / "killed", draw.uniform(0.01, 0.98)
        hit, found = kill(folder, calm, share * whole, workers)
        shutil.rmtree(folder)
        if not hit:  # this one was quicker
            late += 1
            continue
        number += 1
        phases[f"{int(share * 10) / 10:.1f}"] = phases.get(f"{int(share * 10) / 10:.1f}", 0) + 1
        if found:
            differ[f"{share:.3f}"] = found
    return {
        "kills": number,
        "ended before": late,
        "by share of the run": dict(sorted(phases.items())),
        "differ": differ,
    }


def main() -> None:
    """Measure both and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--two", type=int, default=20, help="kills of runs with two workers")
    parser.add_argument("--seed", type=int, default=40)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    details: dict[str, object] = {}
    figures = []
    yaml_config.read(yaml12.parse(CONFIG))  # loads all modules, once
    with tempfile.TemporaryDirectory() as place:
        for points, workers in ((given.points, 1), (given.two, 2)):
            if not points:
                continue
            found = measure(points, given.seed, workers, Path(place))
            same = points - len(found["differ"])  # type: ignore[arg-type]
            details[f"{workers} worker(s)"] = found
            what = f"kill -9 at random points of a run and its report, {workers} worker(s): files as of a calm run"
            figures.append(Figure(what, points, "all identical", f"{same} of {points} identical", same == points))
            sys.stdout.write(f"{figures[-1].found}\n")
    record("kills", "python -m benchmarks.reliability.kills", figures, details)


if __name__ == "__main__":
    main()
