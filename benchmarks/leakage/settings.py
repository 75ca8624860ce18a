"""Which settings of a search are best, network by network.

Run it by `python -m benchmarks.leakage.settings` (needs HYPERLEAK_DATA).

Every setting of a small grid (`benchmarks.leakage.sweeps`) on the same images, networks and starts: the one with the
highest mean PSNR, what the attack has by default when the page is written, and its preset `published` where it has one,
in as many iterations each. Images for choosing are not those that the chosen setting is measured on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import attacks
from attacks.base import Attack, Chain
from benchmarks.common import RESULTS, publish, rewrite, table
from benchmarks.leakage.leakage import score_results, timed
from benchmarks.leakage.sweeps import CLIENTS, IMAGES, SWEEPS, TESTED, Sweep, number, setting_name
from eval.metrics.statistics import Interval, mean_interval, paired_difference

FIRST = 300
"""The first of the test images used."""
GRIDS = ["attack", "network", "victims", "accuracy", "images", "iterations", "values", "fixed"]
HEAD = ["attack", "network", "images of", "steps", "setting", "choosing", "on others", "above the default", "CPU s"]
DEFAULT, PUBLISHED = "the default", "published"
"""What a setting is called that an attack has by itself, and in the preset of that name."""
Point = dict[str, Any]
"""One setting measured: `setting`, `psnr` of every image, `seconds` an image (None where that was not kept)."""
Found = dict[str, Any]
"""What a sweep has so far: points `choosing` and on `others`; of a trained network its `accuracy`."""


def own(sweep: Sweep, preset: str | None = None) -> dict[str, Any]:
    """Return what the attack has by default, or in a preset, of what the sweep varies."""
    settings = {"name": sweep.attack} if preset is None else {"name": sweep.attack, "preset": preset}
    built: Attack = attacks.build(settings)
    built = built.then if isinstance(built, Chain) else built  # whose settings those of a chain are
    return {key: getattr(built, setting_name(key)) for key in sweep.grid}


def named_settings(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """Return the default and the settings it is set beside, by what the page calls them."""
    there = sweep.published and PUBLISHED in attacks.attacks.get(sweep.attack.rpartition("+")[2]).presets
    return {DEFAULT: own(sweep), **({PUBLISHED: own(sweep, PUBLISHED)} if there else {})}


def chosen(sweep: Sweep, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the best of those measured, the default and those that the page has beside; each once."""
    best = max(points, key=lambda point: sum(point["psnr"]))
    return once([best["setting"], *named_settings(sweep).values(), *map(dict, sweep.beside)])


def once(settings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each of them once, in order."""
    return list({words(setting): setting for setting in settings}.values())


def added(sweep: Sweep, settings: Sequence[Mapping[str, Any]], before: Sequence[Point], first: int) -> list[Point]:
    """`before` and what it lacks of the settings, measured on the images from number `first` on."""
    known = [point["setting"] for point in before]
    lacking = [dict(setting) for setting in settings if setting not in known]
    victims = sweep.victims(first) if lacking else []
    found = list(before)
    for setting in lacking:
        varied = {setting_name(key): value for key, value in setting.items()}
        attack = attacks.build({"name": sweep.attack, **sweep.fixed, **varied, "iterations": sweep.iterations})
        results, seconds = timed(attack, victims, 0)
        psnr = [row["psnr"] for row in score_results(results, victims, 0)]
        found.append({"setting": setting, "psnr": psnr, "seconds": seconds / len(victims)})
    return found


def compared(sweep: Sweep, before: Found) -> Found:
    """With the whole grid on the images for choosing."""
    settings = once([*sweep.points(), *named_settings(sweep).values()])
    found = {**before, "choosing": added(sweep, settings, before.get("choosing", []), FIRST)}
    if sweep.rounds and "accuracy" not in found:
        found["accuracy"] = sweep.accuracy()
    return found


def confirmed(sweep: Sweep, before: Found) -> Found:
    """With the best and what has a name on the other images."""
    settings = chosen(sweep, before["choosing"])
    return {**before, "others": added(sweep, settings, before.get("others", []), FIRST + sweep.images)}


def table_rows(sweep: Sweep, found: Found) -> list[list[str]]:
    """Of the table, best first."""
    base = data(of(found["others"], own(sweep)))
    settings = chosen(sweep, found["choosing"])
    settings.sort(key=lambda one: -sum(of(found["choosing"], one)["psnr"]))
    made = []
    for setting in settings:
        point, again = of(found["choosing"], setting), data(of(found["others"], setting))
        names = [name for name, one in named_settings(sweep).items() if one == setting]
        what = (sweep.attack, f"{sweep.called}, {sweep.method.name}{sweep.where}", sweep.dataset)
        called = words(setting) + "".join(f", `{name}`" for name in names if name != DEFAULT)
        means = written(mean_interval(data(point))), written(mean_interval(again))
        gain = DEFAULT if DEFAULT in names else written(paired_difference(again, base))
        seconds = "" if point["seconds"] is None else f"{point['seconds']:.1f}"
        made.append([*what, str(sweep.iterations), called, *means, gain, seconds])
    return made


def of(points: Sequence[Point], setting: Mapping[str, Any]) -> Point:
    """Return the point of that setting."""
    return next(point for point in points if point["setting"] == setting)


def data(point: Point) -> list[dict[str, Any]]:
    """Return the rows as statistics take them."""
    return [{"image": i, "seed": 0, "psnr": value} for i, value in enumerate(point["psnr"])]


def words(setting: Mapping[str, Any]) -> str:
    """Return a setting as the page has it."""
    return ", ".join(f"{key} {number(value)}" for key, value in setting.items())


def written(interval: Interval) -> str:
    """Return a figure with its interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.1f}"
    return f"{interval.value:.1f} [{interval.low:.1f}, {interval.high:.1f}]"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure all anew, not only what the results lack")
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rewrite:
        rewrite("settings", lambda known: document(known["sweeps"]))
        return
    before = sweeps_measured_before()
    found: dict[str, Found] = {sweep.name: before.get(sweep.name, {}) for sweep in SWEEPS}
    for sweep in SWEEPS:  # the new takes the place of the old when it is whole: a stop loses nothing
        chosen = compared(sweep, {} if given.again else found[sweep.name])
        found[sweep.name] = confirmed(sweep, chosen)
        report(found)


def sweeps_measured_before() -> dict[str, Found]:
    """Return what was measured before, by the sweep's name."""
    before = RESULTS / "settings.json"
    return json.loads(before.read_text())["sweeps"] if before.exists() else {}


def report(found: Mapping[str, Found]) -> None:
    """Write what there is so far."""
    publish("settings", {"sweeps": {name: one for name, one in found.items() if one}}, document(found))


def document(found: Mapping[str, Found]) -> list[str]:
    """Return the page of what there is so far."""
    done = [sweep for sweep in SWEEPS if whole(sweep, found[sweep.name])]
    return [
        "# The best settings of small grids, PSNR in dB, batch 1, one step",
        "",
        f"Test images from number {FIRST} on for choosing and as many others after them; means with 95 % intervals "
        "over images, and the paired difference on the others. Whatever isn't named has its default, but for the "
        "number of iterations, which is that of the list. Labels are read off or searched for, as each attack has it. "
        "The default is that of the day on which the page was written; `published` is the preset of that name, in what "
        f"the grid varies. Networks are untrained, or trained by FedAvg among {CLIENTS} clients of {IMAGES} training "
        f"images each. Accuracy is that on {TESTED} test images. Defenses are known to the attacker. HyperFL: scaled "
        "heads, step size 0.01, normalized inputs, classifier at rest ([published_hyperfl.md](published_hyperfl.md) "
        "has its whole algorithm). Every combination of these values was tried:",
        "",
        *table(GRIDS, [described(sweep, found[sweep.name]) for sweep in done]),
        "",
        *table(HEAD, [line for sweep in done for line in table_rows(sweep, found[sweep.name])]),
        "",
        *([] if len(done) == len(SWEEPS) else ["**Incomplete: not all sweeps were run.**", ""]),
        "CPU seconds are those of an image, where they were kept. Sweeps are run one by one: the line at the "
        "end names the machine of the last.",
    ]


def whole(sweep: Sweep, found: Found) -> bool:
    """Return whether all that the page has of a sweep is there."""
    if "others" not in found:
        return False
    known = [point["setting"] for point in found["others"]]
    return all(setting in known for setting in chosen(sweep, found["choosing"]))


def described(sweep: Sweep, found: Found) -> list[object]:
    """Return the line of a grid: what it is on, and its values."""
    where = f"{sweep.method.name}, {sweep.dataset}{sweep.where}"
    accuracy = f"{100 * found['accuracy']:.0f} %" if "accuracy" in found else ""
    fixed = ", ".join(f"{key} {number(value)}" for key, value in sweep.fixed.items())
    grid = "; ".join(f"{key}: {', '.join(number(value) for value in row)}" for key, row in sweep.grid.items())
    return [f"`{sweep.attack}`", f"`{sweep.called}`", where, accuracy, sweep.images, sweep.iterations, grid, fixed]


if __name__ == "__main__":
    main()
