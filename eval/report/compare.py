"""Several runs side by side: in which settings they differ, what they scored, and by how much they differ.

Differences are taken from the first run. Where both attacked the same images from the same seeds they are paired,
image by image, which is what tells small differences from chance; otherwise they are differences of means, and the
table says so. Images are the same if their names and the scores of two constant guesses (which are figures of the
pixels alone) agree. Copies of one image count as one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.io.sanitize import escape_controls, escape_markdown
from eval.metrics import statistics
from eval.metrics.score import Row
from eval.metrics.statistics import Interval
from eval.report.formatting import NO_VALUE, format_interval, format_percent_interval
from eval.report.load import Run, explain_damage, load
from eval.report.result_groups import COPY_OF, IMAGE, ResultGroup, image_key, lpips_column
from eval.report.settings import entry_label
from eval.report.training_results import format_accuracy

PAIRED, UNPAIRED = "paired", "unpaired"
NOT_SET = "(not set)"
Key = tuple[str, str, str, int]


@dataclass(frozen=True)
class Difference:
    """How far a run is from the first one.

    Attributes:
        psnr: difference of mean PSNR in dB.
        how: "paired" or "unpaired".
    """

    psnr: Interval
    how: str


@dataclass(frozen=True)
class ComparisonLine:
    """One method, defense, attack and round in one run.

    Attributes:
        method, defense, attack, round: what was done.
        run: name of the run.
        group: its rows; None where the run has none.
        accuracy: in words.
        difference: from the first run; None for that one, and where either has no pictures.
    """

    method: str
    defense: str
    attack: str
    round: int
    run: str
    group: ResultGroup | None
    accuracy: str
    difference: Difference | None


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: their names, the first one is what the others are compared with.
        settings: values in every run of the settings that differ, by dotted key.
        lines: grouped by what was done, in the order of the runs.
    """

    runs: list[str]
    settings: dict[str, list[Any]]
    lines: list[ComparisonLine]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return both tables as (title, columns, rows) of words."""
        differing = [[key, *(_word(value) for value in values)] for key, values in self.settings.items()]
        return [
            ("Settings that differ", ["setting", *self.runs], differing),
            ("What leaked", list(COLUMNS), [_cells(line) for line in self.lines]),
        ]

    def to_text(self) -> str:
        """Return the tables for a terminal, columns padded with blanks."""
        parts = []
        for title, names, entries in self.tables():
            columns, *rows = ([escape_controls(cell) for cell in row] for row in [names, *entries])
            widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
            padded = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [columns, *rows]]
            body = [padded[0], "  ".join("-" * w for w in widths), *padded[1:]] if rows else ["none"]
            parts.append("\n".join([title, "", *(line.rstrip() for line in body)]))
        return "\n\n".join([*parts, NOTE.format(first=escape_controls(self.runs[0]))]) + "\n"

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""
        parts = []
        for title, columns, rows in self.tables():
            cells = [[escape_markdown(cell) for cell in row] for row in [columns, *rows]]
            cells.insert(1, ["---"] * len(columns))
            lines = [f"| {' | '.join(row)} |" for row in cells]
            parts.append("\n".join([f"## {title}", "", *(lines if rows else ["none"])]))
        return "\n\n".join([*parts, NOTE.format(first=escape_markdown(self.runs[0]))]) + "\n"

    def to_plain(self) -> dict[str, Any]:
        """Return the comparison as JSON values, without NaN."""
        settings = {key: [_finite(value) for value in values] for key, values in self.settings.items()}
        return {"runs": self.runs, "settings": settings, "lines": [_line_to_plain(line) for line in self.lines]}


COLUMNS = (
    *("method", "defense", "attack", "round", "run", "accuracy", "PSNR (dB)", "above best baseline (dB)"),
    *("SSIM", "LPIPS", "\N{GREATER-THAN OR EQUAL TO} 20 dB", "labels", "difference (dB)", "how"),
)
NOTE = (
    "Differences are those of mean PSNR from {first}. Paired: over the same images and seeds, image by image. "
    "Unpaired: of the means, as images or seeds differ. In brackets 95 % intervals over images and seeds."
)


def compare(folders: Sequence[str | Path]) -> Comparison:
    """Put run directories side by side.

    Args:
        folders: that `hyperleak run` has written, two or more.

    Raises:
        FileNotFoundError: one is no run directory.
        ValueError: there are fewer than two, one is there twice, or a file is damaged.
    """
    paths = [Path(folder) for folder in folders]
    if len(paths) < 2:
        raise ValueError(f"expected two or more run directories, got {len(paths)}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"expected different run directories, got {', '.join(map(str, paths))}")
    with explain_damage(" or ".join(map(str, paths))):
        return _compare_runs([load(path) for path in paths], _names(paths))


def _compare_runs(runs: Sequence[Run], names: list[str]) -> Comparison:
    found = [{_key(group): group for group in run.groups} for run in runs]
    lines = []
    for key in dict.fromkeys(key for groups in found for key in groups):
        first = found[0].get(key)
        for name, run, groups in zip(names, runs, found, strict=True):
            group = groups.get(key)
            apart = psnr_difference(group, first) if group and first and run is not runs[0] else None
            lines.append(ComparisonLine(*key, name, group, format_accuracy(run, group) if group else NO_VALUE, apart))
    return Comparison(names, _settings(runs), lines)


def psnr_difference(group: ResultGroup, first: ResultGroup) -> Difference | None:
    """Return mean PSNR of a group less that of another; None where either has no pictures."""
    if group.psnr is None or first.psnr is None:
        return None
    copies = {row[IMAGE]: row[COPY_OF] for side in (group, first) for row in side.image_rows if COPY_OF in row}
    mine, other = (_named(side.image_rows, copies) for side in (group, first))
    if {(row[IMAGE], row["seed"]) for row in mine} == {(row[IMAGE], row["seed"]) for row in other}:
        return Difference(statistics.paired_difference(mine, other, "psnr", image=IMAGE), PAIRED)
    return Difference(_independent_difference(group.psnr, first.psnr), UNPAIRED)


def _independent_difference(a: Interval, b: Interval) -> Interval:
    """Return the difference of two independent means (MOVER; Zou and Donner, 2008, Eq. 2)."""
    value, images, count = a.value - b.value, min(a.images, b.images), min(a.count, b.count)
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Interval(value, None, None, images, count)
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return Interval(value, low, high, images, count)


def _key(group: ResultGroup) -> Key:
    return group.method, group.defense, group.attack, group.round


def _named(rows: Sequence[Row], copies: Mapping[Any, Any]) -> list[Row]:
    """Return rows by what tells images apart; copies of an image are further attempts on it, and count as one."""
    keys, named = {row[IMAGE]: image_key(row) for row in rows}, []
    for row in rows:
        own = row[IMAGE]
        first = copies.get(own, own)
        seed = row["seed"] if own == first else (row["seed"], own)
        named.append({**row, IMAGE: keys.get(first, keys[own]), "seed": seed})
    return named


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many of their parents as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return settings that are not the same in all runs, with the value of each."""
    flat = [_flat(run.settings.values) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    table = {key: [settings.get(key, NOT_SET) for settings in flat] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return nested settings under dotted keys; entries of a list of settings go by their labels."""
    if isinstance(value, Mapping) and value:
        return {k: v for name, item in value.items() for k, v in _flat(item, f"{key}.{name}".lstrip(".")).items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {k: v for item in value for k, v in _flat(item, f"{key}.{entry_label(item)}").items()}
    return {key: value}


def _cells(line: ComparisonLine) -> list[str]:
    head = [line.method, line.defense, line.attack, str(line.round), line.run]
    if line.group is None:
        return [*head, "not run", *[NO_VALUE] * (len(COLUMNS) - len(head) - 1)]
    group, apart = line.group, line.difference
    figures = [
        format_interval(group.psnr),
        format_interval(group.gain, sign=True),
        format_interval(group.mean_interval("ssim"), 2),
        _lpips(group),
        *map(format_percent_interval, (group.share_reaching(20), group.label_recovery_rate)),
    ]
    if not group.attacked_rows:
        figures[0] = "not applicable"
    told = [NO_VALUE, NO_VALUE] if apart is None else [format_interval(apart.psnr, sign=True), apart.how]
    return [*head, line.accuracy, *figures, *told]


def _lpips(group: ResultGroup) -> str:
    """Return LPIPS with its interval and its backbone, which runs may have different ones of."""
    column = lpips_column(group.image_rows)
    if column is None:
        return NO_VALUE
    return f"{format_interval(group.mean_interval(column), 2)} {column.removeprefix('lpips_')}"


def _line_to_plain(line: ComparisonLine) -> dict[str, Any]:
    head = {key: getattr(line, key) for key in ("method", "defense", "attack", "round", "run")}
    if line.group is None:
        return {**head, "present": False}
    group, apart = line.group, line.difference
    perceptual = lpips_column(group.image_rows)
    return {
        **head,
        "present": True,
        "accuracy": group.accuracy,
        "psnr": _numbers(group.psnr),
        "gain": _numbers(group.gain),
        "ssim": _numbers(group.mean_interval("ssim")),
        **({perceptual: _numbers(group.mean_interval(perceptual))} if perceptual else {}),
        "reaching_20": _numbers(group.share_reaching(20)),
        "labels": _numbers(group.label_recovery_rate),
        "not_applicable": group.refusals,
        "difference": None if apart is None else {**(_numbers(apart.psnr) or {}), "how": apart.how},
    }


def _numbers(found: Interval | None) -> dict[str, Any] | None:
    return (
        None if found is None else {"value": found.value, "low": found.low, "high": found.high, "images": found.images}
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _finite(value: Any) -> Any:
    """Return a setting as JSON has it: infinity and NaN, which it lacks, as words."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
