"""A learned inverter beside searches.

Run it by `python -m benchmarks.leakage.lti [--steps N] [--iterations N]` (needs HYPERLEAK_DATA).

Fashion-MNIST on the untrained sigmoid LeNet of Zhu et al., one step on one image in float32, no label given. Victims
are test images; the inverter learns on the training images, which hold none of them. All attacks know the defense.
`--attack` measures some again and keeps the others' rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import fl.data
import fl.models
from attacks import Attack, Reconstruction
from attacks.base import build
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.rog import ROG
from benchmarks.common import RESULTS, publish, table
from defenses import defenses
from eval.metrics import image as metrics
from eval.metrics.statistics import Interval, mean_interval, paired_difference
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.types import Batch
from fl.view import ServerView

SET = "fashion_mnist"
DEFENSES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "prune, a tenth kept": {"name": "prune", "ratio": 0.9},
    "qsgd, 4 bits": {"name": "qsgd", "bits": 4},
    "signsgd": {"name": "signsgd"},
    "noise as strong as the update": {"name": "noise", "std": 1.0},
}

NAMES = ("lti", "ig", "rog")
HEAD = ["defense", *(f"`{name}`" for name in NAMES), "`lti` - `ig`", "`rog` - `ig`", *(f"`{n}`, s" for n in NAMES)]


def observed(images: Sequence[Batch], classes: int, defense: dict[str, Any]) -> list[ServerView]:
    """Return what the server sees of one client for each image."""
    shape = tuple(images[0].inputs.shape[1:])
    task = fl.models.build("lenet-zhu", num_classes=classes, input_shape=shape, seed=0)
    client = Client(task, FedAvg(lr=0.1, steps=1), defenses.build(defense))
    run = Federation(client, [ClientData(image, image) for image in images])
    return [run.observe(i)[0] for i in range(len(images))]


def attack_images(
    attack: Attack, views: list[ServerView], images: Sequence[Batch]
) -> tuple[list[dict[str, Any]], float]:
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


def format_figure(figure: Interval) -> str:
    """Return a mean with its interval."""
    return f"{figure.value:.1f} [{figure.low:.1f}, {figure.high:.1f}]"


def before(again: Sequence[str], images: int) -> list[dict[str, Any]]:
    """Return the rows of an earlier run that are not measured `again`.

    Raises:
        ValueError: they are of another number of images.
    """
    rows = [row for row in json.loads((RESULTS / "lti.json").read_text())["rows"] if row["attack"] not in again]
    for label in DEFENSES:
        for name in set(NAMES) - set(again):
            if sum((row["defense"], row["attack"]) == (label, name) for row in rows) != images:
                raise ValueError(f"expected {images} images of {name} under {label}: run it again with --attack")
    return rows


def part(found: Sequence[dict[str, Any]], label: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of one attack under one defense."""
    return [row for row in found if (row["defense"], row["attack"]) == (label, name)]


def table_row(label: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a defense's line of the table: means, differences to `ig`, seconds."""
    data = {name: part(found, label, name) for name in NAMES}
    means = [format_figure(mean_interval(rows)) for rows in data.values()]
    apart = [format_figure(paired_difference(data[name], data["ig"])) for name in NAMES if name != "ig"]
    return [label, *means, *apart, *(f"{rows[0]['seconds']:.0f}" for rows in data.values())]


def verdict(found: Sequence[dict[str, Any]], first: str, second: str) -> list[object]:
    """Under how many defenses one attack is above, or below, another by more than chance."""
    labels = [label for label in DEFENSES if label != "none"]
    gaps = [paired_difference(part(found, label, first), part(found, label, second)) for label in labels]
    above, below = sum((gap.low or 0) > 0 for gap in gaps), sum((gap.high or 0) < 0 for gap in gaps)
    return [f"`{first}`", f"`{second}`", above, below, len(labels) - above - below]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--first", type=int, default=500, help="number of the first test image")
    parser.add_argument("--steps", type=int, default=3000, help="of the inverter's training")
    parser.add_argument("--iterations", type=int, default=1000, help="of ig")
    parser.add_argument("--attack", choices=NAMES, action="append", help="to measure; all by default")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = fl.data.load(SET)
    images = [data.test.take(torch.tensor([chosen.first + i])) for i in range(chosen.images)]
    mean = data.train.inputs.mean(0, keepdim=True)
    floor = sum(float(metrics.psnr(mean, image.inputs)[0]) for image in images) / len(images)
    settings: dict[str, dict[str, Any]] = {
        "lti": {"auxiliary": SET, "part": "train", "iterations": chosen.steps},
        "ig": {"iterations": chosen.iterations},
        "rog": {},
    }
    attacks = {name: build({"name": name, **own}) for name, own in settings.items()}
    again = chosen.attack or list(NAMES)
    found = before(again, chosen.images) if set(again) != set(NAMES) else []
    for label, defense in DEFENSES.items():
        views = observed(images, data.num_classes, defense)
        for name in again:
            rows, seconds = attack_images(attacks[name], views, images)
            found += [{"defense": label, "attack": name, "seconds": seconds, **row} for row in rows]
    lines = document(found, floor, chosen, attacks, training_images=len(data.train))
    publish("lti", {"floor": floor, "rows": found}, lines)


def document(
    found: Sequence[dict[str, Any]],
    floor: float,
    chosen: argparse.Namespace,
    attacks: Mapping[str, Attack],
    *,
    training_images: int,
) -> list[str]:
    """Return the page.

    Args:
        found: all rows.
        floor: PSNR of the mean of the training images.
        chosen: by the command line.
        attacks: that were measured, by name.
        training_images: how many the inverter learned on.
    """
    search, rog = attacks["ig"], attacks["rog"]
    assert isinstance(search, GradientMatching)
    assert isinstance(rog, ROG)
    return [
        "# A learned inverter beside searches",
        "",
        f"PSNR in dB on {chosen.images} test images of Fashion-MNIST from number {chosen.first} on: untrained sigmoid "
        "LeNet, FedAvg, one step on one image in float32, no label given; all attacks know the defense. `lti` learns "
        f"on {training_images} training images, in {chosen.steps} steps. Each step takes 64 imitated updates. The "
        "searches have their defaults. "
        f"`ig` takes {search.iterations} iterations with a total variation of {search.tv_weight:g}. `rog` takes "
        f"{rog.iterations} with {rog.tv_weight:g}. The codes of `rog` are {rog.factor} times smaller on each side, its "
        f"objective is {rog.objective}. The mean of all training images has {floor:.1f} dB. Brackets are 95 % "
        "intervals "
        "over images, differences are paired. CPU seconds for "
        "all images, one thread, training included.",
        "",
        *table(HEAD, [table_row(label, found) for label in DEFENSES]),
        "",
        "Under how many of the defenses an attack is above or below another, by 95 % intervals that leave out 0:",
        "",
        *table(
            ["attack", "than", "above", "below", "not told apart"],
            [verdict(found, *pair) for pair in (("lti", "ig"), ("rog", "ig"), ("lti", "rog"))],
        ),
    ]


if __name__ == "__main__":
    main()
