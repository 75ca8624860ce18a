"""The papers' whole evaluation, 50 images and 10,000 iterations, on all cores of a CPU.

Run it by `python -m benchmarks.leakage.whole`.

`ig` on FedAvg and `joint` on HyperFL, both on HyperFL's color network, as `hyperleak run` does it with
`compiled: true`: seconds of the clock from views to results, starting processes and compiling included, and those of
all processes on their cores. The clock needs an idle machine. `--uncompiled` leaves the compiler out, `--iterations`
makes it shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from contextlib import closing
from typing import Any, Literal

import torch

import attacks
import fl.data
import fl.models
from attacks.base import Reconstruction
from attacks.parallel import AttackPool
from benchmarks.common import RESULTS, publish, table
from eval.run.resources import default_workers
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.types import Batch, Task
from fl.view import ServerView

COUNT, ITERATIONS = 50, 10_000
"""Of the papers' evaluation."""
WHOLE: dict[str, Method] = {
    "ig": FedAvg(lr=1.0, steps=1, batch_size=None),
    "joint": HyperFL(lr=0.1, steps=1, batch_size=None, head_epochs=0),
}
SETTINGS: dict[str, dict[str, str]] = {"ig": {}, "joint": {"preset": "published"}}
"""Of each attack."""


def photographs(mode: Literal["color", "gray"], size: int, device: str) -> Batch:
    """Those that come with scikit-image, on the device."""
    pictures = fl.data.load("photos", mode=mode, size=size).train
    return Batch(pictures.inputs.to(device), pictures.labels.to(device))


def victims(task: Task, pictures: Batch, method: Method, count: int) -> list[ServerView]:
    """So many clients' views of one step on one image each; photographs, and the same moved when these run out."""
    run = Federation(Client(task, method), [ClientData(pictures, pictures)])
    views = []
    for i in range(count):
        own = pictures.take(torch.tensor([i % len(pictures)], device=pictures.inputs.device))
        own = Batch(own.inputs.roll(i // len(pictures), -1), own.labels)
        views.append(run.observe(0, data=own)[0])
    return views


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has started and that have ended."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def evaluation(name: str, number: int, iterations: int, *, compiled: bool) -> tuple[float, float]:
    """Return the seconds of the clock and of the CPUs that one attack takes in so many processes."""
    task = fl.models.build("hyperfl-colour", num_classes=10, seed=0)
    views = victims(task, photographs("color", 32, "cpu"), WHOLE[name], COUNT)
    attack = attacks.build({"name": name, **SETTINGS[name], "iterations": iterations, "compile": compiled})
    began, before = time.perf_counter(), cpu_seconds()
    with closing(AttackPool(number, patience=0.0)) as spread:
        found = spread.run(attack, views, range(COUNT))
    if not all(isinstance(one, Reconstruction) for one in found):
        raise RuntimeError("expected a reconstruction of every image")
    return time.perf_counter() - began, cpu_seconds() - before


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uncompiled", action="store_true", help="replay records without machine code of them")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of each search")
    parser.add_argument("--only", choices=list(WHOLE), action="append", help="one of the two; the other row stays")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    number = default_workers(torch.device("cpu"))
    how = "recorded" if chosen.uncompiled else "recorded and compiled"
    settings = {"processes": number, "how": how, "iterations": chosen.iterations}
    rows = rows_measured_before(settings) if chosen.only else {}
    for name in chosen.only or WHOLE:
        clock, cpu = evaluation(name, number, chosen.iterations, compiled=not chosen.uncompiled)
        rows[name] = {"seconds": clock, "cpu_seconds": cpu}
    notes = [f"`{name}`: {row['note']}" for name, row in rows.items() if "note" in row]
    lines = [
        f"# {COUNT} images, {chosen.iterations:,} iterations, on {number} processes",
        "",
        "HyperFL's color network (CIFAR-10's), one step on one image each, single precision. Seconds of the clock "
        f"from views to results, {how}; and those of all processes on their {os.cpu_count()} cores.",
        "",
        *table(["attack", "method", "seconds", "minutes", "CPU seconds"], [_shown(name, rows[name]) for name in rows]),
        *(["", *notes] if notes else []),
    ]
    publish("whole", {**settings, "rows": rows}, lines)


def rows_measured_before(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the published rows.

    Raises:
        ValueError: they were measured otherwise.
    """
    found: dict[str, Any] = json.loads((RESULTS / "whole.json").read_text())
    if {key: found[key] for key in settings} != settings:
        raise ValueError(f"expected the settings of the published rows, {found}, got {settings}")
    rows: dict[str, dict[str, Any]] = found["rows"]
    return rows


def _shown(name: str, row: dict[str, Any]) -> list[str]:
    seconds = row["seconds"]
    return [name, WHOLE[name].name, f"{seconds:.0f}", f"{seconds / 60:.1f}", f"{row['cpu_seconds']:.0f}"]


if __name__ == "__main__":
    main()
