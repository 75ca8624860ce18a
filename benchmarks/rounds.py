"""CPU seconds of one local round per client, engine by engine: `python -m benchmarks.rounds [--official DIR]`.

DIR is the folder `cnn` of the HyperFL authors' code (https://github.com/Pengxin-Guo/HyperFL, no licence: get your own
copy, and take `.cuda()` out of models/cnn.py to run it on a CPU). Everything is measured in turns in one process with
one thread, so that the ratios hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fl.models
from benchmarks.common import publish, table
from fl.client import Client
from fl.engines import EngineName
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.seeds import stream
from fl.types import Batch

IMAGES, BATCH, EPOCHS, REPEATS = 600, 50, 5, 3
NETWORKS = {"hyperfl-colour": (3, 32, 32), "hyperfl-grey": (1, 28, 28)}
OFFICIAL = {"hyperfl-colour": "CifarCNN_Hyper", "hyperfl-grey": "CNN_FMNIST_Hyper"}


def images(shape: Sequence[int], client: int) -> Batch:
    """One client's images: noise, since only time is measured."""
    draw = stream(0, "images", client)
    return Batch(torch.rand(IMAGES, *shape, generator=draw), torch.randint(0, 10, (IMAGES,), generator=draw))


def ours(network: str, method: Method, engine: EngineName, clients: int) -> Callable[[], None]:
    """One round of `clients` clients and its aggregation."""
    data = [
        ClientData(own, own.take(torch.arange(1))) for own in (images(NETWORKS[network], i) for i in range(clients))
    ]
    client = Client(fl.models.build(network, num_classes=10, seed=0), method)
    run = Federation(client, data, engine=engine)

    def once() -> None:
        run.run_round()

    return once


def official(folder: Path, network: str, clients: int) -> Callable[[], None]:
    """The authors' local training of `clients` clients, without their aggregation."""
    for absent in ("tools", "cvxpy"):  # imported there, not needed for this
        sys.modules.setdefault(absent, types.ModuleType(absent))
    sys.path.insert(0, str(folder))
    networks, rule = importlib.import_module("models.cnn"), importlib.import_module("methods.hyperfl")
    args: Any = types.SimpleNamespace(
        num_classes=10, device="cpu", lr=0.02, lr_g=0.1, momentum=0.5, embed_dim=64, hidden_dim=128
    )
    updates = []
    for i in range(clients):
        own = images(NETWORKS[network], i)
        sets = [torch.utils.data.TensorDataset(b.inputs, b.labels) for b in (own, own.take(torch.arange(1)))]
        loaders = [torch.utils.data.DataLoader(s, BATCH, shuffle=True) for s in sets]
        updates.append(rule.LocalUpdate_HyperFL(i, args, *loaders, getattr(networks, OFFICIAL[network])(args)))

    def run() -> None:
        for update in updates:
            update.local_training(EPOCHS)

    return run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, help="folder `cnn` of the authors' code")
    parser.add_argument("--clients", type=int, default=20, help="in the federations of our engines")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    hyperfl, fedavg = HyperFL(batch_size=BATCH, epochs=EPOCHS), FedAvg(lr=0.02, batch_size=BATCH, epochs=EPOCHS)
    rows, body = [], []
    for network in NETWORKS:
        contenders = {
            "FedAvg, loop": (ours(network, fedavg, "loop", 2), 2),
            "HyperFL, loop": (ours(network, hyperfl, "loop", 2), 2),
            "HyperFL, factored": (ours(network, hyperfl, "factored", chosen.clients), chosen.clients),
        }
        if chosen.official:
            contenders["HyperFL, the authors' code"] = (official(chosen.official, network, 1), 1)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(REPEATS):
            for name, (run, clients) in contenders.items():
                began = time.process_time()
                run()
                seconds[name].append((time.process_time() - began) / clients)
        base = statistics.median(seconds["HyperFL, factored"])
        for name, found in seconds.items():
            middle = statistics.median(found)
            rows.append({"network": network, "what": name, "seconds_per_client": found})
            body.append([network, name, f"{middle:.2f}", f"{middle / base:.1f}"])
    lines = [
        "# One local round per client",
        "",
        f"{IMAGES} images, batches of {BATCH}, {EPOCHS} epochs (HyperFL: after one of the classifier), one thread, "
        f"median of {REPEATS} turns; {chosen.clients} clients for `factored`, which shares products between them. Ours "
        "include the aggregation, the authors' does not.",
        "",
        *table(["network", "what", "CPU s per client", "over factored"], body),
    ]
    publish("rounds", {"rows": rows, "clients": chosen.clients}, lines)


if __name__ == "__main__":
    main()
