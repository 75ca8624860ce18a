"""A grid of 40 small cells, run under one executor after the other; what it leaves, and who computed what."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from eval.run.members import WORKER, Members, MemberState

ATTACKS = Path(__file__).parent / "grid_attacks.py"
CONFIG = f"""
title: A grid
imports: [{ATTACKS}]
task:
  dataset: {{name: faces, size: 8}}
  model: tiny
federation: {{partition: {{name: iid, clients: 3, train_size: 12, test_size: 6}}, rounds: 30, evaluate_every: 10}}
method:
  - {{name: fedavg, lr: 0.1, batch_size: 6}}
  - name: hyperfl
    batch_size: 6
    epochs: 1
    parametrization: {{name: hypernetwork, embedding: 3, hidden: 6, init: scaled}}
attack:
  - {{name: slow-guess, as: near}}
  - {{name: slow-guess, as: far, spread: 0.3}}
  - {{name: slow-guess, as: slow, seconds: 0.1}}
observe: {{images: 4, batch_size: 1, method: {{steps: 1, head_epochs: 0}}}}
seeds: [0, 1, 2, 3, 4]
score: {{lpips: off}}
"""
CELLS = 40
BY_WORKER = re.compile(r"^(local|slurm|dask|ray)-\d+-\w+-\w+: ")
"""What a caller puts before a worker's words."""
WITH_TIMES = ("run.json", "env.json", "manifest.json", "log.txt", "report.html", "report.md")


def whole(path: Path) -> dict[str, bytes]:
    """All files of a run that must not depend on how it went; rows of rounds without their seconds."""
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {
        name: _without_seconds(file)
        for name, file in files.items()
        if name not in WITH_TIMES and not name.endswith("cell.json") and not name.startswith("checkpoints/")
    }


def _without_seconds(file: Path) -> bytes:
    if file.name != "rounds.jsonl":
        return file.read_bytes()
    return b"\n".join(line.rpartition(b', "seconds"')[0] for line in file.read_bytes().splitlines())


def counted(path: Path) -> Counter[str]:
    """How often each cell was finished, by what workers logged."""
    lines = (path / "log.txt").read_text(encoding="utf-8").splitlines()
    told = [BY_WORKER.sub("", line.split(" eval.run.runner: ", 1)[1]) for line in lines if " eval.run.runner: " in line]
    return Counter(line.rpartition(": ")[0] for line in told if line.endswith(" s"))


class Killer(threading.Thread):
    """Kills one worker in the middle of a training, then one in the middle of an attack.

    Args:
        folder: of the run.
        engine_too: whether the second kill goes to the engine's process, which the worker's then ends with.
    """

    def __init__(self, folder: Path, *, engine_too: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.engine_too = folder, engine_too
        self.killed: list[str] = []

    def run(self) -> None:
        """Wait for somebody to kill."""
        self._kill(lambda stage: stage.endswith(": training"), engine=False)
        self._kill(lambda stage: ": slow" in stage, engine=self.engine_too)

    def _kill(self, wanted: Callable[[str], bool], *, engine: bool) -> None:
        for _ in range(6000):
            for state in Members(self.folder).states():
                if state.kind == WORKER and state.is_alive and (stage := _present(state, wanted)):
                    pid = int(state.about["pid"])
                    os.kill(_parent(pid) if engine else pid, signal.SIGKILL)
                    self.killed.append(stage)
                    return
            time.sleep(0.01)


def _present(state: MemberState, wanted: Callable[[str], bool]) -> str:
    stages = state.about.get("stages", {})
    return next((stage for stage, (done, total) in stages.items() if done < total and wanted(stage)), "")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
