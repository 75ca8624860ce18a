"""HyperFL and FedAvg on the same weights.

Run it by `python -m benchmarks.leakage.same_network [--sets ...]` (needs HYPERLEAK_DATA).

What a HyperFL client's network is generated with, a FedAvg client is sent outright, classifier included. Both take one
step on the same image, and the same search without classifier and label runs on what each sends: the difference is
what HyperFL hides of this network's gradient from a server that peels. Sets that are left out keep what was measured
last.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from dataclasses import replace
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from benchmarks.common import RESULTS, hyperfl_conditions, publish, rewrite, table
from benchmarks.leakage.leakage import Seen, observe_images, score_results, timed
from eval.metrics.score import Row
from eval.metrics.statistics import mean_interval, median, paired_difference, success_rate
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.tensors import dense
from fl.types import Batch, Task, Truth

SETS, LR = {"fashion_mnist": "hyperfl-grey", "cifar10": "hyperfl-colour"}, 0.01
CALLED = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
PEELED, CUT, PLAIN = "HyperFL: peel+ig", "FedAvg: headless+ig", "FedAvg: ig"
Measured = dict[str, Any]
"""Of one set and initialization: what was searched, how many images and seeds, rows and CPU seconds by attack."""
INITIALIZATIONS = {"scaled": "scaled to the network's own", "published": "as published"}


def weighted(task: Task, truth: Truth) -> Task:
    """Return the task whose network has the weights that a client's was generated with, and the client's classifier."""
    model = copy.deepcopy(task.model)
    known = {**truth.extractor, **{name: dense(value) for name, value in truth.private.items()}}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(known[name])
    return replace(task, model=model)


def observe_both(network: str, init: Any, images: Batch, seed: int) -> tuple[list[Seen], list[Seen]]:
    """Views of HyperFL's client on every image, and of FedAvg's with the same weights."""
    task = fl.models.build(network, num_classes=10, seed=seed)
    step: dict[str, Any] = {"lr": LR, "steps": 1, "batch_size": None}
    hidden = observe_images(task, HyperFL(head_epochs=0, parametrization=Hypernetwork(init=init), **step), images, seed)
    return hidden, observe_images(weighted(task, hidden[0][1]), FedAvg(**step), images, seed)


def attack_both(name: str, init: str, count: int, seeds: int, search: dict[str, Any]) -> Measured:
    """Return the rows and CPU seconds by method and attack; seeds are of network, hypernetwork and attack."""
    images = fl.data.load(name).test.take(torch.arange(count))
    found: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    for seed in range(seeds):
        hidden, plain = observe_both(SETS[name], init, images, seed)
        for key, victims in ((PEELED, hidden), (CUT, plain), (PLAIN, plain)):
            attack = attacks.build({"name": key.partition(": ")[2], **search})
            results, spent = timed(attack, victims, seed)
            found.setdefault(key, []).extend(score_results(results, victims, seed, init=init, attack=key))
            seconds[key] = seconds.get(key, 0.0) + spent
    return {"search": search, "images": count, "seeds": seeds, "rows": found, "cpu_seconds": seconds}


def section(name: str, init: str, measured: Measured) -> list[str]:
    """Return the tables of one set and initialization."""
    found, seconds, search = measured["rows"], measured["cpu_seconds"], measured["search"]
    about = (
        f"{measured['images']} test images x {measured['seeds']} seeds, `{SETS[name]}`. Every search takes "
        f"{search['iterations']} iterations with TV {search['tv_weight']:g}."
    )
    body = []
    for key, data in found.items():
        psnr, rate = mean_interval(data), success_rate(data, 20.0)
        interval = f"{psnr.value:.2f} [{psnr.low:.2f}, {psnr.high:.2f}]"
        body.append(
            [key, len(data), interval, f"{median(data):.1f}", f"{100 * rate.value:.0f} %", f"{seconds[key]:.0f}"]
        )
    floor = mean_interval(found[PEELED], "floor_mean_psnr").value
    body.append(["baseline: mean", "", f"{floor:.2f}", "", "", ""])
    pairs = []
    for key in (CUT, PLAIN):
        gap = paired_difference(found[PEELED], found[key])
        pairs.append([f"{PEELED} minus {key}", f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"])
    return [
        f"## {CALLED[name]}, heads of the hypernetwork {INITIALIZATIONS[init]}",
        "",
        about,
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
        "--init", choices=list(INITIALIZATIONS), action="append", help="of the heads; scaled by default"
    )
    parser.add_argument("--sets", choices=list(SETS), nargs="+", default=list(SETS))
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rewrite:
        rewrite("same_network", lambda known: document(known["sets"]))
        return
    search = {"iterations": given.iterations, "tv_weight": given.tv}
    path = RESULTS / "same_network.json"
    known: dict[str, dict[str, Measured]] = json.loads(path.read_text())["sets"] if path.exists() else {}
    for name, init in itertools.product(given.sets, given.init or ["scaled"]):
        known.setdefault(name, {})[init] = attack_both(name, init, given.images, given.seeds, search)
        publish("same_network", {"sets": known}, document(known))


def document(known: dict[str, dict[str, Measured]]) -> list[str]:
    """Return the results in words, set by set."""
    lines = [
        "# HyperFL beside FedAvg with the same weights",
        "",
        "One step on one image; seeds are of network, hypernetwork and attack. FedAvg's network has the weights that "
        "HyperFL's client generates at the start, and that client's classifier; so both compute the same gradient of "
        "the same image. `peel+ig` and `headless+ig` search for the image alone, without classifier and label; `ig` on "
        "FedAvg knows the classifier and reads the label off. Intervals: 95 % over images and seeds. "
        "[hyperfl_fashion_mnist.md](hyperfl_fashion_mnist.md) compares other networks: there FedAvg starts from the "
        "network's own initialization, whose weights have another scale than generated ones.",
        "",
        hyperfl_conditions("scaled", f"{LR:g} (in color the authors have 0.02)"),
        "",
    ]
    for name in SETS:
        for init, measured in known.get(name, {}).items():
            lines += section(name, init, measured)
    return lines[:-1]


if __name__ == "__main__":
    main()
