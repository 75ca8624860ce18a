"""The exact attacks on networks they are defined for.

Run it by `python -m benchmarks.exact.exact [--victims N]` (needs HYPERLEAK_DATA).

Untrained networks, one step of FedAvg of size 1 in float32 without a defense, label unknown. Victim i of batch size B
holds the test images from `FIRST + B i` on and meets the network of seed i.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import fl.data
import fl.models
from attacks import Reconstruction
from attacks.base import build
from benchmarks.common import publish, table
from benchmarks.exact.cascade import TIMING_COLUMNS, timing_cells
from eval.metrics import image
from eval.metrics.matching import assign
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.types import Batch

FIRST = 500
STEP = FedAvg(lr=1.0, steps=1, batch_size=None)


@dataclass(frozen=True)
class Case:
    """An attack on a network."""

    attack: str
    network: str
    dataset: str
    batch: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


COLOR, GRAY = {"input_shape": (3, 32, 32), "normalize": True}, {"input_shape": (1, 28, 28), "normalize": True}
CASES = (
    Case("analytic", "mlp", "cifar10", 1, COLOR),
    Case("analytic", "mlp", "cifar10", 8, COLOR),
    Case("spear", "mlp", "cifar10", 4, COLOR),
    Case("spear", "mlp", "cifar10", 8, COLOR),
    Case("spear", "mlp", "fashion_mnist", 8, GRAY),
    *(Case(attack, "lenet-zhu", "cifar10") for attack in ("rgap", "rconv", "cascade")),
    *(Case(attack, "hyperfl-grey", "fashion_mnist") for attack in ("rgap", "rconv", "cascade")),
)


def attack_victim(case: Case, data: Batch, classes: int, number: int) -> dict[str, Any]:
    """Return what the attack makes of victim `number`."""
    first = FIRST + case.batch * number
    images = data.take(torch.arange(first, first + case.batch))
    client = Client(fl.models.build(case.network, num_classes=classes, seed=number, **case.settings), STEP)
    view, _ = Federation(client, [ClientData(images, images)], seed=number).observe(0)
    began = time.process_time()
    result = build(case.attack)(view, seed=number)
    row: dict[str, Any] = {"victim": number, "seconds": time.process_time() - began}
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return {**row, "reason": getattr(result, "reason", "no image")}
    pairs = [(i, found) for i, found in enumerate(assign(result.inputs, images.inputs)) if found is not None]
    true, found = images.inputs[[i for i, _ in pairs]], result.inputs[[found for _, found in pairs]]
    exact = (image.exact8(found, true) == 1).tolist()
    return {
        **row,
        "psnr": image.psnr(found, true).tolist(),
        "exact": sum(exact),
        "verified": bool(result.verified),
        "wrong": bool(result.verified) and not all(exact),
    }


def table_row(rows: list[dict[str, Any]], images: int) -> list[str]:
    """Counts and cost of one row of the table."""
    psnr = [value for row in rows for value in row.get("psnr", [])]
    return [
        f"{sum(value > 40 for value in psnr)} of {images}",
        f"{sum(row.get('exact', 0) for row in rows)}",
        f"{sum(row.get('verified', False) for row in rows)} of {len(rows)}",
        f"{sum(row.get('wrong', False) for row in rows)}",
        f"{sum('reason' in row for row in rows)}",
        f"{statistics.median(psnr):.0f} ({min(psnr):.0f})" if psnr else "-",
        *(timing_cells([row["seconds"] for row in rows])),
    ]


def document(cases: list[tuple[Case, list[dict[str, Any]]]]) -> list[str]:
    """Return the results in words."""
    head = ["attack", "network", "images of", "batch", "images > 40 dB", "8-bit exact", "victims verified"]
    head += ["verified, not all exact", "without a picture", "median dB (least) of what was found", *TIMING_COLUMNS]
    body = [
        [case.attack, case.network, case.dataset, case.batch, *table_row(rows, case.batch * len(rows))]
        for case, rows in cases
    ]
    reasons = {
        f"- `{case.attack}` on `{case.network}`, batch {case.batch}: {row['reason']}"
        for case, rows in cases
        for row in rows
        if "reason" in row
    }
    return [
        "# Exact attacks on the networks they are defined for",
        "",
        "Untrained networks, one step of FedAvg of size 1 in float32, no defense, label unknown. Test images from "
        f"number {FIRST} on, victim i with the network of seed i. PSNR ends at 100 dB, which pixels exact to 8 bits "
        "need not reach. CPU seconds of a victim, one thread. `analytic` hands out of a batch only images that some "
        "neuron sees alone.",
        "",
        *table(head, body),
        *(["", "Said where there is no picture:", "", *sorted(reasons)] if reasons else []),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=int, default=20)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: list[tuple[Case, list[dict[str, Any]]]] = []
    for case in CASES:
        data = fl.data.load(case.dataset)
        found.append(
            (case, [attack_victim(case, data.test, data.num_classes, number) for number in range(chosen.victims)])
        )
        rows = [{"attack": c.attack, "network": c.network, "batch": c.batch, "rows": r} for c, r in found]
        publish("exact", {"cases": rows}, document(found))


if __name__ == "__main__":
    main()
