"""ROG's search on photographs of 128 x 128 pixels.

Run it by `python -m benchmarks.leakage.rog_photos [--photos astronaut chelsea]`.

The network of ROG's authors, untrained, and the published settings; beside it the closest that its codes come to each
photograph, and what was measured with the authors' own search on them.
"""

from __future__ import annotations

import argparse

import torch

import attacks
import fl.data
import fl.models
from benchmarks.common import publish, table
from benchmarks.leakage.leakage import observe_images, score_results, timed
from eval.metrics import image
from eval.metrics.baselines import representable_bound
from eval.metrics.score import Row
from fl.methods.fedavg import FedAvg

SIDE, CLASSES = 128, 1000
ANCHORS = {"astronaut": (19.1, 20.7), "chelsea": (25.4, 27.2)}
"""PSNR of the authors' search after 100 iterations, and its codes' bound, on other weights of the same network."""
HEAD = ["photograph", "PSNR dB", "SSIM", "label found", "bound of the codes", "authors' search", "its bound", "CPU s"]


def measure_photo(name: str, iterations: int) -> Row:
    """Return the scores of one photograph, with CPU seconds and the bound."""
    images = fl.data.load("photos", mode="color", size=SIDE, names=[name]).train
    task = fl.models.build("lenet-rog", num_classes=CLASSES, seed=0)
    victims = observe_images(task, FedAvg(lr=1.0, steps=1, batch_size=None), images, 0)
    attack = attacks.build({"name": "rog", "preset": "published", "iterations": iterations})
    results, seconds = timed(attack, victims, 0)
    (row,) = score_results(results, victims, 0, photograph=name)
    best = representable_bound(attack, images.inputs)
    assert best is not None
    return {**row, "seconds": seconds, "bound": float(image.psnr(best, images.inputs)[0])}


def table_row(row: Row) -> list[object]:
    """Return a row of the table."""
    theirs = [f"{figure:.1f}" for figure in ANCHORS.get(row["photograph"], ())] or ["-", "-"]
    found = "yes" if row["label_correct"] else "no"
    mine = [f"{row['psnr']:.1f}", f"{row['ssim']:.3f}", found, f"{row['bound']:.1f}"]
    return [row["photograph"], *mine, *theirs, f"{row['seconds']:.0f}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", nargs="+", default=list(ANCHORS))
    parser.add_argument("--iterations", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure_photo(name, given.iterations) for name in given.photos]
    lines = [
        f"# ROG on photographs of {SIDE} x {SIDE} pixels",
        "",
        f"The untrained LeNet of ROG's authors for {CLASSES} classes (34 million weights). One step on one "
        f"photograph of scikit-image in float32. The preset `published` takes {given.iterations} iterations on codes a "
        "quarter as large on each side, without a network after the search. The label is read off the update. The "
        "bound is what the closest code "
        "that a descent finds shows, the authors' what least squares do. The authors' search, given the label, was "
        "measured on other random weights of the same network.",
        "",
        *table(HEAD, [table_row(row) for row in found]),
    ]
    publish("rog_photos", {"settings": {"iterations": given.iterations}, "rows": found}, lines)


if __name__ == "__main__":
    main()
