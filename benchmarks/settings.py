"""Which settings of a search are best, network by network: `python -m benchmarks.settings` (needs HYPERLEAK_DATA).

Every setting of a small grid on the same images, networks and starts: the one with the highest mean PSNR, what the
attack has by default, in as many iterations each. Images for choosing are not those that
the chosen setting is measured on.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from attacks.matching import Matching
from benchmarks.common import publish, table
from benchmarks.leakage import Seen, rows, seen, timed
from eval.score import Row
from eval.statistics import Interval, mean_interval, paired_difference
from fl.methods.fedavg import FedAvg

FIRST = 300
"""The first of the test images used."""
HEAD = ["attack", "network", "images of", "setting", "for choosing", "on others", "above the default", "CPU s an image"]


@dataclass(frozen=True)
class Sweep:
    """A grid.

    Attributes:
        attack: its name.
        network: of the victims, one step of FedAvg on one image each.
        dataset: of the images.
        grid: values by setting.
        iterations: of every search.
    """

    attack: str
    network: str
    dataset: str
    grid: Mapping[str, tuple[Any, ...]]
    iterations: int

    def points(self) -> list[dict[str, Any]]:
        """Every combination."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


IG = {"tv": (0.0, 1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 1e-1), "lr": (0.1,)}
SWEEPS = (
    Sweep("ig", "hyperfl-colour", "cifar10", IG, 1000),
    Sweep("ig", "hyperfl-grey", "fashion_mnist", IG, 1000),
    Sweep("ig", "hyperfl-grey", "handwritten62", IG, 1000),
    Sweep("ig", "lenet-zhu", "cifar10", IG, 1000),
    Sweep("rog", "lenet-zhu", "cifar10", {"factor": (1, 2, 4), "tv": (0.0, 1e-4, 1e-2)}, 500),
)


def victims(sweep: Sweep, first: int, images: int) -> list[Seen]:
    """Views of one step on so many test images from number `first` on."""
    data = fl.data.load(sweep.dataset)
    chosen = data.test.take(torch.arange(first, first + images))
    task = fl.models.build(sweep.network, num_classes=len(data.class_names), seed=0)
    return seen(task, FedAvg(lr=1.0, steps=1, batch_size=None), chosen, 0)


def scored(sweep: Sweep, setting: Mapping[str, Any], on: list[Seen]) -> tuple[list[Row], float]:
    """Rows, and CPU seconds an image."""
    attack = attacks.build({"name": sweep.attack, **setting, "iterations": sweep.iterations})
    results, seconds = timed(attack, on, 0)
    return rows(results, on, 0), seconds / len(on)


def swept(sweep: Sweep, images: int) -> tuple[list[list[object]], dict[str, Any]]:
    """Rows of the table, best first, and the figures behind them."""
    own = attacks.build(sweep.attack)
    assert isinstance(own, Matching)
    default = {key: getattr(own, key) for key in sweep.grid}
    settings = sweep.points()
    if default not in settings:
        settings.append(default)
    choosing, others = victims(sweep, FIRST, images), victims(sweep, FIRST + images, images)
    found = [(setting, *scored(sweep, setting, choosing)) for setting in settings]
    found.sort(key=lambda one: -mean_interval(one[1]).value)
    kept = [one for i, one in enumerate(found) if i == 0 or one[0] == default]
    base, _ = scored(sweep, default, others)
    body: list[list[object]] = []
    for setting, data, seconds in kept:
        again = base if setting == default else scored(sweep, setting, others)[0]
        words = ", ".join(f"{key} {value:g}" for key, value in setting.items())
        gain = "the default" if setting == default else written(paired_difference(again, base))
        means = written(mean_interval(data)), written(mean_interval(again))
        body.append([sweep.attack, sweep.network, sweep.dataset, words, *means, gain, f"{seconds:.1f}"])
    raw = [{"setting": setting, "psnr": [row["psnr"] for row in data]} for setting, data, _ in found]
    return body, {"attack": sweep.attack, "network": sweep.network, "dataset": sweep.dataset, "grid": raw}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8, help="for choosing, and as many others to measure on")
    given = parser.parse_args()
    torch.set_num_threads(1)
    body, raw, begin = [], [], time.process_time()
    for sweep in SWEEPS:
        lines, figures = swept(sweep, given.images)
        body += lines
        raw.append(figures)
        report(body, raw, given.images, time.process_time() - begin)


def report(body: list[list[object]], raw: list[dict[str, Any]], images: int, seconds: float) -> None:
    """Write what there is so far."""
    done = SWEEPS[: len(raw)]
    grids = [f"- `{s.attack}` on `{s.network}`, {s.iterations} iterations: {_grid(s)}" for s in done]
    lines = [
        "# The best settings of a small grid, PSNR in dB, batch 1, untrained networks, FedAvg, labels read off",
        "",
        f"{images} test images for choosing and {images} others; means with 95 % intervals over images, and the paired "
        "difference on the others. Whatever isn't named has its default. Every combination of",
        "",
        *grids,
        "",
        *table(HEAD, body),
        "",
        f"All of it took {seconds / 60:.0f} CPU minutes.",
    ]
    publish("settings", {"sweeps": raw, "images": images}, lines)


def written(interval: Interval) -> str:
    """A figure with its interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.1f}"
    return f"{interval.value:.1f} [{interval.low:.1f}, {interval.high:.1f}]"


def _grid(sweep: Sweep) -> str:
    return ", ".join(f"{key} of {', '.join(f'{value:g}' for value in values)}" for key, values in sweep.grid.items())


if __name__ == "__main__":
    main()
