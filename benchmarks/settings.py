"""Which settings of a search are best, network by network: `python -m benchmarks.settings` (needs HYPERLEAK_DATA).

Every setting of a small grid on the same images, networks and starts: the one with the highest mean PSNR, what the
attack has by default, in as many iterations each. Images for choosing are not those that
the chosen setting is measured on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from benchmarks.common import RESULTS, publish, table
from benchmarks.leakage import Seen, rows, seen, timed
from eval.score import Row
from eval.statistics import Interval, mean_interval, paired_difference
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetwork import Hypernetwork

STEP: dict[str, Any] = {"steps": 1, "batch_size": None}
FIRST = 300
"""The first of the test images used."""
HEAD = ["attack", "network", "images of", "steps", "setting", "choosing", "on others", "above the default", "CPU s"]


@dataclass(frozen=True)
class Sweep:
    """A grid.

    Attributes:
        attack: its name.
        network: of the victims, one step on one image each.
        dataset: of the images.
        grid: values by setting.
        iterations: of every search; of `lti` the steps of its training.
        method: of the victims.
        fixed: settings that all have and the attack has not by default.
        images: for choosing, and as many others to measure on.
    """

    attack: str
    network: str
    dataset: str
    grid: Mapping[str, tuple[Any, ...]]
    iterations: int
    method: Method = field(default_factory=lambda: FedAvg(lr=1.0, **STEP))
    fixed: Mapping[str, Any] = field(default_factory=dict)
    images: int = 8

    @property
    def name(self) -> str:
        """All of it in words: what tells it from the others."""
        grid = ", ".join(f"{key} of {', '.join(_number(value) for value in row)}" for key, row in self.grid.items())
        fixed = "".join(f", {key} {_number(value)}" for key, value in self.fixed.items())
        what = f"`{self.attack}` on `{self.network}` ({self.method.name}, {self.dataset})"
        return f"{what}, {self.images} images, {self.iterations} iterations{fixed}: {grid}"

    def points(self) -> list[dict[str, Any]]:
        """Every combination."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


TV = {"tv": (0.0, 1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 1e-1), "lr": (0.1,)}
STEPS = {"tv": (3e-3, 1e-2), "lr": (0.03, 0.1, 0.3)}
ROG = {"factor": (1, 2, 4), "tv": (0.0, 1e-2)}
LBFGS = {"objective": ("l2", "cosine"), "max_step": (0.03, 0.1, 0.3)}
BILEVEL = {"tv": (1e-6, 1e-2), "head_lr": (1e-3, 1e-2)}
LTI = {"width": (256, 512), "lr": (1e-3, 3e-3)}
GROUP = {"tv": (1e-4, 1e-2), "group": (0.0, 0.01)}
HYPERFL = HyperFL(lr=0.01, head_epochs=0, parametrisation=Hypernetwork(init="scaled"), **STEP)
GREY, COLOUR = ("hyperfl-grey", "fashion_mnist"), ("hyperfl-colour", "cifar10")
SIGMOID = ("lenet-zhu", "cifar10")
SWEEPS = (
    Sweep("ig", *COLOUR, TV, 1000),
    Sweep("ig", *GREY, TV, 1000),
    Sweep("ig", "hyperfl-grey", "handwritten62", TV, 1000),
    Sweep("ig", *SIGMOID, TV, 1000),
    Sweep("rog", *SIGMOID, {"factor": (1, 2, 4), "tv": (0.0, 1e-4, 1e-2)}, 500),
    Sweep("ig", *COLOUR, STEPS, 500),
    Sweep("ig", *GREY, STEPS, 500),
    Sweep("ig", *SIGMOID, STEPS, 500),
    Sweep("rog", *GREY, ROG, 300),
    Sweep("rog", *COLOUR, ROG, 300),
    Sweep("joint", *GREY, {"tv": (1e-6, 1e-3, 1e-2)}, 300, HYPERFL, images=4),
    Sweep("bilevel", *GREY, BILEVEL, 300, HYPERFL, fixed={"lower_iterations": 50}, images=4),
    Sweep("dlg", *SIGMOID, LBFGS, 500),
    Sweep("idlg", *SIGMOID, LBFGS, 500),
    Sweep("lti", "lenet-zhu", "fashion_mnist", LTI, 300, fixed={"auxiliary": "fashion_mnist", "part": "train"}),
    Sweep("gradinversion", *GREY, GROUP, 300, images=4),
    Sweep("gradinversion", *SIGMOID, GROUP, 300, images=4),
)


def victims(sweep: Sweep, first: int) -> list[Seen]:
    """Views of one step on each of the test images from number `first` on."""
    data = fl.data.load(sweep.dataset)
    chosen = data.test.take(torch.arange(first, first + sweep.images))
    shape = {"input_shape": tuple(chosen.inputs.shape[1:])} if sweep.network == "lenet-zhu" else {}
    task = fl.models.build(sweep.network, num_classes=len(data.class_names), seed=0, **shape)
    return seen(task, sweep.method, chosen, 0)


def scored(sweep: Sweep, setting: Mapping[str, Any], on: list[Seen]) -> tuple[list[Row], float]:
    """Rows, and CPU seconds an image."""
    attack = attacks.build({"name": sweep.attack, **sweep.fixed, **setting, "iterations": sweep.iterations})
    results, seconds = timed(attack, on, 0)
    return rows(results, on, 0), seconds / len(on)


def swept(sweep: Sweep) -> dict[str, Any]:
    """Lines of the table, best first, the figures behind them and the CPU seconds of all."""
    begin = time.process_time()
    own = attacks.build(sweep.attack)
    default = {key: getattr(own, key) for key in sweep.grid}
    settings = sweep.points()
    if default not in settings:
        settings.append(default)
    choosing, others = victims(sweep, FIRST), victims(sweep, FIRST + sweep.images)
    found = [(setting, *scored(sweep, setting, choosing)) for setting in settings]
    found.sort(key=lambda one: -mean_interval(one[1]).value)
    kept = [one for i, one in enumerate(found) if i == 0 or one[0] == default]
    base, _ = scored(sweep, default, others)
    lines, measured = [], []
    for setting, data, seconds in kept:
        again = base if setting == default else scored(sweep, setting, others)[0]
        words = ", ".join(f"{key} {_number(value)}" for key, value in setting.items())
        gain = "the default" if setting == default else written(paired_difference(again, base))
        means = written(mean_interval(data)), written(mean_interval(again))
        what = (sweep.attack, f"{sweep.network}, {sweep.method.name}", sweep.dataset)
        lines.append([*what, str(sweep.iterations), words, *means, gain, f"{seconds:.1f}"])
        measured.append({"setting": setting, "psnr": [row["psnr"] for row in again]})
    raw = [{"setting": setting, "psnr": [row["psnr"] for row in data]} for setting, data, _ in found]
    return {"seconds": time.process_time() - begin, "lines": lines, "others": measured, "grid": raw}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure all anew, not only what the results lack")
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = RESULTS / "settings.json"
    kept = {} if given.again or not before.exists() else json.loads(before.read_text())["sweeps"]
    found = {sweep.name: kept[sweep.name] for sweep in SWEEPS if sweep.name in kept}
    for sweep in SWEEPS:
        if sweep.name not in found:
            found[sweep.name] = swept(sweep)
            report(found)


def report(found: Mapping[str, dict[str, Any]]) -> None:
    """Write what there is so far."""
    done = {sweep.name: found[sweep.name] for sweep in SWEEPS if sweep.name in found}
    spent = [one["seconds"] for one in done.values() if one["seconds"] is not None]
    lines = [
        "# The best settings of small grids, PSNR in dB, batch 1, one step, untrained networks",
        "",
        f"Test images from number {FIRST} on for choosing and as many others after them; means with 95 % intervals "
        "over images, and the paired difference on the others. Whatever isn't named has its default, but for the "
        "number of iterations, which is that of the list. Labels are read off or searched for, as each attack has it. "
        "Defaults are those of when it was measured. Every combination of",
        "",
        *(f"- {name}" for name in done),
        "",
        *table(HEAD, [line for one in done.values() for line in one["lines"]]),
        "",
        *([] if len(done) == len(SWEEPS) else ["**Incomplete: not all sweeps were run.**", ""]),
        f"CPU seconds are those of an image. {len(spent)} of the sweeps were timed as a whole: "
        f"{sum(spent) / 60:.0f} CPU minutes.",
    ]
    publish("settings", {"sweeps": done}, lines)


def written(interval: Interval) -> str:
    """A figure with its interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.1f}"
    return f"{interval.value:.1f} [{interval.low:.1f}, {interval.high:.1f}]"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


if __name__ == "__main__":
    main()
