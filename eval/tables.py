"""The table of results, in plain text first: what it says is decided here, how it looks elsewhere."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from attacks.base import Chain
from eval import checks, statistics
from eval.experiment import Experiment
from eval.score import Row

PSNR = (
    "PSNR (dB): how close a reconstruction is to the true image, [95 % interval over images and seeds]. From about 20 "
    "a person recognises the content, from 30 there is hardly a difference; 100 is equality."
)
FLOOR = (
    "Floor: what a guess without any knowledge of the client scores on the same images: one colour (the image's own "
    "mean, or mid grey), noise, the most similar image of other clients. Only what lies above all floors leaked."
)
SSIM = "SSIM: similarity of structures, 1 for equal images."
LPIPS = "LPIPS: perceptual distance, 0 for equal images."
RATES = "≥20, ≥30: share of images whose PSNR reaches that. Labels: share of images whose class was recovered."
ACCURACY = "Accuracy: what the method learnt: share of each client's test images it gets right, mean over clients."
IMAGE = "picture"
"""Column that tells images apart across an experiment."""
FLOORS = {
    "mean": "mean colour",
    "grey": "mid grey",
    "noise": "noise",
    "nearest": "nearest image",
}
FIGURES = ("accuracy", "PSNR (dB)", "SSIM", "LPIPS", "≥20", "≥30", "labels")
COLUMNS = ("method", "defence", "attack", *FIGURES, "flags")


@dataclass(frozen=True)
class Table:
    """A table of words.

    Attributes:
        title: above it.
        columns: their names.
        rows: the attacks.
        floors: what guesses score, in the same columns.
        legend: what to know to read it, a sentence or two each.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    floors: list[tuple[str, ...]]
    legend: list[str]


def table(rows: Sequence[Row], experiment: Experiment) -> Table:
    """The table of an experiment's rows.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("expected rows of at least one attack, got none; see `against` of the attacks")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["defense"], row["attack"], row["round"]), []).append(row)
    several = len({key[3] for key in groups}) > 1
    raised: dict[str, None] = {}
    lines = [_line(key, group, experiment, several, raised) for key, group in groups.items()]
    floors = _floor_lines(rows)
    idle = {"defence": "none", "LPIPS": "-"}  # a column that says only this is left out
    filled = [i for i, name in enumerate(COLUMNS) if any(line[i] != idle.get(name) for line in lines)]
    return Table(
        title=experiment.title or "What leaked",
        columns=tuple(COLUMNS[i] for i in filled),
        rows=[tuple(line[i] for i in filled) for line in lines],
        floors=[tuple(line[i] for i in filled) for line in floors],
        legend=_legend(rows, experiment, raised, lpips=COLUMNS.index("LPIPS") in filled),
    )


def markdown(content: Table) -> str:
    """The table in Markdown."""
    lines = [f"# {content.title}", "", _cells(content.columns), _cells(["---"] * len(content.columns))]
    lines += [_cells(row) for row in (*content.rows, *content.floors)]
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in content.legend)]) + "\n"


def summary(described: object) -> str:
    """What a registered class does: in plain words where it has them, else its docstring's first line."""
    if words := getattr(described, "plain", ""):
        return str(words).rstrip(".")
    return (inspect.getdoc(described) or "").partition("\n")[0].rstrip(".")


def _cells(words: Sequence[str]) -> str:
    return f"| {' | '.join(word.replace('|', '/') for word in words)} |"


def _line(
    key: tuple[Any, ...], group: Sequence[Row], experiment: Experiment, several: bool, raised: dict[str, None]
) -> tuple[str, ...]:
    """One setting: figures, or why there are none."""
    method, defense, attack, number = key
    name = f"{attack} (round {number})" if several else attack
    # each seed trains a model of its own, whatever the number of images attacked on it
    accuracy = fmean({row["seed"]: row["accuracy"] for row in group}.values())
    head = (method, defense, name, f"{accuracy:.1%}")
    scored = [row for row in group if "not_applicable" not in row]
    if not scored:
        return (*head, "not applicable", "-", "-", "-", "-", "-", group[0]["not_applicable"])
    found = _flags(scored, defense, experiment)
    raised.update(dict.fromkeys(found))
    words = [*found, *([f"not applicable to {len(group) - len(scored)}"] if len(scored) < len(group) else [])]
    return (*head, *_figures(scored, "", _lpips(scored)), _labels(scored), ", ".join(words) or "-")


def _flags(rows: Sequence[Row], defense: str, experiment: Experiment) -> list[str]:
    errors = [row["forward_error"] for row in rows]
    worst = max((math.inf if error is None else error) for error in errors)
    kinds = {entry.label: entry.item.name for entry in experiment.defense}
    found = checks.flags(
        rows,
        histories=[[math.nan if value is None else value for value in row["history"]] for row in rows],
        labels_given=experiment.threat.knows_labels,
        defence_known=kinds[defense] != "none" and experiment.threat.knows_defense,
        forward_error=worst,
        image=IMAGE,
    )
    asked = experiment.score.lpips != "auto"  # only where LPIPS was really asked for is its absence worth a flag
    return [name for name in found if name != "lpips-missing" or asked]


def _figures(rows: Sequence[Row], prefix: str, lpips: str | None) -> tuple[str, ...]:
    """PSNR, SSIM, LPIPS and success rates of the columns that begin with `prefix`."""
    psnr = prefix + "psnr"
    known = [row for row in rows if row[psnr] is not None]
    if not known:
        return ("-", "-", "-", "-", "-")
    mean = statistics.mean_interval(known, psnr, image=IMAGE)
    interval = "" if mean.low is None or mean.high is None else f" [{mean.low:.1f}, {mean.high:.1f}]"
    rates = (f"{statistics.success_rate(known, level, psnr, image=IMAGE).value:.0%}" for level in (20, 30))
    closeness = (_mean(rows, prefix + name) if name else "-" for name in ("ssim", lpips))
    return (f"{mean.value:.1f}{interval}", *closeness, *rates)


def _mean(rows: Sequence[Row], column: str) -> str:
    values = [row[column] for row in rows if row.get(column) is not None]
    return f"{fmean(values):.2f}" if values else "-"


def _labels(rows: Sequence[Row]) -> str:
    known = [row["label_correct"] for row in rows if row["label_correct"] is not None]
    return f"{fmean(known):.0%}" if known else "-"


def _lpips(rows: Sequence[Row]) -> str | None:
    return next((name for name in rows[0] if name.startswith("lpips_")), None)


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """For every method and attack what leaked, pictures and private tensors, in a sentence each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        defended = "" if row["defense"] == "none" else f" with {row['defense']}"
        groups.setdefault(f"{row['method']}{defended} under {row['attack']}", []).append(row)
    return [f"{what}: {said}." for what, group in groups.items() for said in (*_pictures(group), *_secrets(group))]


def _pictures(rows: Sequence[Row]) -> list[str]:
    """PSNR against the best guess made without the update."""
    group = [row for row in rows if row.get("psnr") is not None]
    if not group:
        return []
    means = {g: fmean(row[f"floor_{g}_psnr"] for row in group) for g in FLOORS if _has(group, g)}
    best = max(means, key=lambda guess: means[guess])
    gains = [{**row, "gain": row["psnr"] - row[f"floor_{best}_psnr"]} for row in group]
    gain = statistics.mean_interval(gains, "gain", image=IMAGE)
    if gain.low is None or gain.high is None:
        verdict = "too few pictures to tell content from chance"
    elif gain.low > 0:
        verdict = "the update gives picture content away"
    elif gain.high < 0:
        verdict = "no more than a guess without the update"
    else:
        verdict = "not told apart from a guess without the update"
    return [f"{verdict} ({gain.value:+.1f} dB against the best floor, {FLOORS[best]} at {means[best]:.1f} dB)"]


def _secrets(rows: Sequence[Row]) -> list[str]:
    """How far off the recovered embedding and generated extractor are."""
    embedding = [row.get("private_errors", {}).get("embedding") for row in rows]
    extractor = [row.get("extractor_error") for row in rows]
    lines = []
    for what, errors in (("embedding", embedding), ("extractor", extractor)):
        known = sorted(error for error in errors if error is not None)
        if known:
            middle = known[len(known) // 2]
            word = "recovered with" if middle < 0.1 else "not recovered:"
            lines.append(f"the private {what} was {word} a relative error of {middle:.0e} (median)")
    return lines


def _has(rows: Sequence[Row], guess: str) -> bool:
    return all(row.get(f"floor_{guess}_psnr") is not None for row in rows)


def _floor_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The floors of all attacked images, each counted once per seed."""
    scored = {(row[IMAGE], row["seed"]): row for row in rows if row.get(IMAGE) is not None and "images" in row}
    chosen = list(scored.values())
    if not chosen:
        return []
    lpips = _lpips(chosen)
    return [
        ("floor", "", text, "", *_figures(chosen, f"floor_{guess}_", lpips), "-", "-")
        for guess, text in FLOORS.items()
        if f"floor_{guess}_psnr" in chosen[0]
    ]


def _legend(rows: Sequence[Row], experiment: Experiment, raised: Mapping[str, None], *, lpips: bool) -> list[str]:
    lines = [*_verdicts(rows), PSNR, FLOOR, SSIM, *([LPIPS] if lpips else []), RATES, ACCURACY]
    lines += [f"Method {entry.label}: {summary(type(entry.item))}." for entry in experiment.method]
    defenses = [entry for entry in experiment.defense if entry.item.name != "none"]
    lines += [f"Defence {entry.label}: {summary(type(entry.item))}." for entry in defenses]
    for entry in experiment.attack:
        item = entry.item
        parts = [item.first, item.then] if isinstance(item, Chain) else [item]
        lines.append(f"Attack {entry.label}: {'; then '.join(summary(type(part)) for part in parts)}.")
    lines += [f"Flag {name}: {checks.FLAGS[name]}" for name in raised]
    reasons = {reason for row in rows for name, reason in row.get("missing", {}).items() if name.startswith("lpips_")}
    return [*lines, *sorted(reason for reason in reasons if reason.startswith("LPIPS not available"))]
