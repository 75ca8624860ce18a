"""A workload of 10,000 clients, 1,000 attacked updates and 1e8 parameters: its GPU seconds, and how cells share them.

Seconds are of counted operations and bytes (`operation_counts`) at a GPU's rates: how fast it copies was measured
(`gpu.json`), its peak is its maker's figure, and which share of it is reached is assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.performance.large_scale import folder_costs
from benchmarks.performance.large_scale.simulation import Conditions, simulate
from eval.run.plan import AttackTask, Plan, prepare

PARAMETERS = 100_000_000
CLIENTS, UPDATES = 10_000, 1_000
ROUNDS, STEPS, BATCH = 100, 10, 16
"""Rounds; steps of a client in one; images in a step."""
SCORINGS = 2
"""How often all clients are scored: before the first round and after the last."""
ITERATIONS = 3_000
"""Of `ig` on one update: its default."""
USES = {"perceptron": 1, "transformer": 197}
"""How often an image uses each weight: once, or once a token (ViT-B/16 on 224 x 224 pixels)."""
PEAK = 67e12
"""Operations per second of an H100 SXM in float32 (NVIDIA's data sheet); we compute in nothing less."""
SHARE_OF_PEAK = 0.4
GPU_BYTES = 80e9
MEAN_LIFE = 16_384 * 54 * 86_400 / 419
"""Seconds of one GPU for each unexpected interruption (Grattafiori et al., The Llama 3 Herd of Models, Table 5)."""
PREEMPTED = 8 * 3_600.0
"""Seconds that a preemptible machine is assumed to last on average."""
LIVES = {"nobody dies": float("inf"), "as in Llama 3": MEAN_LIFE, "preempted": PREEMPTED}
WORKERS = (8, 64)
PORTION = 9
"""Updates that a search takes together and keeps at once; what fits a GPU beside their gradients."""
CHECKPOINT = 60.0


@dataclass(frozen=True)
class GpuSeconds:
    """Seconds of a GPU for one unit of work on a network.

    Attributes:
        step: of a client.
        client: of a client's round beside its steps.
        scoring: of one client.
        iteration: of a search, for one update.
    """

    step: float
    client: float
    scoring: float
    iteration: float

    def training(self, fraction: float) -> float:
        """Return the seconds of a training in which a share of the clients takes part in each round."""
        rounds = ROUNDS * fraction * CLIENTS * (STEPS * self.step + self.client)
        return rounds + SCORINGS * CLIENTS * self.scoring

    def search(self, updates: int, iterations: int = ITERATIONS) -> float:
        """Return the seconds of a search on so many updates."""
        return updates * iterations * self.iteration


def gpu_seconds(known: Mapping[str, Any], uses: int) -> GpuSeconds:
    """Return a GPU's seconds for each unit, of a network whose weights each image uses so many times.

    What a client takes on the host, whatever the size of its network, is that of the tiny one here.
    """
    counts, copied = known["counts"], known["gpu"]["copy_bytes_per_second"]
    (tiny,) = (row for row in known["clients"] if row["method"] == "fedavg")

    def seconds(what: str) -> float:
        computed = counts[what]["operations"] * uses * PARAMETERS / (SHARE_OF_PEAK * PEAK)
        return max(computed, counts[what]["bytes"] * PARAMETERS / copied)

    forward = 2 * uses * PARAMETERS / (SHARE_OF_PEAK * PEAK)
    return GpuSeconds(
        step=seconds("step"),
        client=seconds("client") + tiny["seconds_round"] / tiny["clients"],
        scoring=forward + tiny["seconds_scored"] / tiny["clients"],
        iteration=seconds("iteration"),
    )


def gpu() -> dict[str, Any]:
    """Return what `gpu.json` says of the GPU that was measured."""
    found = json.loads((RESULTS / "gpu.json").read_text())
    return {"device": found["device"], "copy_bytes_per_second": found["copy_bytes_per_second"]}


# ---- how cells share it ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """How the workload is cut into cells.

    Attributes:
        name: of the shape, for people.
        trainings: how many.
        attacks: iterations of each attack on a training, over the default.
        parts: into how many cells each attack's updates are spread.
        fraction: of clients in a round.
    """

    name: str
    trainings: int
    attacks: tuple[float, ...]
    parts: int
    fraction: float

    def plan(self) -> Plan:
        """Return a plan of as many cells, in the order that it would have."""
        return prepare(folder_costs.experiment(self.trainings, len(self.attacks) * self.parts), device="cpu")

    def seconds(self, plan: Plan, gpu: GpuSeconds) -> dict[str, float]:
        """Return the seconds of each cell of the plan, by id."""
        found = {one.cell.id: gpu.training(self.fraction) for one in plan.trainings}
        return found | {task.cell.id: self._attack_seconds(task, gpu) for task in plan.attacks}

    def _attack_seconds(self, task: AttackTask, gpu: GpuSeconds) -> float:
        number = int(task.attack.label.removeprefix("ig"))
        return self.attacks[number // self.parts] * gpu.search(UPDATES) / self.parts


SHAPES = (
    Shape("one training, one attack", 1, (1.0,), 1, 0.01),
    Shape("the attack spread over 100 cells", 1, (1.0,), 100, 0.01),
    Shape("all clients in every round", 1, (1.0,), 100, 1.0),
    Shape("16 trainings, five uneven attacks each", 16, (0.1, 0.3, 1.0, 3.0, 8.0), 1, 0.01),
    Shape("the same, each attack spread over ten", 16, (0.1, 0.3, 1.0, 3.0, 8.0), 10, 0.01),
)


def scenarios(known: Mapping[str, Any], network: str = "transformer") -> list[dict[str, Any]]:
    """Simulate every shape by every number of workers and every rate at which they die."""
    gpu = gpu_seconds(known, USES[network])
    found = []
    for shape in SHAPES:
        plan = shape.plan()
        seconds = shape.seconds(plan, gpu)
        chains = [seconds[one.cell.id] + max(seconds[w.cell.id] for w in one.attack_tasks) for one in plan.trainings]
        for workers in WORKERS:
            base = Conditions(
                workers=workers,
                start=known["start"],
                claim=known["disk"]["seconds_claim"],
                finish=known["disk"]["seconds_finish"],
                checkpoint={
                    "training": max(CHECKPOINT, gpu.training(shape.fraction) / ROUNDS),
                    "attack": gpu.search(PORTION),
                },
            )
            row: dict[str, Any] = {"shape": shape.name, "workers": workers, "cells": len(seconds), "chain": max(chains)}
            row["lives"] = {
                name: simulate(plan, seconds, replace(base, mean_life=life)).plain() for name, life in LIVES.items()
            }
            found.append(row)
    return found
