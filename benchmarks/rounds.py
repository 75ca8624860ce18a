"""Seconds of one local round per client, engine by engine: `python -m benchmarks.rounds [--official DIR]`.

DIR is the folder `cnn` of the HyperFL authors' code (https://github.com/Pengxin-Guo/HyperFL, no licence: get your own
copy, and take `.cuda()` out of models/cnn.py to run it on a CPU). First in CPU seconds, everything in turns in one
process with one thread, so that the ratios hold on a busy machine too; then in seconds of the clock with all cores,
each in its own way (our worker processes, the authors' threads), which needs an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fl.models
from benchmarks.common import publish, table
from benchmarks.worlds import BATCH, federation, images
from fl.engines import EngineName
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL

IMAGES, EPOCHS, REPEATS = 600, 5, 3
FACTORED, AUTHORS = "HyperFL, factored", "HyperFL, the authors' code"
OFFICIAL = {"hyperfl-colour": "CifarCNN_Hyper", "hyperfl-grey": "CNN_FMNIST_Hyper"}


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        run: one round, of so many `clients`.
        close: afterwards.
    """

    run: Callable[[], None]
    clients: int
    close: Callable[[], None] = lambda: None


def ours(network: str, method: Method, engine: EngineName, clients: int, workers: int = 1) -> Contender:
    """Rounds of a federation of ours, aggregation included."""
    task = fl.models.build(network, num_classes=10, seed=0)
    run = federation(task, method, clients=clients, each=IMAGES, engine=engine, workers=workers)

    def once() -> None:
        run.step(evaluate=False)

    if workers > 1:
        once()  # starts the processes
    return Contender(once, clients, run.close)


def official(folder: Path, network: str, clients: int) -> Contender:
    """The authors' local training, without their aggregation."""
    for absent in ("tools", "cvxpy"):  # imported there, not needed for this
        sys.modules.setdefault(absent, types.ModuleType(absent))
    sys.path.insert(0, str(folder))
    networks, rule = importlib.import_module("models.cnn"), importlib.import_module("methods.hyperfl")
    args: Any = types.SimpleNamespace(
        num_classes=10, device="cpu", lr=0.02, lr_g=0.1, momentum=0.5, embed_dim=64, hidden_dim=128
    )
    updates, task = [], fl.models.build(network, num_classes=10, seed=0)
    for i in range(clients):
        own = images(task, IMAGES, i)
        sets = [torch.utils.data.TensorDataset(b.inputs, b.labels) for b in (own, own.take(torch.arange(1)))]
        loaders = [torch.utils.data.DataLoader(s, BATCH, shuffle=True) for s in sets]
        updates.append(rule.LocalUpdate_HyperFL(i, args, *loaders, getattr(networks, OFFICIAL[network])(args)))

    def run() -> None:
        for update in updates:
            update.local_training(EPOCHS)

    return Contender(run, clients)


def measure(contenders: dict[str, Contender], clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds per client of `REPEATS` rounds of each, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(REPEATS):
        for name, contender in contenders.items():
            began = clock()
            contender.run()
            seconds[name].append((clock() - began) / contender.clients)
    return seconds


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, help="folder `cnn` of the authors' code")
    parser.add_argument("--clients", type=int, default=20, help="in the federations of our engines")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    hyperfl, fedavg = HyperFL(batch_size=BATCH, epochs=EPOCHS), FedAvg(lr=0.02, batch_size=BATCH, epochs=EPOCHS)
    single, whole = [], []
    for network in OFFICIAL:
        contenders = {
            "FedAvg, loop": ours(network, fedavg, "loop", 2),
            "HyperFL, loop": ours(network, hyperfl, "loop", 2),
            FACTORED: ours(network, hyperfl, "factored", chosen.clients),
        }
        if chosen.official:
            contenders[AUTHORS] = official(chosen.official, network, 1)
        single += rows(network, measure(contenders, time.process_time))
        spread = ours(network, hyperfl, "factored", chosen.clients, cores)
        found = measure({FACTORED: spread}, time.perf_counter)
        spread.close()
        if chosen.official:
            with threads(cores):
                found |= measure({AUTHORS: official(chosen.official, network, 1)}, time.perf_counter)
        whole += rows(network, found)
    head = ["network", "what", "seconds per client", "over factored"]
    lines = [
        "# One local round per client",
        "",
        f"{IMAGES} images, batches of {BATCH}, {EPOCHS} epochs (HyperFL: after one of the classifier), median of "
        f"{REPEATS} turns; {chosen.clients} clients for `factored`, which shares products between them. Ours include "
        "the aggregation, the authors' does not.",
        "",
        "CPU seconds, one thread:",
        "",
        *table(head, [row["shown"] for row in single]),
        "",
        f"Seconds of the clock, all {cores} cores (ours in {cores} processes, the authors' in {cores} threads):",
        "",
        *table(head, [row["shown"] for row in whole]),
    ]
    publish("rounds", {"one_thread": single, "all_cores": whole, "clients": chosen.clients}, lines)


def rows(network: str, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """What was found, with the ratio of the medians to that of `factored`."""
    base = statistics.median(seconds[FACTORED])
    return [
        {
            "network": network,
            "what": name,
            "seconds_per_client": found,
            "shown": [network, name, f"{statistics.median(found):.2f}", f"{statistics.median(found) / base:.1f}"],
        }
        for name, found in seconds.items()
    ]


if __name__ == "__main__":
    main()
