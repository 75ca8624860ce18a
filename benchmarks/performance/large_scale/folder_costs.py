"""Measured parts of a run's folder with thousands of cells: plan, claims, what a worker looks at, and the report."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from attacks.parallel import AttackPool
from benchmarks.performance.large_scale.federation_costs import seconds_of
from benchmarks.performance.scaling import memory
from eval.experiment import yaml_config
from eval.experiment.spec import Experiment
from eval.run import execute, results
from eval.run.claims import Claims
from eval.run.estimate import estimate
from eval.run.members import WORKER, Member, Members
from eval.run.plan import Plan, prepare
from eval.run.run_directory import CELL, RunDir
from eval.run.runner import Options, Run, silent
from eval.run.shared.worker import SharedRun

GRID = {"seeds": 1_000, "attacks": 9}
"""A training and nine attacks on it from every seed: 10,000 cells."""
CLAIMS = 200
DISK_CELLS = 50
MANY_CLIENTS = {"clients": 10_000, "attacks": 9}


def experiment(seeds: int, attacks: int, clients: int = 4, dataset: Mapping[str, Any] | None = None) -> Experiment:
    """Return an experiment of so many trainings and attacks on each; one that computes next to nothing.

    Args:
        seeds: of the trainings.
        attacks: on each.
        clients: of each.
        dataset: what they are trained on; None is what comes with the package.
    """
    return yaml_config.read(
        {
            "title": "Many cells",
            "task": {
                "dataset": dict(dataset or {"name": "faces", "size": 28}),
                "model": {"name": "mlp", "widths": [8]},
            },
            "federation": {"partition": {"name": "iid", "clients": clients}, "rounds": 1},
            "method": [{"name": "fedavg", "lr": 0.05}],
            "attack": [{"name": "ig", "as": f"ig{n}", "iterations": n + 1} for n in range(attacks)],
            "observe": {"images": 1, "batch_size": 1},
            "seeds": list(range(seeds)),
            "score": {"lpips": "off"},
        }
    )


def folder(seeds: int, attacks: int) -> dict[str, float]:
    """Measure a folder of so many cells that are all finished, but for the last.

    The cells are copies of one that was computed, since only files are looked at. They lie in memory, where there is a
    file system in memory: a disk adds what it takes to sync (`disk`).
    """
    torch.set_num_threads(1)
    asked = experiment(seeds, attacks)
    began = time.process_time()
    plan = prepare(asked, device="cpu")
    found = {"cells": float(sum(1 for _ in plan.cells())), "seconds_prepare": time.process_time() - began}
    with tempfile.TemporaryDirectory(dir=in_memory()) as place:
        run = RunDir(Path(place) / "many")
        found["seconds_plan_first"] = seconds_of(lambda: estimate(plan, run))
        fill(plan, run, computed(Path(place) / "one"))
        with closing(AttackPool(1)) as pool:
            found |= _looks(plan, run, pool)
        found |= _readers(plan, run)
    return {**found, "mib_peak": memory()[1]}


def in_memory() -> str | None:
    """Return a folder whose files are in memory; None where there is none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def computed(place: Path) -> dict[str, Path]:
    """Compute a training and an attack on it; returns the folders of their cells, by kind."""
    one, run = prepare(experiment(1, 1), device="cpu"), RunDir(place)
    with execute.folder_in_use(run, Options()):
        execute.run_and_publish(one, run, Options(), with_report=False)
    return {cell.settings["kind"]: run.cells / cell.id for _, cell in one.cells()}


def fill(plan: Plan, run: RunDir, sources: Mapping[str, Path]) -> None:
    """Finish all cells of a plan with the files of computed ones."""
    for _, cell in plan.cells():
        part = run.part(cell)
        for path in sources[cell.settings["kind"]].iterdir():
            if path.name != CELL:
                shutil.copy(path, part / path.name)
        run.finish(cell, 1.0)


def _looks(plan: Plan, run: RunDir, pool: AttackPool) -> dict[str, float]:
    """Measure what a run by one process writes after a cell, and what a worker looks at before one."""
    alone = Run(plan, run, Options(), silent, pool)
    status_first = seconds_of(lambda: alone.write_status("running"))
    status = seconds_of(lambda: alone.write_status("running"))
    last = plan.trainings[-1].attack_tasks[-1].cell
    shutil.rmtree(run.cells / last.id)
    member = Member(Members(run.path), WORKER, "measured")
    claims = Claims(run.path, member)
    worker = SharedRun(plan, RunDir(run.path), Options(), silent, pool, claims=claims, workers=64)
    first, again = (seconds_of(worker._has_open) for _ in range(2))
    member.leave()
    shutil.rmtree(run.path / "shared")
    return {
        "seconds_status_first": status_first,
        "seconds_status": status,
        "bytes_status": float((run.path / "run.json").stat().st_size),
        "seconds_look_first": first,
        "seconds_look": again,
    }


def _readers(plan: Plan, run: RunDir) -> dict[str, float]:
    """Measure what is written for readers, and a plan by finished cells."""
    planned = seconds_of(lambda: estimate(plan, run))
    assembled = seconds_of(lambda: results.assemble(plan, run))
    rows = [json.loads(line) for line in (run.path / "images.jsonl").read_text().splitlines()]
    report = seconds_of(lambda: results.write_table_and_report(rows, [], plan, run))
    return {
        "seconds_plan": planned,
        "seconds_assemble": assembled,
        "seconds_report": report,
        "bytes_report": float((run.path / "report.html").stat().st_size),
    }


def disk(claims: int, cells: int) -> dict[str, float]:
    """Measure on this disk, by the wall: claiming a cell and giving it up, and finishing one."""
    plan = prepare(experiment(max(cells // 2, 1), 1), device="cpu")
    with tempfile.TemporaryDirectory() as place:
        run = RunDir(Path(place) / "many")
        member = Member(Members(run.path), WORKER, "measured")
        held = Claims(run.path, member)

        def claim() -> None:
            for number in range(claims):
                if not held.take(f"cell{number}"):
                    raise RuntimeError("a claim that nobody has was not given")
                held.finish(f"cell{number}")

        claimed = seconds_of(claim, time.perf_counter) / claims
        member.leave()
        shutil.rmtree(run.path)
        sources = computed(Path(place) / "one")
        finished = seconds_of(lambda: fill(plan, run, sources), time.perf_counter) / sum(1 for _ in plan.cells())
    return {"seconds_claim": claimed, "seconds_finish": finished}


def many_clients(clients: int, attacks: int, dataset: Mapping[str, Any] | None) -> dict[str, float]:
    """Measure a plan of one training of so many clients: dividing the images, and estimating the cost."""
    torch.set_num_threads(1)
    began = time.process_time()
    plan = prepare(experiment(1, attacks, clients, dataset), device="cpu")
    prepared = time.process_time() - began
    with tempfile.TemporaryDirectory() as place:
        planned = seconds_of(lambda: estimate(plan, RunDir(Path(place) / "none")))
    return {"clients": float(clients), "seconds_prepare": prepared, "seconds_plan": planned}
