"""A run by two workers of this machine beside its simulation: seconds until the last cell is finished, and a kill."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hyperleak
from benchmarks.performance.large_scale.simulation import Conditions, simulate
from eval.experiment import yaml_config
from eval.run.members import WORKER, Members
from eval.run.plan import Plan, prepare

WORKERS = 2
LENGTHS = (0.5, 1.0, 2.0, 3.0)
"""Seconds of the attacks on each training: all below the patience after which others may help with one."""
SEEDS = 6
KILLED_AFTER = 8.0
"""Seconds after its first sign of life at which a worker is killed."""
PACED = Path(__file__).with_name("paced_attack.py")


def experiment() -> dict[str, Any]:
    """Return a grid of short cells."""
    return {
        "title": "Short cells for two workers",
        "imports": [str(PACED)],
        "task": {"dataset": {"name": "faces", "size": 28}, "model": {"name": "mlp", "widths": [8]}},
        "federation": {"partition": {"name": "iid", "clients": 4}, "rounds": 1},
        "method": [{"name": "fedavg", "lr": 0.05}],
        "attack": [{"name": "paced", "as": f"paced-{n}", "seconds": length} for n, length in enumerate(LENGTHS)],
        "observe": {"images": 1, "batch_size": 1},
        "seeds": list(range(SEEDS)),
        "score": {"lpips": "off"},
    }


def run(place: Path, workers: int, killed_after: float | None = None) -> dict[str, Any]:
    """Run the grid in an empty folder by so many workers.

    Returns:
        "seconds" from the first worker's first word to the last cell's end; "cells": seconds of each by id;
        "finished": when each was finished, from the same moment; "killed_at" where one was killed.
    """
    watched = _Watch(place, killed_after)
    watched.start()
    result = hyperleak.run(experiment(), place, workers=workers, executor={"name": "local"})
    watched.join()
    if result.failures:
        raise RuntimeError(f"cells failed: {result.failures}")
    about = {path.parent.name: path for path in place.glob("cells/*/cell.json")}
    finished = {name: path.stat().st_mtime - watched.began for name, path in about.items()}
    return {
        "seconds": max(finished.values()),
        "cells": {name: json.loads(path.read_text())["seconds"] for name, path in about.items()},
        "finished": finished,
        "starts": watched.starts,
        "killed_at": watched.killed_at,
    }


class _Watch(threading.Thread):
    """Notes when workers appear in a run's folder, and kills the first of them when it is told to."""

    def __init__(self, place: Path, killed_after: float | None) -> None:
        super().__init__(daemon=True)
        self._members, self._killed_after = Members(place), killed_after
        self.began, self.killed_at = 0.0, -1.0
        self.starts: list[float] = []

    def run(self) -> None:
        """Look until all is done, or for two minutes."""
        seen: dict[str, int] = {}
        until = time.monotonic() + 120
        while time.monotonic() < until:
            for state in self._members.states():
                if state.kind == WORKER and state.name not in seen:
                    seen[state.name] = int(state.about["pid"])
                    self.began = self.began or time.time()
                    self.starts.append(time.time() - self.began)
            due = self._killed_after is not None and self.began and time.time() - self.began > self._killed_after
            if due and self.killed_at < 0:
                os.kill(next(iter(seen.values())), signal.SIGKILL)
                self.killed_at = time.time() - self.began
            if seen and not (self._members.folder).is_dir():
                return
            time.sleep(0.02)


def compare() -> dict[str, Any]:
    """Run the grid by one worker, by two, and by two with one killed; simulate the latter two before."""
    plan = prepare(yaml_config.read(experiment()), device="cpu")
    with tempfile.TemporaryDirectory() as place:
        alone = run(Path(place) / "alone", 1)
        beside = max(alone["seconds"] - sum(alone["cells"].values()), 0.0) / len(alone["cells"])
        found: dict[str, Any] = {"alone": _figures(alone), "beside": beside, "runs": []}
        for killed_after in (None, KILLED_AFTER):
            real = run(Path(place) / f"two-{killed_after}", WORKERS, killed_after)
            found["runs"].append({"killed": killed_after is not None, **_beside(plan, alone, real, beside)})
    return found


def _figures(one: Mapping[str, Any]) -> dict[str, float]:
    return {"seconds": one["seconds"], "in_cells": sum(one["cells"].values()), "cells": float(len(one["cells"]))}


def _beside(plan: Plan, alone: Mapping[str, Any], real: Mapping[str, Any], beside: float) -> dict[str, Any]:
    """Return a run's figures with those of its simulation.

    It is told the lengths of cells in the run by one worker, when the workers appeared and which was killed when, and
    nothing else of the run.
    """
    killed, starts = real["killed_at"], real["starts"]
    conditions = Conditions(
        workers=WORKERS,
        late=starts[:WORKERS],
        start=starts[WORKERS] - killed if killed >= 0 else 0.0,
        finish=beside,
        deaths=[killed] if killed >= 0 else [],
    )
    predicted = simulate(plan, alone["cells"], conditions)
    figures = {"predicted": predicted.makespan, "lost": predicted.lost, "starts": starts, "killed_at": killed}
    return {**_figures(real), **figures}


def seconds_to_start(found: Mapping[str, Any]) -> float:
    """Return the seconds from a worker's death to the first word of the one that takes its place."""
    (run,) = (run for run in found["runs"] if run["killed"])
    return float(run["starts"][WORKERS] - run["killed_at"])
