"""Draw the picture of the README from a finished run of exact-beside-search.yaml.

Usage: hyperleak run docs/images/exact-beside-search.yaml --out results/exact-beside-search
       python docs/images/exact_beside_search.py results/exact-beside-search
"""

import json
import sys
from pathlib import Path
from statistics import median

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

ROWS = (
    ("fedavg", "ig", "FedAvg, search"),
    ("fedavg", "cascade", "FedAvg, exact"),
    ("hyperfl", "peel+ig", "HyperFL, search"),
    ("hyperfl", "peel+cascade", "HyperFL, exact"),
)
INK, FAINT = "#1b1f24", "#59636e"


def main(run: Path) -> None:
    """Draw true images above what each attack made of their updates; the PSNR is the median over the images shown."""
    rows = [json.loads(line) for line in (run / "images.jsonl").read_text().splitlines()]
    arrays = {
        (method, attack): np.load(run / "images" / f"{method}-none-{attack}-round0-seed0.npz")
        for method, attack, _ in ROWS
    }
    truth = next(iter(arrays.values()))["original"]
    lines = [("the client's picture", "", truth)]
    for method, attack, label in ROWS:
        psnr = [row["psnr"] for row in rows if (row["method"], row["attack"]) == (method, attack)]
        found = arrays[method, attack]["reconstruction"]
        exact = np.abs(found - truth).max() < 0.5 / 255
        lines.append((label, f"{attack}: {'every pixel' if exact else f'{median(psnr):.0f} dB'}", found))
    figure, axes = plt.subplots(len(lines), len(truth), figsize=(8.4, 5.3), dpi=160)
    figure.subplots_adjust(left=0.235, right=0.995, top=0.99, bottom=0.01, wspace=0.05, hspace=0.05)
    for (label, note, images), strip in zip(lines, axes, strict=True):
        for image, axis in zip(images, strip, strict=True):
            axis.imshow(image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.axis("off")
        strip[0].text(-0.12, 0.62 if note else 0.5, label, transform=strip[0].transAxes, ha="right", va="center",
                      fontsize=11, color=INK, weight="bold")  # fmt: skip
        strip[0].text(
            -0.12, 0.36, note, transform=strip[0].transAxes, ha="right", va="center", fontsize=10, color=FAINT
        )
    target = Path(__file__).with_suffix(".png").with_name("exact-beside-search.png")
    figure.savefig(target, facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
