"""Draw what attacks read off the same updates, from a finished run of exact-beside-search.yaml or residual-batch.yaml.

Usage: hyperleak run docs/images/exact-beside-search.yaml --out results/exact-beside-search
       python docs/images/exact_beside_search.py results/exact-beside-search

The picture is named as the run's folder is.
"""

import json
import sys
from pathlib import Path
from statistics import median

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

ROWS = {
    "exact-beside-search": (
        ("fedavg", "ig", "FedAvg, search"),
        ("fedavg", "cascade", "FedAvg, exact"),
        ("hyperfl", "peel+ig", "HyperFL, search"),
        ("hyperfl", "peel+cascade", "HyperFL, exact"),
    ),
    "residual-batch": (
        ("fedavg", "ig", "search"),
        ("fedavg", "backsolve", "exact"),
    ),
}
INK, FAINT = "#1b1f24", "#59636e"


def main(run: Path) -> None:
    """Draw true images above what each attack made of their updates; the PSNR is the median over the images shown."""
    rows, shown = [json.loads(line) for line in (run / "images.jsonl").read_text().splitlines()], ROWS[run.name]
    arrays = {
        (method, attack): np.load(run / "images" / f"{method}-none-{attack}-round0-seed0.npz")
        for method, attack, _ in shown
    }
    truth = next(iter(arrays.values()))["original"]
    lines = [("the client's picture", "", truth)]
    for method, attack, label in shown:
        psnr = [row["psnr"] for row in rows if (row["method"], row["attack"]) == (method, attack)]
        found = arrays[method, attack]["reconstruction"]
        exact = np.abs(found - truth).max() < 0.5 / 255
        lines.append((label, f"{attack}: {'every pixel' if exact else f'{median(psnr):.0f} dB'}", found))
    width, left = (1.075 * len(truth) + 1.95, 0.235 if len(truth) > 4 else 0.29)
    figure, axes = plt.subplots(len(lines), len(truth), figsize=(width, 1.06 * len(lines)), dpi=160)
    figure.subplots_adjust(left=left, right=0.995, top=0.99, bottom=0.01, wspace=0.05, hspace=0.05)
    for (label, note, images), strip in zip(lines, axes, strict=True):
        for image, axis in zip(images, strip, strict=True):
            axis.imshow(image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.axis("off")
        strip[0].text(-0.12, 0.62 if note else 0.5, label, transform=strip[0].transAxes, ha="right", va="center",
                      fontsize=11, color=INK, weight="bold")  # fmt: skip
        strip[0].text(
            -0.12, 0.36, note, transform=strip[0].transAxes, ha="right", va="center", fontsize=10, color=FAINT
        )
    figure.savefig(Path(__file__).with_name(f"{run.name}.png"), facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
