"""Where exact inversion ends.

Run it by `python -m benchmarks.exact.cascade_limits [--set NAME] [--updates ...]` (needs HYPERLEAK_DATA).

HyperFL's untrained network for the set's images, FedAvg and HyperFL (through `peel`), one step on one image, no label
given: `cascade` beside `ig` when the update is rounded, noisy or pruned. Image i meets the network of seed i. Both
attacks know the defense. Rows stay as they were until they are measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import fl.data
from attacks import Reconstruction
from attacks.base import Result, build
from benchmarks.common import RESULTS, hyperfl_conditions, publish, rewrite, table
from benchmarks.exact.cascade import EXACT, SEARCH, SETS, SUBJECTS, labels_right, observe_image, score_image
from defenses import defenses
from fl.types import Batch
from fl.view import ServerView

UPDATES: dict[str, dict[str, Any]] = {
    "float32": {"name": "none"},
    "float16": {"name": "quantize", "format": "float16"},
    "bfloat16": {"name": "quantize", "format": "bfloat16"},
    **{f"noise {std:g}": {"name": "noise", "std": std} for std in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)},
    **{f"prune {ratio:g}": {"name": "prune", "ratio": ratio} for ratio in (0.1, 0.5, 0.9)},
    "quantize, 16 bits": {"name": "quantize", "bits": 16},
    "quantize, 8 bits": {"name": "quantize", "bits": 8},
}
Key = tuple[str, str, str]
"""Set, update and method."""


def attack_images(
    views: Sequence[ServerView], images: Sequence[Batch], exact: str, iterations: int
) -> list[dict[str, Any]]:
    """Return what both attacks make of every image."""
    rows = []
    search = build({"name": exact.replace(EXACT, SEARCH), "iterations": iterations, "tv_weight": 1e-4})
    for result, image in zip(search.run(list(views), list(range(len(views)))), images, strict=True):
        rows.append({"attack": SEARCH, **_row(result, image)})
    for view, image in zip(views, images, strict=True):
        began = time.process_time()
        result = build(exact)(view)
        rows.append({"attack": EXACT, **_row(result, image), "seconds": time.process_time() - began})
    return rows


def _row(result: Result, image: Batch) -> dict[str, Any]:
    row = score_image(result, image)
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return row
    return {**row, "off": float((result.inputs - image.inputs).abs().max()), "verified": bool(result.verified)}


def table_row(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the shares and medians of one row of the table."""
    found = [row for row in rows if row["attack"] == EXACT]
    solved, beside = [row for row in found if "psnr" in row], [row for row in rows if row["attack"] == SEARCH]
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
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--first", type=int, default=1100, help="number of the first test image")
    parser.add_argument("--iterations", type=int, default=1000, help="of the search")
    parser.add_argument("--updates", nargs="+", choices=UPDATES, default=list(UPDATES))
    parser.add_argument("--methods", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.rewrite:
        rewrite("cascade_limits", lambda _: document([*_measured().values()]))
        return
    data, numbers, found = fl.data.load(chosen.set), range(chosen.first, chosen.first + chosen.images), _measured()
    for update, subject in itertools.product(chosen.updates, chosen.methods):
        method, exact = SUBJECTS[subject]
        victims, defense = (data.test, data.num_classes, SETS[chosen.set], method), defenses.build(UPDATES[update])
        views, images = zip(*(observe_image(*victims, number, defense) for number in numbers), strict=True)
        rows = attack_images(views, images, exact, chosen.iterations)
        what = {"set": chosen.set, "update": update, "method": subject}
        what |= {"first": chosen.first, "iterations": chosen.iterations}
        found[chosen.set, update, subject] = [{**what, **row} for row in rows]
        known = [found[key] for key in sorted(found, key=_place)]
        publish("cascade_limits", {"rows": [row for rows in known for row in rows]}, document(known))


def _measured() -> dict[Key, list[dict[str, Any]]]:
    """Return the committed rows."""
    path, found = RESULTS / "cascade_limits.json", dict[Key, list[dict[str, Any]]]()
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        found.setdefault((row["set"], row["update"], row["method"]), []).append(row)
    return found


def _place(key: Key) -> tuple[int, ...]:
    """Set by set, update by update."""
    orders: tuple[list[str], ...] = ([*SETS], [*UPDATES], [*SUBJECTS])
    return tuple(order.index(name) for order, name in zip(orders, key, strict=True))


def document(known: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Return the results in words; `known` has the rows of one line each."""
    head = ["images of", "from", "update", "method", "images", "cascade: median dB (least)", "verified"]
    head += ["> 40 dB", "8-bit exact", "wrongly verified", "median seconds", "ig: median dB", "labels right", "steps"]
    body = []
    for rows in known:
        about = [f"{rows[0][key]}" for key in ("set", "first", "update", "method")]
        body.append([*about, *table_row(rows), f"{rows[0]['iterations']}"])
    return [
        "# Where exact inversion ends",
        "",
        "`cascade` (FedAvg) and `peel+cascade` (HyperFL, scaled heads) on HyperFL's untrained networks, color for "
        "CIFAR-10, gray for the others: one step on one image, no label, no classifier. `peel` averages the "
        "gradient over all that a hypernetwork's update says of it. Noise in units of each tensor's root mean square; "
        "prune: share removed. Test images from that number on. Wrongly verified: a pixel is off by more than 3/255. "
        "CPU seconds of `cascade`, one thread. `ig` knows the same, with total variation 1e-4, and searches for so "
        "many steps; labels right are of those that it tells (- where none was kept). Rows were measured one by one: "
        "the line at the end names the last machine.",
        "",
        hyperfl_conditions("scaled", "0.02 (for gray networks the authors have 0.01)"),
        "",
        *table(head, body),
    ]


if __name__ == "__main__":
    main()
