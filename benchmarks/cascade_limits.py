"""Where exact inversion ends: `HYPERLEAK_DATA=... python -m benchmarks.cascade_limits [--set NAME] [--rounds N...]`.

HyperFL's network for the set's images, FedAvg and HyperFL (through `peel`), one step on one image, no label given:
`cascade` beside `ig` when the update is rounded, noisy or pruned (untrained network), and on networks trained for some
rounds. Image i meets the network of seed i where it is untrained. Images are the set's test images, on which no client
trains. Both attacks know the defence. Rows stay as they were until they are measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import fl.data
import fl.models
from attacks import Reconstruction
from attacks.base import Result, build
from benchmarks.cascade import labels_right, scored
from benchmarks.common import RESULTS, publish, table
from defenses import defenses
from fl.client import Client
from fl.data import Dataset
from fl.data.partition import DominantGroups
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetwork import Hypernetwork
from fl.types import Batch, ServerView

SETS = {"fashion_mnist": ("hyperfl-grey", 600), "cifar10": ("hyperfl-colour", 592)}
"""The network of a set, and how many training images 20 clients can have each without sharing any."""
UPDATES: dict[str, dict[str, Any]] = {
    "float32": {"name": "none"},
    "float16": {"name": "quantize", "format": "float16"},
    "bfloat16": {"name": "quantize", "format": "bfloat16"},
    **{f"noise {std:g}": {"name": "noise", "std": std} for std in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)},
    **{f"prune {ratio:g}": {"name": "prune", "ratio": ratio} for ratio in (0.1, 0.5, 0.9)},
    "quantize, 16 bits": {"name": "quantize", "bits": 16},
    "quantize, 8 bits": {"name": "quantize", "bits": 8},
}
SUBJECTS: dict[str, tuple[Method, Method, str]] = {
    "FedAvg": (FedAvg(lr=0.01, momentum=0.5, weight_decay=5e-4, epochs=5, batch_size=50), FedAvg(lr=0.01, steps=1), ""),
    "HyperFL": (
        HyperFL(lr=0.01, parametrisation=Hypernetwork(init="scaled")),
        HyperFL(lr=0.01, steps=1, batch_size=None, head_epochs=0, parametrisation=Hypernetwork(init="scaled")),
        "peel+",
    ),
}
"""How a method trains, how its client trains in the observed round, and what comes before an attack on it."""
RATES = {"fashion_mnist": 0.01, "cifar10": 0.02}
"""Step sizes of training, as HyperFL's authors have them."""
Key = tuple[str, str, str, int]
"""Set, update, method, and rounds of training before it."""


def untrained(
    name: str, images: Sequence[Batch], first: int, subject: str, defense: dict[str, Any]
) -> Iterator[ServerView]:
    """What the server sees of every image, each of a network of its own."""
    for number, image in enumerate(images, first):
        task = fl.models.build(SETS[name][0], num_classes=10, seed=number)
        client = Client(task, replace(SUBJECTS[subject][1], lr=0.02), defenses.build(defense))  # type: ignore[call-arg]
        yield Federation(client, [ClientData(image, image)], seed=number).observe(0)[0]


def trained(
    name: str, data: Dataset, subject: str, images: Sequence[Batch], rounds: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """After each of `rounds`, what the server sees of every image."""
    network, own = SETS[name]
    training, observed = (replace(one, lr=RATES[name]) for one in SUBJECTS[subject][:2])  # type: ignore[call-arg]
    task = fl.models.build(network, num_classes=data.num_classes, seed=0)
    split = DominantGroups(clients=20, train_size=own, test_size=100)(data)
    clients = [ClientData(data.train.take(a), data.test.take(b)) for a, b in zip(split.train, split.test, strict=True)]
    run = Federation(Client(task, training), clients)
    for number in range(max(rounds) + 1):
        if number in rounds:
            client = Client(task, observed)
            yield number, [run.observe(i % 20, data=image, client=client)[0] for i, image in enumerate(images)]
        if number < max(rounds):
            run.run_round()


def attacked(views: Sequence[ServerView], images: Sequence[Batch], first: str, iterations: int) -> list[dict[str, Any]]:
    """What both attacks make of every image."""
    rows = []
    search = build({"name": f"{first}ig", **({"iterations": iterations, "tv": 1e-4})})
    for result, image in zip(search.run(list(views), list(range(len(views)))), images, strict=True):
        rows.append({"attack": "ig", **_row(result, image)})
    for view, image in zip(views, images, strict=True):
        began = time.process_time()
        result = build(f"{first}cascade")(view)
        rows.append({"attack": "cascade", **_row(result, image), "seconds": time.process_time() - began})
    return rows


def _row(result: Result, image: Batch) -> dict[str, Any]:
    row = scored(result, image)
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return row
    return {**row, "off": float((result.inputs - image.inputs).abs().max()), "verified": bool(result.verified)}


def line(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Shares and medians of one row of the table."""
    found = [row for row in rows if row["attack"] == "cascade"]
    solved, beside = [row for row in found if "psnr" in row], [row for row in rows if row["attack"] == "ig"]
    if not solved:
        return [f"{len(found)}", f"refused: {found[0]['reason']}", *["-"] * 5, _median(beside), labels_right(beside)]
    shares = [sum(test(row) for row in solved) / len(found) for test in (_is_verified, _is_close, _is_exact)]
    wrong = sum(row["verified"] and row["off"] > 3 / 255 for row in solved)
    seconds = statistics.median(row["seconds"] for row in found)
    least = min(row["psnr"] for row in solved)
    cells = [f"{_median(solved)} ({least:.0f})", *(f"{share:.0%}" for share in shares), f"{wrong}", f"{seconds:.1f}"]
    return [f"{len(found)}", *cells, _median(beside), labels_right(beside)]


def _median(rows: Sequence[dict[str, Any]]) -> str:
    values = [row["psnr"] for row in rows if "psnr" in row]
    return f"{statistics.median(values):.1f}" if values else "-"


def _is_verified(row: dict[str, Any]) -> bool:
    return bool(row["verified"])


def _is_close(row: dict[str, Any]) -> bool:
    return bool(row["psnr"] > 40)


def _is_exact(row: dict[str, Any]) -> bool:
    return bool(row["exact"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="fashion_mnist", help="of the images")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--first", type=int, default=600, help="number of the first test image")
    parser.add_argument("--rounds", type=int, nargs="*", default=[1, 10, 50], help="of training; none leaves that out")
    parser.add_argument("--iterations", type=int, default=1000, help="of the search")
    parser.add_argument("--updates", nargs="*", choices=UPDATES, default=list(UPDATES), help="of untrained networks")
    parser.add_argument("--methods", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = fl.data.load(chosen.set)
    images = [data.test.take(torch.tensor([chosen.first + i])) for i in range(chosen.images)]
    found = _measured()

    def add(update: str, subject: str, after: int, views: Sequence[ServerView]) -> None:
        rows = attacked(views, images, SUBJECTS[subject][2], chosen.iterations)
        what = {"set": chosen.set, "update": update, "method": subject, "rounds": after}
        what |= {"first": chosen.first, "iterations": chosen.iterations}
        found[chosen.set, update, subject, after] = [{**what, **row} for row in rows]
        known = [found[key] for key in sorted(found, key=_place)]
        publish("cascade_limits", {"rows": [row for rows in known for row in rows]}, document(known))

    for label in chosen.updates:
        for subject in chosen.methods:
            add(label, subject, 0, list(untrained(chosen.set, images, chosen.first, subject, UPDATES[label])))
    for subject in chosen.methods if chosen.rounds else ():
        for after, views in trained(chosen.set, data, subject, images, chosen.rounds):
            add("float32", subject, after, views)


def _measured() -> dict[Key, list[dict[str, Any]]]:
    """The committed rows. The first of them held what is now in every row once, and were all of one set."""
    path, found = RESULTS / "cascade_limits.json", dict[Key, list[dict[str, Any]]]()
    before = json.loads(path.read_text()) if path.exists() else {}
    once = {"set": "fashion_mnist", **{key: before[key] for key in ("first", "iterations") if key in before}}
    for row in ({**once, **row} for row in before.get("rows", ())):
        found.setdefault((row["set"], row["update"], row["method"], row["rounds"]), []).append(row)
    return found


def _place(key: Key) -> tuple[int, int, int, int]:
    """Set by set, untrained networks first, by update, then methods by rounds."""
    name, update, subject, after = key
    method = (1 if after else 0) * (1 + list(SUBJECTS).index(subject))
    return list(SETS).index(name), method, after, list(UPDATES).index(update)


def document(known: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """The results in words; `known` has the rows of one line each."""
    head = ["images of", "from", "update", "method", "rounds", "images", "cascade: median dB (least)", "verified"]
    head += ["> 40 dB", "8-bit exact", "wrongly verified", "median seconds", "ig: median dB", "labels right", "steps"]
    body = []
    for rows in known:
        keys = ("set", "first", "update", "method", "rounds")
        body.append([*(f"{rows[0][key]}" for key in keys), *line(rows), f"{rows[0]['iterations']}"])
    return [
        "# Where exact inversion ends",
        "",
        "`cascade` (FedAvg) and `peel+cascade` (HyperFL, scaled heads) on HyperFL's networks, grey for Fashion-MNIST, "
        "colour for CIFAR-10: one step on one image, no label, no classifier. `peel` averages the gradient over all "
        "that a hypernetwork's update says of it. Noise in units of each tensor's root mean square; prune: share "
        "removed. Test images from that number on; none is among those that clients train on before. Wrongly verified: "
        "a pixel is off by more than 3/255. CPU seconds of `cascade`, one thread. `ig` knows the same, with total "
        "variation 1e-4, and searches for so many steps; labels right are of those that it tells (- where none was "
        "kept). Rows were measured one by one: the line at the end names the last machine.",
        "",
        *table(head, body),
    ]


if __name__ == "__main__":
    main()
