"""A learned inverter beside a search: `HYPERLEAK_DATA=... python -m benchmarks.lti [--steps N] [--iterations N]`.

Fashion-MNIST on the untrained sigmoid LeNet of Zhu et al., one step on one image in float32, no label given. Victims
are test images; the inverter learns on the training images, which hold none of them. Both attacks know the defence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

import fl.data
import fl.models
from attacks import Attack, Reconstruction
from attacks.base import build
from benchmarks.common import publish, table
from defenses import defenses
from eval import metrics
from eval.statistics import Interval, mean_interval, paired_difference
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.types import Batch, ServerView

SET = "fashion_mnist"
DEFENSES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "prune, a tenth kept": {"name": "prune", "ratio": 0.9},
    "qsgd, 4 bits": {"name": "qsgd", "bits": 4},
    "signsgd": {"name": "signsgd"},
    "noise as strong as the update": {"name": "noise", "std": 1.0},
}


def observed(images: Sequence[Batch], classes: int, defense: dict[str, Any]) -> list[ServerView]:
    """What the server sees of one client for each image."""
    task = fl.models.build("lenet-zhu", num_classes=classes, input_shape=(1, 28, 28), seed=0)
    client = Client(task, FedAvg(lr=0.1, steps=1), defenses.build(defense))
    run = Federation(client, [ClientData(image, image) for image in images])
    return [run.observe(i)[0] for i in range(len(images))]


def attacked(attack: Attack, views: list[ServerView], images: Sequence[Batch]) -> tuple[list[dict[str, Any]], float]:
    """PSNR of every image, and CPU seconds in all."""
    began = time.process_time()
    results = attack.run(views, list(range(len(views))))
    seconds = time.process_time() - began
    rows = []
    for i, (result, image) in enumerate(zip(results, images, strict=True)):
        assert isinstance(result, Reconstruction)
        assert result.inputs is not None
        rows.append({"image": i, "psnr": float(metrics.psnr(result.inputs, image.inputs)[0])})
    return rows, seconds


def shown(figure: Interval) -> str:
    """A mean with its interval."""
    return f"{figure.value:.1f} [{figure.low:.1f}, {figure.high:.1f}]"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--first", type=int, default=500, help="number of the first test image")
    parser.add_argument("--steps", type=int, default=3000, help="of the inverter's training")
    parser.add_argument("--iterations", type=int, default=1000, help="of the search")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = fl.data.load(SET)
    images = [data.test.take(torch.tensor([chosen.first + i])) for i in range(chosen.images)]
    contenders = {
        "lti": build({"name": "lti", "auxiliary": SET, "part": "train", "iterations": chosen.steps}),
        "ig": build({"name": "ig", "iterations": chosen.iterations}),
    }
    mean = data.train.inputs.mean(0, keepdim=True)
    floor = sum(float(metrics.psnr(mean, image.inputs)[0]) for image in images) / len(images)
    found, body = [], []
    for label, defense in DEFENSES.items():
        views = observed(images, data.num_classes, defense)
        rows, seconds = {}, {}
        for name, attack in contenders.items():
            rows[name], seconds[name] = attacked(attack, views, images)
            found += [{"defense": label, "attack": name, "seconds": seconds[name], **row} for row in rows[name]]
        cells = [shown(mean_interval(rows[name])) for name in contenders]
        cells += [shown(paired_difference(rows["lti"], rows["ig"]))]
        body.append([label, *cells, *(f"{seconds[name]:.0f}" for name in contenders)])
    lines = [
        "# A learned inverter beside a search",
        "",
        f"PSNR in dB on {chosen.images} test images of Fashion-MNIST from number {chosen.first} on: untrained sigmoid "
        "LeNet, FedAvg, one step on one image in float32, no label given; both attacks know the defence. `lti` learns "
        f"on {len(data.train)} training images, in {chosen.steps} steps on 64 imitated updates; `ig` takes "
        f"{chosen.iterations} iterations at its defaults. The mean of the training images has {floor:.1f} dB. Brackets "
        "are 95 % intervals over images, differences are paired. CPU seconds for all images, one thread, training "
        "included.",
        "",
        *table(["defence", "`lti`", "`ig`", "difference", "`lti`, seconds", "`ig`, seconds"], body),
    ]
    publish("lti", {"floor": floor, "rows": found}, lines)


if __name__ == "__main__":
    main()
