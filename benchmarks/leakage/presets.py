"""Presets for untrained networks beside the default: `python -m benchmarks.leakage.presets` (needs HYPERLEAK_DATA).

A preset of ours is called after the network that it is for. What a sweep (`benchmarks.leakage.settings`) found best for
that is measured anew on images that no sweep has seen, for as many iterations as the attack has by default. Beside
stand rows that say how far it carries: other pictures, and the same network trained for five rounds. What the results
have is not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import torch

import attacks
from attacks.base import Attack
from benchmarks.common import RESULTS, publish, table
from benchmarks.leakage.settings import added, data, of, own, words, written
from benchmarks.leakage.sweeps import CHARACTERS, COLOR, GRAY, SIGMOID, Sweep, page_name
from eval.metrics.statistics import mean_interval, paired_difference

FIRST, IMAGES, ROUNDS = 340, 16, 5
CASES = (
    ("rog", GRAY, 0),
    ("rog", CHARACTERS, 0),
    ("rog", GRAY, ROUNDS),
    ("ig", COLOR, 0),
    ("ig", COLOR, ROUNDS),
    ("ig", SIGMOID, 0),
    ("ig", SIGMOID, ROUNDS),
)
"""Attack, network with the set of its images, and rounds of training before."""
HEAD = ["attack", "preset", "sets", "images of", "rounds", "steps", "the preset", "the default", "above it", "CPU s"]


def case(name: str, network: str, dataset: str, rounds: int) -> Sweep:
    """Return what is measured, as a sweep of what the preset sets."""
    attack: Attack = attacks.build(name)
    grid = {page_name(key): (value,) for key, value in attack.presets[called(network)].settings.items()}
    steps: int = getattr(attack, "iterations")  # noqa: B009 - searches have it, attacks need not
    return Sweep(name, network, dataset, grid, steps, images=IMAGES, rounds=rounds)


def called(network: str) -> str:
    """Return the preset for that network."""
    return f"{network}-untrained"


def compared(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the default's settings and the preset's."""
    return [own(sweep), own(sweep, called(sweep.network))]


def table_row(sweep: Sweep, points: list[dict[str, Any]]) -> list[str]:
    """Return a row of the table."""
    default, preset = (of(points, setting) for setting in compared(sweep))
    gain = written(paired_difference(data(preset), data(default)))
    means = written(mean_interval(data(preset))), written(mean_interval(data(default)))
    what = [sweep.attack, f"`{called(sweep.network)}`", words(preset["setting"]), sweep.dataset, f"{sweep.rounds}"]
    return [*what, f"{sweep.iterations}", *means, gain, f"{preset['seconds']:.1f}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure all anew, not only what the results lack")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "presets.json"
    before = json.loads(path.read_text())["cases"] if path.exists() and not given.again else {}
    found = dict[str, list[dict[str, Any]]]()
    for name, network, rounds in CASES:
        sweep = case(name, *network, rounds)
        found[sweep.name] = added(sweep, compared(sweep), before.get(sweep.name, []), FIRST)
        publish("presets", {"first": FIRST, "cases": found}, document(found))


def document(found: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Return the page of what there is so far."""
    sweeps = [case(name, *network, rounds) for name, network, rounds in CASES]
    lines = [table_row(sweep, found[sweep.name]) for sweep in sweeps if sweep.name in found]
    return [
        "# Presets for untrained networks, PSNR in dB, batch 1, one step of FedAvg",
        "",
        "A preset that is called after a network has the settings that a sweep found best for it, untrained "
        f"([settings.md](settings.md)). Here they meet the default on {IMAGES} test images from number {FIRST} on, "
        "which no sweep has seen, for the attack's own number of iterations. Means have 95 % intervals over images, as "
        "has the paired difference. Rounds: of training before, as in settings.md. CPU seconds are the preset's, of an "
        "image.",
        "",
        *([] if len(lines) == len(CASES) else ["**Incomplete: not all rows were measured.**", ""]),
        *table(HEAD, lines),
    ]


if __name__ == "__main__":
    main()
