"""What ROG's trained networks add.

Run it by `python -m benchmarks.leakage.rog_spaces [--images N] [--steps N]` (needs HYPERLEAK_DATA).

CIFAR-10 test images on the untrained sigmoid LeNet of Zhu et al., one step on one image in float32, no label given. The
decoders and the enhancer are trained by `attacks.gradient_matching.engine.image_networks` on the training images of
CIFAR-100, none of which is among the victims'. All attacks know the defense.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fl.data
import fl.models
from attacks.base import build
from attacks.gradient_matching.engine import image_networks
from benchmarks.common import publish, table
from benchmarks.leakage.lti import DEFENSES, attack_images, format_figure, observed, part
from eval.metrics.statistics import mean_interval, paired_difference

PUBLIC, VICTIMS, FIRST = "cifar100", "cifar10", 500
NETWORKS = {"decoder, half a side": ("decoder", 2), "decoder, a quarter": ("decoder", 4), "enhancer": ("enhancer", 2)}
ITERATIONS = 500

Networks = dict[str, str]
"""Paths of the trained networks, by what they are."""


def trained(folder: Path, steps: int) -> tuple[Networks, dict[str, float]]:
    """Return the networks' files, and the CPU seconds that training each took."""
    images = fl.data.load(PUBLIC).train.inputs
    paths, seconds = {}, {}
    for what, (kind, factor) in NETWORKS.items():
        began = time.process_time()
        network = image_networks.train(kind, images, factor=factor, steps=steps)
        seconds[what] = time.process_time() - began
        paths[what] = str(folder / f"{kind}{factor}.npz")
        image_networks.save(network, Path(paths[what]), f"{PUBLIC}, {steps} steps, seed 0")
    return paths, seconds


def searches(paths: Networks) -> dict[str, dict[str, Any]]:
    """Return the attacks' settings, by the head of their column."""
    rog = {"name": "rog", "iterations": ITERATIONS}
    return {
        "`ig`": {"name": "ig", "iterations": ITERATIONS},
        "`rog`, bicubic": rog,
        "bicubic, enhanced": {**rog, "enhancer": paths["enhancer"]},
        "decoder, half a side": {**rog, "decoder": paths["decoder, half a side"], "tv_weight": 0.0},
        "decoder, a quarter": {**rog, "decoder": paths["decoder, a quarter"], "tv_weight": 0.0},
    }


def document(rows: list[dict[str, Any]], names: list[str], training: dict[str, float]) -> list[str]:
    """Return the results in words."""
    body = []
    for label in dict.fromkeys(row["defense"] for row in rows):
        data = {name: part(rows, label, name) for name in names}
        gaps = [format_figure(paired_difference(data[name], data[names[1]])) for name in names if name != names[1]]
        body.append([label, *(format_figure(mean_interval(each)) for each in data.values()), *gaps])
    apart = [f"{name} - bicubic" for name in names if name != names[1]]
    return [
        "# ROG with trained networks",
        "",
        "CIFAR-10 test images on the untrained sigmoid LeNet of Zhu et al., one step of FedAvg on an image in float32; "
        f"PSNR in dB, mean and 95 % interval, and paired differences. {ITERATIONS} iterations each, other settings by "
        "default, decoders without total variation. Codes are half a side for bicubic interpolation, and what was "
        f"found with them is enhanced.",
        "",
        *table(["defense", *names, *apart], body),
        "",
        "The networks were trained on the training images of CIFAR-100:",
        "",
        *table(["network", "CPU s"], [[what, f"{seconds:.0f}"] for what, seconds in training.items()]),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500, help="of the networks' training")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = fl.data.load(VICTIMS)
    images = [data.test.take(torch.tensor([FIRST + i])) for i in range(given.images)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths, training = trained(Path(folder), given.steps)
        attacks = searches(paths)
        for label, defense in DEFENSES.items():
            views = observed(images, data.num_classes, defense)
            for name, settings in attacks.items():
                found, seconds = attack_images(build(settings), views, images)
                rows += [{**row, "seed": 0, "defense": label, "attack": name, "seconds": seconds} for row in found]
            publish("rog_spaces", {"training": training, "rows": rows}, document(rows, list(attacks), training))


if __name__ == "__main__":
    main()
