"""Exact inversion on real images.

Run it by `python -m benchmarks.exact.cascade [--images N] [--sets NAME...]` (needs HYPERLEAK_DATA).

Untrained networks of HyperFL, one step on one image in float32, no label and no classifier. Image i meets the network
of seed i. FedAvg's update is the difference of two models in float32, HyperFL's what `peel` makes of it. Color images
take a quarter of a minute each. `ig` with its default settings meets the same views; `--attacks` measures it or
`cascade` alone. Sets and attacks that are left out keep what was measured last. `--rewrite` measures nothing and
writes the page anew from what is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fl.data
import fl.models
from attacks import Reconstruction
from attacks.base import Result, build
from benchmarks.common import RESULTS, hyperfl_conditions, machine, publish, rewrite, table
from eval.metrics import image as metrics
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.types import Batch
from fl.view import ServerView

SETS = {"fashion_mnist": "hyperfl-grey", "handwritten62": "hyperfl-grey", "cifar10": "hyperfl-colour"}
FIRST = {"fashion_mnist": 1000, "handwritten62": 880, "cifar10": 1000}
"""Number of the first test image: no change of the attack before the committed results had seen any of these fifty.
Handwriting has 930."""
SUBJECTS: dict[str, tuple[Method, str]] = {
    "FedAvg": (FedAvg(lr=0.02, steps=1), "cascade"),
    "HyperFL": (
        HyperFL(lr=0.02, steps=1, batch_size=None, head_epochs=0, parametrization=Hypernetwork(init="scaled")),
        "peel+cascade",
    ),
}
EXACT, SEARCH = "cascade", "ig"
STACK = 8
"""Views of the search at once: each of HyperFL's has a network of 14 million weights of its own."""


def observe_image(
    data: Batch, classes: int, network: str, method: Method, number: int, defense: Defense | None = None
) -> tuple[ServerView, Batch]:
    """Return what the server sees of image `number`, and the image."""
    image = data.take(torch.tensor([number]))
    client = Client(fl.models.build(network, num_classes=classes, seed=number), method, defense or Defense())
    return Federation(client, [ClientData(image, image)], seed=number).observe(0)[0], image


def attack_image(data: Batch, classes: int, network: str, method: Method, attack: str, number: int) -> dict[str, Any]:
    """Return what the attack makes of image `number`."""
    view, image = observe_image(data, classes, network, method, number)
    began = time.process_time()
    result = build(attack)(view)
    seconds = time.process_time() - began
    row = {"image": number, **score_image(result, image), "seconds": seconds}
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return row
    return {**row, "verified": bool(result.verified), **_proven(result, image.inputs)}


def score_image(result: Result, image: Batch) -> dict[str, Any]:
    """Return what a result has of a single image, or why it has none."""
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return {"reason": getattr(result, "reason", "no image")}
    return {
        "psnr": float(metrics.psnr(result.inputs, image.inputs)[0]),
        "exact": bool(metrics.exact8(result.inputs, image.inputs)[0] == 1),
        "label": label_found(result, image),
    }


def search_images(
    data: Batch, classes: int, network: str, method: Method, attack: str, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return what a search makes of the images, several at once."""
    search, rows = build(attack), list[dict[str, Any]]()
    for begin in range(0, len(numbers), STACK):
        some = numbers[begin : begin + STACK]
        views, images = zip(*(observe_image(data, classes, network, method, number) for number in some), strict=True)
        began = time.process_time()
        results = search.run(views, some)
        seconds = (time.process_time() - began) / len(some)
        for number, image, result in zip(some, images, results, strict=True):
            rows.append({"image": number, **score_image(result, image), "seconds": seconds})
    return rows


def label_found(result: Reconstruction, image: Batch) -> bool | None:
    """Return whether the label of a single image is right; None where none is told."""
    if result.labels is None:
        return None
    found = result.labels.argmax(-1) if result.labels.ndim == 2 else result.labels
    return bool(found[0] == image.labels[0])


def labels_right(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many of the labels told are right."""
    told = [row["label"] for row in rows if row.get("label") is not None]
    return f"{sum(told)} of {len(told)}" if told else "-"


def _proven(result: Reconstruction, truth: Tensor) -> dict[str, Any]:
    """Return the share of pixels that the attack says are fixed, and how many of them are wrong."""
    if result.fixed is None or result.inputs is None:
        return {"fixed": 0.0, "fixed_wrong": 0}
    wrong = ((result.inputs - truth) * 255).round() != 0
    return {"fixed": float(result.fixed.double().mean()), "fixed_wrong": int((wrong & result.fixed).sum())}


TIMING_COLUMNS = ("seconds: median", "mean", "most")


def timing_cells(seconds: list[float]) -> list[str]:
    """Return the seconds of several runs, as `SPENT` names them: few slow ones hide behind the median."""
    return [f"{value:.1f}" for value in (statistics.median(seconds), statistics.fmean(seconds), max(seconds))]


def table_row(rows: list[dict[str, Any]]) -> list[str]:
    """Shares, median and cost of one row of the table."""
    solved = [row for row in rows if "psnr" in row]
    count = len(rows)
    wrong = sum(row["verified"] and not row["exact"] for row in solved)
    fixed = sorted(row["fixed"] for row in solved)
    if not rows:
        return ["0", *["-"] * (7 + len(TIMING_COLUMNS))]
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
        *timing_cells([row["seconds"] for row in rows]),
    ]


def search_cells(rows: list[dict[str, Any]]) -> list[str]:
    """Return the search's part of the same row."""
    psnr = [row["psnr"] for row in rows if "psnr" in row]
    return [f"{statistics.median(psnr):.1f} ({len(psnr)})", labels_right(rows)] if psnr else ["-", "-"]


def document(rows: list[dict[str, Any]], first: dict[str, int], timed_on: str) -> list[str]:
    """Return the results in words."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        own = groups.setdefault((row["set"], row["method"]), {EXACT: [], SEARCH: []})
        own[row.get("attack", EXACT)].append(row)
    body = [[*group, *table_row(own[EXACT]), *search_cells(own[SEARCH])] for group, own in groups.items()]
    head = ["images of", "method", "images", "verified", "> 40 dB", "8-bit exact", "verified, not exact"]
    head += ["pixels said to be fixed, median (least)", "of these wrong", "median dB (least)", *TIMING_COLUMNS]
    return [
        "# Exact inversion, layer by layer",
        "",
        "`cascade` on FedAvg and `peel+cascade` on HyperFL (scaled heads): untrained networks, one step of size 0.02 "
        "on one image in float32, no label, no classifier. Image i meets the network of seed i. An image is "
        "verified, and a pixel fixed, where the attack proves it without the truth; "
        "of an image whose equations are not satisfied no pixel is. CPU seconds are `cascade`'s, one thread "
        f"({timed_on}). Beside it `ig` and `peel+ig` by their default settings on the same views, which read the label "
        "off where the classifier is shared: median (number of images) and labels that are right. `cascade` uses no "
        "total variation, the searches their default of 3e-3.",
        "",
        hyperfl_conditions("scaled", "0.02 (for gray networks the authors have 0.01)"),
        "",
        *table([*head, "ig: median dB", "ig: labels right"], body),
        "",
        *table(["images of", "first test image"], [[*each] for each in first.items()]),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--first", type=int, help="number of the first test image, of all sets; see FIRST")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--attacks", nargs="+", choices=(EXACT, SEARCH), default=[EXACT, SEARCH])
    parser.add_argument("--page", default="cascade", help="of the results; other images than its own need another")
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.rewrite:
        rewrite(chosen.page, lambda known: document(known["rows"], known["first"], known["timed_on"]["processor"]))
        return
    first = FIRST if chosen.first is None else dict.fromkeys(SETS, chosen.first)
    found, timed_on = _before(chosen.page, chosen.sets, chosen.attacks, first)
    for name in chosen.sets:
        data = fl.data.load(name)
        for subject, (method, exact) in SUBJECTS.items():
            numbers, victims = range(first[name], first[name] + chosen.images), (data.test, data.num_classes)
            rows = dict[str, list[dict[str, Any]]]()
            if EXACT in chosen.attacks:
                rows[EXACT] = [attack_image(*victims, SETS[name], method, exact, number) for number in numbers]
            if SEARCH in chosen.attacks:
                rows[SEARCH] = search_images(*victims, SETS[name], method, exact.replace(EXACT, SEARCH), numbers)
            for attack, own in rows.items():
                found += [{"set": name, "method": subject, "attack": attack, **row} for row in own]
            found.sort(key=lambda row: list(SETS).index(row["set"]))
            # at once, so that what is measured stays if this is stopped
            text = document(found, first, timed_on["processor"])
            publish(chosen.page, {"first": first, "timed_on": timed_on, "rows": found}, text)


def _before(
    page: str, sets: Sequence[str], measured: Sequence[str], first: dict[str, int]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what a page has of other sets or attacks, from the same images on, and where `cascade` was timed.

    Seconds are of one machine: to measure `cascade` on another drops what was measured of it before. A search has none
    on the page, so it can be added anywhere.
    """
    path = RESULTS / f"{page}.json"
    last = json.loads(path.read_text()) if path.exists() else {}
    if last.get("first") != first:
        return [], machine()
    timed_on = last.get("timed_on", last["machine"])
    again = EXACT in measured
    keep = {SEARCH} | ({EXACT} if not again or timed_on == machine() else set())
    rows = [row for row in last["rows"] if row.get("attack", EXACT) in keep]
    rows = [row for row in rows if not (row["set"] in sets and row.get("attack", EXACT) in measured)]
    return rows, machine() if again else timed_on


if __name__ == "__main__":
    main()
