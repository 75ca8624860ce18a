"""Which small networks `cascade` solves, and which it refuses.

Run it by `python -m benchmarks.exact.cascade_ends [--kinds NAME...] [--images N] [--quick] [--resume]
[--most SECONDS]` (needs HYPERLEAK_DATA).

Untrained networks of a dozen kinds, one step on one image in float32, no label and no classifier: what comes back, in
how many seconds, or the reason why nothing does. Image i meets the network of seed i. `--quick` takes one image of
every kind and publishes nothing. Kinds that are left out keep what was measured last; with `--resume` so do images that
were measured on this machine, except those that were stopped sooner than `--most` says.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fl.data
from attacks import Reconstruction
from attacks.base import build
from benchmarks.common import RESULTS, machine, publish, table
from benchmarks.exact.cascade import score_image
from benchmarks.exact.residual import TooLongError, attacks_state, stopped_after
from defenses import defenses
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.layers import Normalize
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch, Task
from fl.view import ServerView

PRECISE = 1e-5
"""Share of themselves by which features may be off."""
FIRST = 2000
"""Number of the first test image: none of them was looked at while the attack was written."""
Layers = Callable[[], Sequence[nn.Module]]


@dataclass(frozen=True)
class Kind:
    """A network and how its victim trains.

    Attributes:
        layers: makes those below the classifier.
        data: whose test images it is shown.
        size: height and width to which images are brought, or None for their own.
        lr: step size.
        normalize: whether the network normalizes its images by a mean and deviation of .5.
        defense: settings of a defense.
    """

    layers: Layers
    data: str = "cifar10"
    size: int | None = None
    lr: float = 0.01
    normalize: bool = True
    defense: dict[str, Any] = field(default_factory=lambda: {"name": "none"})

    @property
    def channels(self) -> int:
        """Of an image."""
        return 3 if self.data == "cifar10" else 1


def _wide(channels: int, activation: Callable[[], nn.Module], kernel: int = 5, filters: int = 16) -> list[nn.Module]:
    """Return two convolutions of an own activation behind max pooling, with filters enough."""
    return [
        *(nn.Conv2d(channels, filters, kernel), nn.MaxPool2d(2), activation()),
        *(nn.Conv2d(filters, 2 * filters, kernel), nn.MaxPool2d(2), activation()),
        *(nn.Flatten(), nn.LazyLinear(64), activation()),
    ]


def _classic(channels: int, activation: Callable[[], nn.Module], pool: Callable[[int], nn.Module]) -> list[nn.Module]:
    """6 and 16 filters of 5x5, an activation before pooling, and linear layers of 120 and 84."""
    return [
        *(nn.Conv2d(channels, 6, 5, padding=0 if channels == 3 else 2), activation(), pool(2)),
        *(nn.Conv2d(6, 16, 5), activation(), pool(2)),
        *(nn.Flatten(), nn.LazyLinear(120), activation(), nn.LazyLinear(84), activation()),
    ]


def _pairs(channels: int, widths: Sequence[int], padding: int) -> list[nn.Module]:
    """Return two convolutions of 3x3 before each pooling."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=padding), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return [*layers, nn.Flatten(), nn.LazyLinear(128), nn.ReLU()]


def _overlapping(channels: int) -> list[nn.Module]:
    """Max pooling whose windows of 3x3 lie 2 apart, as in AlexNet."""
    return [
        *(nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.LazyLinear(128), nn.ReLU()),
    ]


def leaky() -> nn.Module:
    """Return the activation of most kinds."""
    return nn.LeakyReLU(0.01)


KINDS: dict[str, Kind] = {
    "Flower's quickstart": Kind(lambda: _classic(3, nn.ReLU, nn.MaxPool2d)),
    "Flower's quickstart, step 1": Kind(lambda: _classic(3, nn.ReLU, nn.MaxPool2d), lr=1.0),
    "LeNet-5, tanh": Kind(lambda: _classic(1, nn.Tanh, nn.AvgPool2d), "mnist"),
    "LeNet-5, sigmoid": Kind(lambda: _classic(1, nn.Sigmoid, nn.AvgPool2d), "mnist"),
    "LeNet-5, relu": Kind(lambda: _classic(1, nn.ReLU, nn.AvgPool2d), "mnist"),
    "LeNet-5, max pooling": Kind(lambda: _classic(1, nn.ReLU, nn.MaxPool2d), "mnist"),
    "PyTorch's MNIST example": Kind(
        lambda: [
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU()),
        ],
        "mnist",
    ),
    "two convolutions a pooling": Kind(lambda: _pairs(3, (32, 64), 1)),
    "overlapping pooling": Kind(lambda: _overlapping(3)),
    "overlapping pooling, gray": Kind(lambda: _overlapping(1), "mnist"),
    "64 pixels": Kind(lambda: _wide(3, leaky), size=64),
    "few 3x3 filters": Kind(lambda: _wide(3, leaky, 3, 8)),
    "few 3x3 filters, relu, gray": Kind(lambda: _wide(1, nn.ReLU, 3), "mnist"),
    **{f"{act.__name__}": Kind(partial(_wide, 3, act)) for act in (nn.ReLU, nn.ELU, nn.ReLU6, nn.GELU, nn.SiLU)},
    "small step, not normalized": Kind(lambda: _wide(3, leaky), lr=1e-3, normalize=False),
    "noise 1e-4": Kind(lambda: _wide(3, leaky), defense={"name": "noise", "std": 1e-4}),
}


def victim(kind: Kind, data: Batch, number: int) -> tuple[ServerView, Batch]:
    """Return what the server sees of image `number`, and the image."""
    image = data.take(torch.tensor([number]))
    if kind.size is not None:
        larger = F.interpolate(image.inputs, size=(kind.size, kind.size), mode="bilinear", align_corners=False)
        image = Batch((larger * 255).round() / 255, image.labels)
    client = Client(task_of(kind, image, number), FedAvg(lr=kind.lr, steps=1), defenses.build(kind.defense))
    return Federation(client, [ClientData(image, image)], seed=number).observe(0)[0], image


def task_of(kind: Kind, image: Batch, seed: int) -> Task:
    """Return the network of a seed for such images, its weights drawn as PyTorch draws them."""
    shape = (kind.channels, *image.inputs.shape[2:])
    mean, std = ((0.5,) * kind.channels,) * 2 if kind.normalize else ((0.0,) * kind.channels, (1.0,) * kind.channels)
    body = nn.Sequential(*kind.layers())
    features = body(torch.zeros(1, *shape)).shape[1]  # makes the lazy layers, too
    layers = OrderedDict[str, nn.Module](body=body, head=nn.Linear(features, 10))
    draw = stream(seed, "weights")
    for layer in (*body, layers["head"]):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = layer.weight[0].numel() ** -0.5
            for value in (layer.weight, layer.bias):
                assert value is not None
                nn.init.uniform_(value, -bound, bound, draw)
    if kind.normalize:
        layers = OrderedDict[str, nn.Module](normalize=Normalize(mean, std), **layers)
    return Task(nn.Sequential(layers), shape, 10, head="head.", mean=mean, std=std)


def attack_victim(kind: Kind, data: Batch, number: int, most: float = math.inf) -> dict[str, Any]:
    """Return what the attack makes of image `number` within so many CPU seconds."""
    view, image = victim(kind, data, number)
    began = time.process_time()
    try:
        with stopped_after(most):
            result = build("cascade")(view)
    except TooLongError:
        reason = f"no answer in {most:g} CPU seconds, after which it was stopped"
        spent = time.process_time() - began
        return {"image": number, "reason": reason, "stopped": most, "seconds": spent, "attacks": attacks_state()}
    row = {
        "image": number,
        **score_image(result, image),
        "seconds": time.process_time() - began,
        "attacks": attacks_state(),
    }
    if not isinstance(result, Reconstruction):
        return row
    off = {
        n.removeprefix("residual/"): float(dense(v).max())
        for n, v in result.private.items()
        if n.startswith("residual/")
    }
    features = _features_off(kind, image, number, result)
    return {**row, "verified": bool(result.verified), "residuals": off, "features": features, "note": result.note}


def _features_off(kind: Kind, image: Batch, number: int, result: Reconstruction) -> float | None:
    """By which share of itself the lowest solved input of a layer is off; None where a result has none."""
    model, keys = task_of(kind, image, number).model, [key for key in result.private if key.startswith("features/")]
    if not keys:
        return None
    seen: list[torch.Tensor] = []
    layer = model.get_submodule(keys[0].removeprefix("features/").split("+")[0].removesuffix(".weight"))
    layer.register_forward_pre_hook(lambda _, taken: seen.append(taken[0]))
    with torch.no_grad():
        model(image.inputs)
    given = dense(result.private[keys[0]])  # of a layer behind a flattening as they were before it
    return float((given.flatten() - seen[0].flatten()).norm() / seen[0].norm())


def table_row(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Shares, median and cost of one row of the table."""
    solved = [row for row in rows if "psnr" in row]
    seconds = f"{statistics.median(row['seconds'] for row in rows):.1f}"
    if not solved:
        first = rows[0]
        words = first["reason"] if "stopped" in first else f"refused: {first['reason']}"
        return [f"{len(rows)}", "0", "0", "0", "-", "-", seconds, words]
    psnr: list[float] = [row["psnr"] for row in solved]
    wrong = sum(row["verified"] and not row["exact"] for row in solved)
    off = [row["features"] for row in solved if row.get("features") is not None and not row["exact"]]
    return [
        f"{len(rows)}",
        f"{sum(row['exact'] for row in solved)}",
        f"{sum(row['verified'] for row in solved)}",
        f"{wrong}",
        f"{statistics.median(psnr):.1f} ({min(psnr):.1f})",
        f"{sum(x < PRECISE for x in off)} of {len(off)}, {statistics.median(off):.0e}" if off else "-",
        seconds,
        next((row["note"] for row in solved if row["note"]), ""),
    ]


def document(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the results in words."""
    body = [[kind, *table_row(own)] for kind in KINDS if (own := [row for row in rows if row["kind"] == kind])]
    missing = [kind for kind in KINDS if all(row["kind"] != kind for row in rows)]
    head = ["network", "images", "8-bit exact", "verified", "verified, not exact", "median dB (least)"]
    return [
        "# Networks that `cascade` solves or refuses",
        "",
        "Untrained networks, one step on one image in float32, no label, no classifier. The step is of size 0.01 where "
        "no other is named. Colored images are of CIFAR-10, gray ones of MNIST, all test images that the attack "
        "was not developed on. CPU seconds, one thread. Features: of how many pictures that are not exact the lowest "
        f"input of a layer that was solved for is right to {PRECISE:.0e} of itself, and its median error. The last "
        "column: the attack's own words of the first picture that it was not satisfied with.",
        "",
        *table([*head, "features", "median seconds", "what it said"], body),
        *(["", f"Not measured: {'; '.join(missing)}."] if missing else []),
        "",
        "Images met several states of the attack's code. `cascade_ends.json` names the state for every image "
        "(`attacks`), and `git rev-parse --short HEAD:attacks` that of a checkout.",
    ]


def _measured() -> list[dict[str, Any]]:
    """Return the committed rows, if they were timed on this machine."""
    path = RESULTS / "cascade_ends.json"
    last = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return list(last["rows"]) if last.get("machine") == machine() else []


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--first", type=int, default=FIRST, help="number of the first test image")
    parser.add_argument("--quick", action="store_true", help="one image of every kind, printed and not published")
    parser.add_argument("--resume", action="store_true", help="measure only images that were not measured")
    parser.add_argument("--most", type=float, default=math.inf, help="CPU seconds for an image, then it is stopped")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    images: dict[str, Batch] = {}
    kept = [] if chosen.quick else _measured()
    numbers = range(chosen.first, chosen.first + (1 if chosen.quick else chosen.images))

    def is_short(row: dict[str, Any]) -> bool:
        """Return whether a row is of an image that was stopped sooner than it will be now."""
        return row["image"] in numbers and row.get("stopped", math.inf) < chosen.most

    rows = [row for row in kept if row["kind"] not in chosen.kinds or (chosen.resume and not is_short(row))]
    done = {(row["kind"], row["image"]) for row in rows}
    for name in chosen.kinds:
        kind = KINDS[name]
        if kind.data not in images:
            images[kind.data] = fl.data.load(kind.data).test
        for number in numbers:
            if (name, number) in done:
                continue
            rows.append({"kind": name, **attack_victim(kind, images[kind.data], number, chosen.most)})
            if chosen.quick:
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
            else:  # at once, so that what is measured stays if this is stopped
                publish("cascade_ends", {"rows": rows}, document(rows))


if __name__ == "__main__":
    main()
