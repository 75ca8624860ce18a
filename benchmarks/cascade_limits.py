"""Where exact inversion ends: `HYPERLEAK_DATA=... python -m benchmarks.cascade_limits [--images N] [--rounds N...]`.

Fashion-MNIST on HyperFL's grey network, FedAvg and HyperFL (through `peel`), one step on one image, no label given:
`cascade` beside `ig` when the update is rounded, noisy or pruned (untrained network), and on networks trained for some
rounds. Image i meets the network of seed i where it is untrained. Both attacks know the defence. Rows measured before
on the same images stay where they are not measured again.
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
from attacks.base import build
from benchmarks.common import RESULTS, publish, table
from defenses import defenses
from eval import metrics
from fl.client import Client
from fl.data import Dataset
from fl.data.partition import DominantGroups
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetwork import Hypernetwork
from fl.types import Batch, ServerView

SET, NETWORK = "fashion_mnist", "hyperfl-grey"
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


def untrained(images: Sequence[Batch], first: int, subject: str, defense: dict[str, Any]) -> Iterator[ServerView]:
    """What the server sees of every image, each of a network of its own."""
    for number, image in enumerate(images, first):
        task = fl.models.build(NETWORK, num_classes=10, seed=number)
        client = Client(task, replace(SUBJECTS[subject][1], lr=0.02), defenses.build(defense))  # type: ignore[call-arg]
        yield Federation(client, [ClientData(image, image)], seed=number).observe(0)[0]


def trained(data: Dataset, subject: str, images: Sequence[Batch], rounds: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """After each of `rounds`, what the server sees of every image."""
    training, observed, _ = SUBJECTS[subject]
    task = fl.models.build(NETWORK, num_classes=data.num_classes, seed=0)
    split = DominantGroups(clients=20, train_size=600, test_size=100)(data)
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


def _row(result: object, image: Batch) -> dict[str, Any]:
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return {"reason": getattr(result, "reason", "no image")}
    return {
        "psnr": float(metrics.psnr(result.inputs, image.inputs)[0]),
        "exact": bool(metrics.exact8(result.inputs, image.inputs)[0] == 1),
        "off": float((result.inputs - image.inputs).abs().max()),
        "verified": bool(result.verified),
    }


def line(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Shares and medians of one row of the table."""
    found = [row for row in rows if row["attack"] == "cascade"]
    solved, beside = [row for row in found if "psnr" in row], [row for row in rows if row["attack"] == "ig"]
    if not solved:
        return [f"{len(found)}", f"refused: {found[0]['reason']}", "-", "-", "-", "-", "-", _median(beside)]
    shares = [sum(test(row) for row in solved) / len(found) for test in (_is_verified, _is_close, _is_exact)]
    wrong = sum(row["verified"] and row["off"] > 3 / 255 for row in solved)
    seconds = statistics.median(row["seconds"] for row in found)
    least = min(row["psnr"] for row in solved)
    cells = [f"{_median(solved)} ({least:.0f})", *(f"{share:.0%}" for share in shares), f"{wrong}", f"{seconds:.1f}"]
    return [f"{len(found)}", *cells, _median(beside)]


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
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--first", type=int, default=600, help="number of the first test image")
    parser.add_argument("--rounds", type=int, nargs="*", default=[1, 10, 50], help="of training; none leaves that out")
    parser.add_argument("--iterations", type=int, default=1000, help="of the search")
    parser.add_argument("--updates", nargs="*", choices=UPDATES, default=list(UPDATES), help="of untrained networks")
    parser.add_argument("--methods", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = fl.data.load(SET)
    images = [data.test.take(torch.tensor([chosen.first + i])) for i in range(chosen.images)]
    settings = {"first": chosen.first, "images": chosen.images, "iterations": chosen.iterations}
    found = _measured(settings)

    def add(update: str, subject: str, after: int, views: Sequence[ServerView]) -> None:
        rows = attacked(views, images, SUBJECTS[subject][2], chosen.iterations)
        found[update, subject, after] = [{"update": update, "method": subject, "rounds": after, **row} for row in rows]
        known = {key: found[key] for key in sorted(found, key=_place)}
        body = [[key[0], key[1], f"{key[2]}", *line(rows)] for key, rows in known.items()]
        every = [row for rows in known.values() for row in rows]
        publish("cascade_limits", {**settings, "rows": every}, document(body, chosen.first, chosen.iterations))

    for label in chosen.updates:
        for subject in chosen.methods:
            add(label, subject, 0, list(untrained(images, chosen.first, subject, UPDATES[label])))
    for subject in chosen.methods if chosen.rounds else ():
        for after, views in trained(data, subject, images, chosen.rounds):
            add("float32", subject, after, views)


Key = tuple[str, str, int]
"""Update, method, and rounds of training before it."""


def _measured(settings: dict[str, int]) -> dict[Key, list[dict[str, Any]]]:
    """The committed rows, if they are of the same images and as long a search."""
    path, found = RESULTS / "cascade_limits.json", dict[Key, list[dict[str, Any]]]()
    before = json.loads(path.read_text()) if path.exists() else {}
    for row in before.get("rows", ()) if settings.items() <= before.items() else ():
        found.setdefault((row["update"], row["method"], row["rounds"]), []).append(row)
    return found


def _place(key: Key) -> tuple[int, int, int]:
    """Untrained networks first, by update, then methods by rounds."""
    update, subject, after = key
    return (1 if after else 0) * (1 + list(SUBJECTS).index(subject)), after, list(UPDATES).index(update)


def document(body: Sequence[Sequence[str]], first: int, iterations: int) -> list[str]:
    """The results in words."""
    head = ["update", "method", "rounds", "images", "cascade: median dB (least)", "> 40 dB", "8-bit exact"]
    head = [*head[:5], "verified", *head[5:], "wrongly verified", "median seconds", "ig: median dB"]
    return [
        "# Where exact inversion ends",
        "",
        "`cascade` (FedAvg) and `peel+cascade` (HyperFL, scaled heads) on Fashion-MNIST and HyperFL's grey network: "
        "one step on one image, no label, no classifier. `peel` averages the gradient over all that a hypernetwork's "
        "update says of it. Noise in units of each tensor's root mean square; prune: "
        f"share removed. Test images from number {first} on. Wrongly verified: a pixel is off by more than 3/255. CPU "
        f"seconds of `cascade`, one thread. `ig` knows the same and searches for {iterations} iterations.",
        "",
        *table(head, body),
    ]


if __name__ == "__main__":
    main()
