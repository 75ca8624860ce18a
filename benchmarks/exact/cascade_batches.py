"""Exact inversion of batches.

Run it by `python -m benchmarks.exact.cascade_batches [--sizes N...] [--batches N]` (needs HYPERLEAK_DATA).

Untrained networks of HyperFL, one step on a batch in float32, no label and no classifier: `cascade` on FedAvg,
`peel+cascade` on HyperFL. Batch i of size B holds the test images from `first + B i` on, with the network of seed i.
A batch of two gray images takes 5 to 40 CPU seconds, one of four up to three minutes, two color images at least as
long. Sets, methods and sizes that are left out keep what was measured last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

import fl.data
import fl.models
from attacks import Reconstruction
from attacks.base import build
from benchmarks.common import RESULTS, hyperfl_conditions, machine, publish, rewrite, table
from benchmarks.exact.cascade import SETS, SUBJECTS, TIMING_COLUMNS, timing_cells
from eval.metrics import image
from eval.metrics.matching import assign
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.types import Batch


def attack_batch(
    data: Batch, classes: int, network: str, subject: str, first: int, size: int, number: int
) -> dict[str, Any]:
    """Return what the attack makes of batch `number`."""
    method, attack = SUBJECTS[subject]
    images = data.take(torch.arange(first + size * number, first + size * (number + 1)))
    whole = replace(method, batch_size=None)  # type: ignore[call-arg]
    client = Client(fl.models.build(network, num_classes=classes, seed=number), whole)
    view, _ = Federation(client, [ClientData(images, images)], seed=number).observe(0)
    began = time.process_time()
    result = build(attack)(view)
    row: dict[str, Any] = {"batch": number, "seconds": time.process_time() - began}
    if not isinstance(result, Reconstruction):
        return {**row, "reason": result.reason}
    if result.inputs is None:
        return {**row, "stopped": result.note}
    matched = [index for index in assign(result.inputs, images.inputs) if index is not None]
    found = result.inputs[matched]
    return {
        **row,
        "psnr": image.psnr(found, images.inputs).tolist(),
        "exact": (image.exact8(found, images.inputs) == 1).tolist(),
        "verified": bool(result.verified),
    }


def table_row(rows: list[dict[str, Any]], size: int) -> list[str]:
    """Shares, median and cost of one row of the table."""
    solved = [row for row in rows if "psnr" in row]
    psnr = [value for row in solved for value in row["psnr"]]
    images = size * len(rows)
    return [
        f"{len(rows)}",
        f"{sum(value > 40 for value in psnr)} of {images}",
        f"{sum(sum(row['exact']) for row in solved)}",
        f"{sum(row['verified'] for row in solved)}",
        f"{sum(row['verified'] and not all(row['exact']) for row in solved)}",
        f"{sum('reason' in row for row in rows)}",
        f"{sum('stopped' in row for row in rows)}",
        f"{statistics.median(psnr):.0f} ({min(psnr):.0f})" if psnr else "-",
        *timing_cells([row["seconds"] for row in rows]),
    ]


def document(rows: list[dict[str, Any]], first: int) -> list[str]:
    """Return the results in words."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (list(SETS).index(row["set"]), row["method"], row["size"], row["batch"])):
        groups.setdefault((row["set"], row["method"], row["size"]), []).append(row)
    head = ["images of", "method", "batch", "batches", "images > 40 dB", "8-bit exact", "batches verified"]
    head += ["verified, not all exact", "refused", "stopped above the pixels", "median dB (least)", *TIMING_COLUMNS]
    return [
        "# Exact inversion of batches",
        "",
        "`cascade` on FedAvg and `peel+cascade` on HyperFL (scaled heads): untrained networks, one step of size 0.02 "
        f"on one batch in float32, no label, no classifier. Test images from number {first} on, batch i with the "
        "network of seed i; no two batches of a row share an image. A batch is verified as a whole. CPU seconds per "
        "batch, one thread. Exact images count as 100 dB. A batch is refused if its images can't be told "
        "apart, and stopped where a layer above the pixels is left far from its equations: neither has a picture.",
        "",
        hyperfl_conditions("scaled", "0.02 (for gray networks the authors have 0.01)"),
        "",
        *table(head, [[*map(str, group), *table_row(own, group[2])] for group, own in groups.items()]),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--first", type=int, default=800, help="number of the first test image")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["fashion_mnist", "handwritten62"])
    parser.add_argument("--methods", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.rewrite:
        rewrite("cascade_batches", lambda known: document(known["rows"], known["first"]))
        return
    found = _before(chosen.first)
    for size in chosen.sizes:
        for name in chosen.sets:
            data = fl.data.load(name)
            for subject in chosen.methods:
                key = {"set": name, "method": subject, "size": size}
                found = [row for row in found if not key.items() <= row.items()]
                for number in range(chosen.batches):
                    row = attack_batch(data.test, data.num_classes, SETS[name], subject, chosen.first, size, number)
                    found.append({**key, **row})
                    # at once, so that what is measured stays if this is stopped
                    publish("cascade_batches", {"first": chosen.first, "rows": found}, document(found, chosen.first))


def _before(first: int) -> list[dict[str, Any]]:
    """Return what was measured last, on such a machine and from the same image on."""
    path = RESULTS / "cascade_batches.json"
    last = json.loads(path.read_text()) if path.exists() else {}
    kept: list[dict[str, Any]] = last["rows"] if last.get("machine") == machine() and last.get("first") == first else []
    return kept


if __name__ == "__main__":
    main()
