"""Exact inversion on real images: `HYPERLEAK_DATA=... python -m benchmarks.cascade [--images N] [--sets NAME...]`.

Untrained networks of HyperFL, one step on one image in float32, no label and no classifier. Image i meets the network
of seed i. FedAvg's update is the difference of two models in float32, HyperFL's what `peel` makes of it. Colour images
take a quarter of a minute each. Sets that are left out keep what was measured last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import fl.data
import fl.models
from attacks import Reconstruction
from attacks.base import build
from benchmarks.common import RESULTS, machine, publish, table
from eval import metrics
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetwork import Hypernetwork
from fl.types import Batch

SETS = {"fashion_mnist": "hyperfl-grey", "handwritten62": "hyperfl-grey", "cifar10": "hyperfl-colour"}
SUBJECTS: dict[str, tuple[Method, str]] = {
    "FedAvg": (FedAvg(lr=0.02, steps=1), "cascade"),
    "HyperFL": (
        HyperFL(lr=0.02, steps=1, batch_size=None, head_epochs=0, parametrisation=Hypernetwork(init="scaled")),
        "peel+cascade",
    ),
}


def one(data: Batch, classes: int, network: str, method: Method, attack: str, number: int) -> dict[str, Any]:
    """What the attack makes of image `number`."""
    image = data.take(torch.tensor([number]))
    client = Client(fl.models.build(network, num_classes=classes, seed=number), method)
    view, _ = Federation(client, [ClientData(image, image)], seed=number).observe(0)
    began = time.process_time()
    result = build(attack)(view)
    seconds = time.process_time() - began
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return {"image": number, "reason": getattr(result, "reason", "no image"), "seconds": seconds}
    return {
        "image": number,
        "psnr": float(metrics.psnr(result.inputs, image.inputs)[0]),
        "exact": bool(metrics.exact8(result.inputs, image.inputs)[0] == 1),
        "verified": bool(result.verified),
        **_proven(result, image.inputs),
        "seconds": seconds,
    }


def _proven(result: Reconstruction, truth: Tensor) -> dict[str, Any]:
    """The share of pixels that the attack says are fixed, and how many of them are wrong."""
    if result.fixed is None or result.inputs is None:
        return {"fixed": 0.0, "fixed_wrong": 0}
    wrong = ((result.inputs - truth) * 255).round() != 0
    return {"fixed": float(result.fixed.double().mean()), "fixed_wrong": int((wrong & result.fixed).sum())}


SPENT = ("seconds: median", "mean", "most")


def spent(seconds: list[float]) -> list[str]:
    """Seconds of several runs, as `SPENT` names them: few slow ones hide behind the median."""
    return [f"{value:.1f}" for value in (statistics.median(seconds), statistics.fmean(seconds), max(seconds))]


def line(rows: list[dict[str, Any]]) -> list[str]:
    """Shares, median and cost of one row of the table."""
    solved = [row for row in rows if "psnr" in row]
    count = len(rows)
    wrong = sum(row["verified"] and not row["exact"] for row in solved)
    fixed = sorted(row["fixed"] for row in solved)
    shares = (
        sum(row["verified"] for row in solved),
        sum(row["psnr"] > 40 for row in solved),
        sum(row["exact"] for row in solved),
    )
    psnr = [row["psnr"] for row in solved]
    return [
        f"{count}",
        *(f"{share / count:.0%}" for share in shares),
        f"{wrong}",
        f"{statistics.median(fixed):.2%} ({fixed[0]:.2%})" if fixed else "-",
        f"{sum(row['fixed_wrong'] for row in solved)}",
        f"{statistics.median(psnr):.0f} ({min(psnr):.0f})" if psnr else "-",
        *spent([row["seconds"] for row in rows]),
    ]


def document(rows: list[dict[str, Any]], first: int) -> list[str]:
    """The results in words."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["method"]), []).append(row)
    body = [[*group, *line(own)] for group, own in groups.items()]
    head = ["images of", "method", "images", "verified", "> 40 dB", "8-bit exact", "verified, not exact"]
    head += ["pixels said to be fixed, median (least)", "of these wrong"]
    return [
        "# Exact inversion, layer by layer",
        "",
        "`cascade` on FedAvg and `peel+cascade` on HyperFL (scaled heads): untrained networks, one step of size 0.02 "
        f"on one image in float32, no label, no classifier. Test images from number {first} on, image i with "
        "the network of seed i. An image is verified, and a pixel fixed, where the attack proves it without the truth; "
        "of an image whose equations are not satisfied no pixel is. CPU seconds, one thread.",
        "",
        *table([*head, "median dB (least)", *SPENT], body),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--first", type=int, default=500, help="number of the first test image")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = _before(chosen.sets, chosen.first)
    for name in chosen.sets:
        data = fl.data.load(name)
        for subject, (method, attack) in SUBJECTS.items():
            numbers = range(chosen.first, chosen.first + chosen.images)
            rows = [one(data.test, data.num_classes, SETS[name], method, attack, number) for number in numbers]
            found += [{"set": name, "method": subject, **row} for row in rows]
            # at once, so that what is measured stays if this is stopped
            publish("cascade", {"first": chosen.first, "rows": found}, document(found, chosen.first))


def _before(sets: list[str], first: int) -> list[dict[str, Any]]:
    """What was measured last of other sets, on such a machine and from the same image on."""
    path = RESULTS / "cascade.json"
    last = json.loads(path.read_text()) if path.exists() else {}
    if last.get("machine") != machine() or last.get("first") != first:
        return []
    return [row for row in last["rows"] if row["set"] not in sets]


if __name__ == "__main__":
    main()
