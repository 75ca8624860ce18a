"""The figures of a report, each with its legend, caption and description; or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import TypeVar

from eval.report.blocks import Block, FigureBlock, Omission, Section, TableBlock
from eval.report.charts.specs import Curve, LineChart, Marker, Strip, StripPlot
from eval.report.formatting import FURTHER_ACCURACIES, format_number
from eval.report.load import Run
from eval.report.result_groups import ResultGroup
from eval.report.round_series import Line, RowValue, collect_series, line_figure
from eval.report.sections import diagnostics, tradeoff
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.sections.tradeoff import baselines_in_words, drawn_baselines, interval_ends

T = TypeVar("T")
MAX_LINES = 8
"""Lines in one figure; more are spread over a figure for every defense."""


def section(numbered: NumberedGroups) -> Section:
    """Return accuracy against leakage, and what changes over rounds; the latter alone where no attack was asked for."""
    if not numbered.run.attacked:
        return Section("tradeoff", "Accuracy", _training(numbered))
    if numbered.run.captured:
        blocks = _strips(numbered) or [Omission("figures", "no picture came back that has a true one beside it")]
        return Section("tradeoff", "How close every image came", blocks)
    blocks = [*tradeoff.blocks(numbered), *_strips(numbered), *_training(numbered), *_leakage(numbered)]
    return Section("tradeoff", "Accuracy against leakage", blocks)


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
            interval_ends(group.psnr),
        )
        for key, group in shown.items()
        if group.psnr is not None
    ]
    lines = drawn_baselines(list(shown.values()))
    alt = "PSNR of every attacked image. " + " ".join(
        f"{row.number}, {row.label}: from {min(row.values):.1f} to {max(row.values):.1f} dB, mean {row.mean:.1f} dB."
        for row in rows
    )
    caption = (
        "Each dot is one reconstruction, the larger mark their mean with its 95 % interval: a mean can hide single "
        "images that came back exact, and single failures. From about 20 dB a person recognizes the "
        f"content.{baselines_in_words(lines)}"
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
        ends = [(float(at), *span) for at, psnr in found if (span := interval_ends(psnr))]
        label = ", ".join(word for word in key if word != "none")
        curves.append(Curve(label, i, [(float(at), psnr.value) for at, psnr in found], ends))
        rows.append([*key, "; ".join(f"{format_number(psnr.value)} ({at})" for at, psnr in found)])
    lines = drawn_baselines([group for lot in lots.values() for group in lot])
    alt = "Mean PSNR in dB over rounds. " + " ".join(f"{', '.join(row[:3])}: {row[3]}." for row in rows)
    caption = f"Whiskers or bands are 95 % intervals over images and seeds.{baselines_in_words(lines)}"
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
