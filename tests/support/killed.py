"""Kill runs with SIGKILL at random points, let them go on, and tell whether the files are those of a calm run.

It forks, so that a kill costs no imports: call it by `support.scripts.script`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from support.brief import few_candidates
from support.tiny import CONFIG, Registered

from eval.experiment import yaml_config
from eval.io import jsonl, yaml12
from eval.report import results_table
from eval.run import results, runner
from eval.run.run_directory import RunDir

FILES = ("table.md", "images.jsonl", "config.yaml")
CHANGES = {"federation.rounds": 4, "observe.rounds": [0, 2, 4], "federation.client_fraction": 0.67}


def go(path: Path, seeds: int) -> None:
    """The whole run, as `hyperleak run` does it."""
    torch.set_num_threads(1)
    experiment = yaml_config.read(yaml12.parse(CONFIG))
    for key, value in {**CHANGES, "seeds": list(range(seeds))}.items():
        experiment = yaml_config.override(experiment, f"{key}={json.dumps(value)}")
    folder = RunDir(path)
    with folder.locked(), folder.logged():
        plan = runner.prepare(experiment, device="cpu")
        assert not runner.run(plan, folder, runner.Options(checkpoint_seconds=0.05))
        rows = results.assemble(plan, folder)
        jsonl.write_text(
            path / results.TABLE, results_table.to_markdown(results_table.build_table(rows, plan.experiment))
        )


def child(path: Path, seeds: int) -> int:
    """Start the run in a process of its own."""
    number = os.fork()
    if number == 0:
        code = 1
        os.fsync = lambda _: None  # a killed process loses nothing that it has written
        try:
            with Registered(), few_candidates():
                go(path, seeds)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return number


def finish(number: int) -> int:
    """The exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def killed(path: Path, after: float, seeds: int) -> bool:
    """Kill a run after so many seconds; False if it was done before."""
    number = child(path, seeds)
    time.sleep(after)
    os.kill(number, signal.SIGKILL)
    return finish(number) != 0


def same(path: Path, calm: Path) -> bool:
    """Whether two runs left the same bytes."""
    pictures = [{p.name: p.read_bytes() for p in (folder / "images").iterdir()} for folder in (path, calm)]
    return pictures[0].keys() == pictures[1].keys() and all(
        (path / name).read_bytes() == (calm / name).read_bytes() for name in FILES
    )


def main(folder: Path, given_points: str, given_seeds: str) -> list[dict[str, Any]]:
    points, seeds = int(given_points), int(given_seeds)
    with Registered():  # what is looked up by name is imported here, once, and not in every child
        yaml_config.read(yaml12.parse(CONFIG))
    draw, calm = random.Random(3), folder / "calm"
    began = time.monotonic()
    assert finish(child(calm, seeds)) == 0
    whole, outcomes = time.monotonic() - began, []
    while len(outcomes) < points:
        path, after = folder / f"killed{len(outcomes)}", draw.uniform(0.02, 0.95) * whole
        hit = killed(path, after, seeds)
        assert finish(child(path, seeds)) == 0
        if hit:
            outcomes.append({"after": round(after / whole, 2), "same": same(path, calm)})
    often, kills = folder / "often", 0
    while killed(often, whole / 2 * 1.2**kills, seeds):  # ever later: a busy machine may be slower than it was
        kills += 1
    outcomes.append({"kills": kills, "same": same(often, calm)})
    return outcomes
