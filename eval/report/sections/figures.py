"""The figures of a report, each with its legend, caption and description; or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeVar

from eval.io.text import join_words
from eval.metrics.statistics import Interval
from eval.report.blocks import Block, FigureBlock, Omission, Section, TableBlock
from eval.report.charts.specs import Baseline, Curve, LineChart, Marker, Point, ScatterPlot, Strip, StripPlot
from eval.report.formatting import FURTHER_ACCURACIES, format_interval, format_number
from eval.report.load import Run
from eval.report.result_groups import BASELINES, ResultGroup, baseline_means
from eval.report.round_series import Line, RowValue, collect_series, line_figure
from eval.report.sections import diagnostics
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.training_results import accuracy_interval, format_accuracy

T = TypeVar("T")
MAX_LINES = 8
"""Lines in one figure; more are spread over a figure for every defense."""
DRAWN_BASELINES = ("mean", "nearest")
"""Baselines drawn as lines: the best constant image, and the best image that could be had before."""


def section(numbered: NumberedGroups) -> Section:
    """Return accuracy against leakage, and what changes over rounds; the latter alone where no attack was asked for."""
    if not numbered.run.attacked:
        return Section("tradeoff", "Accuracy", _training(numbered))
    if numbered.run.captured:
        blocks = _strips(numbered) or [Omission("figures", "no picture came back that has a true one beside it")]
        return Section("tradeoff", "How close every image came", blocks)
    blocks = [*_scatter(numbered), *_strips(numbered), *_training(numbered), *_leakage(numbered)]
    return Section("tradeoff", "Accuracy against leakage", blocks)


def _scatter(numbered: NumberedGroups) -> list[Block]:
    """Return one point for every method, defense and attack."""
    points, rows, marks, spoken = [], [], [], []
    absent: list[Block] = []
    for key, group in numbered.charted.items():
        if group.psnr is None or group.accuracy is None:
            missing = "it recovers no pictures" if group.psnr is None else "no accuracy of its round is on file"
            absent.append(Omission(f"{numbered.label(group)} in the figure", missing))
            continue
        mark, clients = numbered.marker(group), accuracy_interval(numbered.run, group)
        x, y = _interval_ends(group.psnr), _interval_ends(clients, 100)
        points.append(Point(key, numbered.label(group), mark, group.psnr.value, 100 * group.accuracy, x, y))
        reached = format_accuracy(numbered.run, group)
        rows.append([*numbered.row(key, group), reached, format_interval(group.psnr)])
        marks.append(mark)
        spoken.append(f"{key}: {numbered.label(group)}, accuracy {reached}, PSNR {format_interval(group.psnr)} dB.")
    if not points:
        return absent or [Omission("accuracy against leakage", "no attack applied")]
    lines = _drawn_baselines([numbered.charted[point.number] for point in points])
    alt = f"Accuracy in percent against mean PSNR in dB. {' '.join(spoken)}"
    caption = (
        "Further right, pictures closer to the truth: more leaked. Further up, a better model. Shapes stand for "
        "methods, hollow ones under a defense; numbers for the rows of the legend. Whiskers are 95 % intervals, of "
        f"PSNR over images and seeds, {_accuracy_words(points)}{_baselines_in_words(lines)}"
    )
    if numbered.several_rounds:
        caption += (
            " Of the rounds that were watched, each attack is shown at the one in which it leaked most, with the "
            "accuracy of that same round."
        )
    columns = [*numbered.columns(), ">accuracy", ">PSNR (dB)"]
    legend = TableBlock("What the marks stand for", columns, rows, markers=marks)
    chart = ScatterPlot(points, lines)
    return [FigureBlock("tradeoff", "Each attack on each method", chart, alt, caption, legend), *absent]


def _accuracy_words(points: Sequence[Point]) -> str:
    if all(point.y_interval for point in points):
        return "of accuracy over clients and seeds."
    if any(point.y_interval for point in points):
        return "of accuracy over clients and seeds where the accuracy of every client is on file."
    return "of accuracy none, as that of every single client is not on file."


def _strips(numbered: NumberedGroups) -> list[Block]:
    """Return every attacked image of every attack."""
    shown = {key: group for key, group in numbered.charted.items() if group.psnr is not None}
    if not shown:
        return []
    rows = [
        Strip(
            key,
            numbered.label(group),
            numbered.marker(group),
            [row["psnr"] for row in group.image_rows],
            group.psnr.value,
            _interval_ends(group.psnr),
        )
        for key, group in shown.items()
        if group.psnr is not None
    ]
    lines = _drawn_baselines(list(shown.values()))
    alt = "PSNR of every attacked image. " + " ".join(
        f"{row.number}, {row.label}: from {min(row.values):.1f} to {max(row.values):.1f} dB, mean {row.mean:.1f} dB."
        for row in rows
    )
    caption = (
        "Each dot is one reconstruction, the larger mark their mean with its 95 % interval: a mean can hide single "
        "images that came back exact, and single failures. From about 20 dB a person recognizes the "
        f"content.{_baselines_in_words(lines)}"
    )
    return [FigureBlock("images", "Every image on its own", StripPlot(rows, lines), alt, caption)]


def _training(numbered: NumberedGroups) -> list[Block]:
    """Return accuracies and diagnostics over rounds."""
    run = numbered.run
    if not run.rounds:
        return [Omission("accuracy over rounds", "there is no rounds.jsonl")]
    blocks = _series_figures(
        run, "accuracy", "Accuracy over rounds", "accuracy (%)", partial(_percent, column="accuracy")
    )
    if not blocks:
        blocks = [Omission("accuracy over rounds", "rounds.jsonl holds no second round with an accuracy")]
    further = {"local": "right after local training", **FURTHER_ACCURACIES}
    for name, words in further.items():
        value: RowValue = partial(_percent, column=f"accuracy_{name}")
        figure_name = f"accuracy-{name.replace('_', '-')}"
        blocks += _series_figures(run, figure_name, f"Accuracy {words}", "accuracy (%)", value)
    for name, title, ylabel, value in diagnostics.series_of_methods(run):
        blocks += _series_figures(run, name, title, ylabel, value)
    return [*blocks, *diagnostics.blocks(run)]


def _percent(row: Mapping[str, object], column: str) -> float | None:
    value = row.get(column)
    return 100 * float(value) if isinstance(value, int | float) else None


def _series_figures(run: Run, name: str, title: str, ylabel: str, value: RowValue) -> list[Block]:
    """Return figures of a value over rounds; none where no method has two rounds of it."""
    collected = collect_series(run.rounds, value)
    if not any(len(series.values) > 1 for series in collected):
        return []
    subjects = list(dict.fromkeys((row["method"], row["defense"]) for row in run.rounds))
    methods = list(dict.fromkeys(method for method, _ in subjects))
    parts = _split_by_defense({(series.method, series.defense): series for series in collected})
    blocks: list[Block] = []
    for suffix, words, part in parts:
        lines = []
        for subject, series in part.items():  # where there are several figures, a method looks the same in all
            look = methods.index(series.method) if len(parts) > 1 else subjects.index((series.method, series.defense))
            lines.append(Line(subject, look, series))
        blocks.append(line_figure(f"{name}{suffix}", title + words, ylabel, ["method", "defense"], lines))
    return blocks


def _leakage(numbered: NumberedGroups) -> list[Block]:
    """Return PSNR over the rounds that were watched."""
    lots: dict[tuple[str, ...], list[ResultGroup]] = {}
    for group in numbered.by_number.values():
        if group.psnr is not None:
            lots.setdefault((group.method, group.defense, group.attack), []).append(group)
    if not any(len(lot) > 1 for lot in lots.values()):
        return []
    return [
        _leakage_figure(f"leakage-rounds{suffix}", f"Leakage over rounds{words}", lot)
        for suffix, words, lot in _split_by_defense(lots)
    ]


def _leakage_figure(name: str, title: str, lots: Mapping[tuple[str, ...], list[ResultGroup]]) -> FigureBlock:
    """Return one figure of PSNR over rounds."""
    curves, rows = [], []
    for i, (key, lot) in enumerate(lots.items()):
        found = sorted(((group.round, group.psnr) for group in lot if group.psnr is not None), key=itemgetter(0))
        ends = [(float(at), *span) for at, psnr in found if (span := _interval_ends(psnr))]
        label = ", ".join(word for word in key if word != "none")
        curves.append(Curve(label, i, [(float(at), psnr.value) for at, psnr in found], ends))
        rows.append([*key, "; ".join(f"{format_number(psnr.value)} ({at})" for at, psnr in found)])
    lines = _drawn_baselines([group for lot in lots.values() for group in lot])
    alt = "Mean PSNR in dB over rounds. " + " ".join(f"{', '.join(row[:3])}: {row[3]}." for row in rows)
    caption = f"Whiskers or bands are 95 % intervals over images and seeds.{_baselines_in_words(lines)}"
    marks = [Marker(curve.series, line=True) for curve in curves]
    legend = TableBlock(
        "What the lines stand for", ["method", "defense", "attack", ">PSNR in dB (round)"], rows, markers=marks
    )
    return FigureBlock(name, title, LineChart("PSNR (dB)", curves, lines), alt, caption, legend)


def _split_by_defense(items: Mapping[tuple[str, ...], T]) -> list[tuple[str, str, dict[tuple[str, ...], T]]]:
    """Return all items in one figure, or one figure for every defense: (suffix of its name, of its title, items)."""
    if len(items) <= MAX_LINES:
        return [("", "", dict(items))]
    defenses = dict.fromkeys(key[1] for key in items)
    return [
        (f"-{i}", f", defense: {defense}", {key: item for key, item in items.items() if key[1] == defense})
        for i, defense in enumerate(defenses, 1)
    ]


def _drawn_baselines(groups: Sequence[ResultGroup]) -> list[Baseline]:
    found = baseline_means([row for group in groups for row in group.image_rows])
    return [Baseline(guess, BASELINES[guess], found[guess]) for guess in DRAWN_BASELINES if guess in found]


def _baselines_in_words(found: Sequence[Baseline]) -> str:
    if not found:
        return ""
    words = join_words([f"{floor.label} ({format_number(floor.value)} dB)" for floor in found])
    return f" Broken lines: what a guess without the update scores on the same images, {words}."


def _interval_ends(found: Interval | None, factor: float = 1) -> tuple[float, float] | None:
    if found is None or found.low is None or found.high is None:
        return None
    return factor * found.low, factor * found.high
