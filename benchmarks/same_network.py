"""HyperFL and FedAvg on the same weights: `python -m benchmarks.same_network` (needs HYPERLEAK_DATA).

What a HyperFL client's network is generated with, a FedAvg client is sent outright, classifier included. Both take one
step on the same image, and the same search without classifier and label runs on what each sends: the difference is
what HyperFL hides of this network's gradient from a server that peels.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from benchmarks.common import publish, table
from benchmarks.leakage import Seen, rows, seen, timed
from eval.score import Row
from eval.statistics import mean_interval, median, paired_difference, success_rate
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetwork import Hypernetwork
from fl.simulate import Truth
from fl.tensors import dense
from fl.types import Batch, Task

SET, NETWORK, LR = "fashion_mnist", "hyperfl-grey", 0.01
PEELED, CUT, PLAIN = "HyperFL: peel+ig", "FedAvg: headless+ig", "FedAvg: ig"
INITIALISATIONS = {"scaled": "scaled to the network's own", "published": "as published"}


def weighted(task: Task, truth: Truth) -> Task:
    """The task whose network has the weights that a client's was generated with, and the client's classifier."""
    model = copy.deepcopy(task.model)
    known = {**truth.extractor, **{name: dense(value) for name, value in truth.private.items()}}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(known[name])
    return replace(task, model=model)


def pair(init: Any, images: Batch, seed: int) -> tuple[list[Seen], list[Seen]]:
    """Views of HyperFL's client on every image, and of FedAvg's with the same weights."""
    task = fl.models.build(NETWORK, num_classes=10, seed=seed)
    step: dict[str, Any] = {"lr": LR, "steps": 1, "batch_size": None}
    hidden = seen(task, HyperFL(head_epochs=0, parametrisation=Hypernetwork(init=init), **step), images, seed)
    return hidden, seen(weighted(task, hidden[0][1]), FedAvg(**step), images, seed)


def attacked(
    init: str, images: Batch, seeds: int, search: dict[str, Any]
) -> tuple[dict[str, list[Row]], dict[str, float]]:
    """Rows and CPU seconds by method and attack; seeds are of network, hypernetwork and attack."""
    found: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    for seed in range(seeds):
        hidden, plain = pair(init, images, seed)
        for key, victims in ((PEELED, hidden), (CUT, plain), (PLAIN, plain)):
            name = key.partition(": ")[2]
            results, spent = timed(attacks.build({"name": name, **search}), victims, seed)
            found.setdefault(key, []).extend(rows(results, victims, seed, init=init, attack=key))
            seconds[key] = seconds.get(key, 0.0) + spent
    return found, seconds


def section(init: str, found: dict[str, list[Row]], seconds: dict[str, float]) -> list[str]:
    """The tables of one initialisation."""
    body = []
    for key, data in found.items():
        psnr, rate = mean_interval(data), success_rate(data, 20.0)
        interval = f"{psnr.value:.2f} [{psnr.low:.2f}, {psnr.high:.2f}]"
        body.append(
            [key, len(data), interval, f"{median(data):.1f}", f"{100 * rate.value:.0f} %", f"{seconds[key]:.0f}"]
        )
    floor = mean_interval(found[PEELED], "floor_mean_psnr").value
    body.append(["floor: mean", "", f"{floor:.2f}", "", "", ""])
    pairs = []
    for key in (CUT, PLAIN):
        gap = paired_difference(found[PEELED], found[key])
        pairs.append([f"{PEELED} minus {key}", f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"])
    return [
        f"## Heads of the hypernetwork {INITIALISATIONS[init]}",
        "",
        *table(["method: attack", "runs", "PSNR dB [95 %]", "median", ">= 20 dB", "CPU s"], body),
        "",
        *table(["paired difference in PSNR", "dB [95 %]"], pairs),
        "",
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--tv", type=float, default=1e-2)
    parser.add_argument(
        "--init", choices=list(INITIALISATIONS), action="append", help="of the heads; scaled by default"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    images = fl.data.load(SET).test.take(torch.arange(given.images))
    search = {"iterations": given.iterations, "tv": given.tv}
    lines = [
        "# HyperFL beside FedAvg with the same weights",
        "",
        f"{given.images} test images of Fashion-MNIST x {given.seeds} seeds (network, hypernetwork and attack), "
        f"`{NETWORK}`, one step on one image, {given.iterations} iterations and TV {given.tv:g} for every search. "
        "FedAvg's network has the weights that HyperFL's client generates at the start, and that client's classifier; "
        "so both compute the same gradient of the same image. `peel+ig` and `headless+ig` search for the image alone, "
        "without classifier and label; `ig` on FedAvg knows the classifier and reads the label off. Intervals: 95 % "
        "bootstrap over images and seeds. [hyperfl_fashion_mnist.md](hyperfl_fashion_mnist.md) compares other "
        "networks: there FedAvg starts from the network's own initialisation, whose weights have another scale than "
        "generated ones.",
        "",
    ]
    raw: dict[str, Any] = {"settings": {**search, "images": given.images, "seeds": given.seeds}, "rows": []}
    raw["cpu_seconds"] = {}
    for init in given.init or ["scaled"]:
        found, seconds = attacked(init, images, given.seeds, search)
        lines += section(init, found, seconds)
        raw["rows"] += [row for data in found.values() for row in data]
        raw["cpu_seconds"][init] = seconds
        publish("same_network", raw, lines[:-1])


if __name__ == "__main__":
    main()
