"""Accuracy against leakage, a figure for each measure of how close pictures come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.io.text import join_words
from eval.metrics.statistics import Interval
from eval.report.blocks import Block, FigureBlock, Omission, TableBlock
from eval.report.charts.specs import PSNR, Baseline, Measure, Point, ScatterPlot
from eval.report.formatting import format_interval, format_number, lpips_name
from eval.report.result_groups import BASELINES, ResultGroup, baseline_means, lpips_column
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.training_results import accuracy_interval, format_accuracy

DRAWN_BASELINES = ("mean", "nearest")
"""Baselines drawn as lines: the best constant image, and the best image that could be had before."""


@dataclass(frozen=True)
class _Reading:
    """A measure as it is read off rows.

    Attributes:
        column: of `images.jsonl`.
        name: in tables and captions.
        measure: as charts show it.
    """

    column: str
    name: str
    measure: Measure


def blocks(numbered: NumberedGroups) -> list[Block]:
    """Return a figure of PSNR, of SSIM, and of LPIPS where it could be taken: a point for each attack on a method."""
    shown, absent = {}, []
    for key, group in numbered.charted.items():
        if group.psnr is None or group.accuracy is None:
            missing = "it recovers no pictures" if group.psnr is None else "no accuracy of its round is on file"
            absent.append(Omission(f"{numbered.label(group)} in the figure", missing))
        else:
            shown[key] = group
    if not shown:
        return [*absent] or [Omission("accuracy against leakage", "no attack applied")]
    accuracies = {key: accuracy_interval(numbered.run, group) for key, group in shown.items()}
    readings = _readings(list(shown.values()))
    return [*(_figure(numbered, shown, accuracies, reading, readings) for reading in readings), *absent]


def _readings(groups: Sequence[ResultGroup]) -> list[_Reading]:
    """Return the measures that any group has, PSNR first."""
    rows = [row for group in groups for row in group.image_rows]
    found = [_Reading("psnr", "PSNR", PSNR)]
    if any(row.get("ssim") is not None for row in rows):
        found.append(_Reading("ssim", "SSIM", Measure("SSIM of the reconstructions")))
    if column := lpips_column(rows):
        words = f"{lpips_name(column)} of the reconstructions (falling)"
        found.append(_Reading(column, lpips_name(column), Measure(words, falling=True)))
    return found


def _figure(
    numbered: NumberedGroups,
    shown: Mapping[int, ResultGroup],
    accuracies: Mapping[int, Interval | None],
    reading: _Reading,
    readings: Sequence[_Reading],
) -> FigureBlock:
    """Return the figure of one measure; beside that of PSNR the legend has the others' figures, too."""
    first, measure = reading is readings[0], reading.measure
    points, rows, marks, spoken, drawn = [], [], [], [], []
    for key, group in shown.items():
        value = group.mean_interval(reading.column)
        if value is None or group.accuracy is None:
            continue
        mark, reached = numbered.marker(group), format_accuracy(numbered.run, group)
        x, y = interval_ends(value), interval_ends(accuracies[key], 100)
        points.append(Point(key, numbered.label(group), mark, value.value, 100 * group.accuracy, x, y))
        told = [_words(group, one) for one in (readings if first else [reading])]
        rows.append([*numbered.row(key, group), reached, *told])
        marks.append(mark)
        drawn.append(group)
        spoken.append(f"{key}: {numbered.label(group)}, accuracy {reached}, {reading.name} {told[0]}{measure.unit}.")
    lines = drawn_baselines(drawn, reading.column)
    units = [f">{one.name}{' (dB)' if one.measure is PSNR else ''}" for one in (readings if first else [reading])]
    name = "tradeoff" if first else f"tradeoff-{reading.column.partition('_')[0]}"
    return FigureBlock(
        name,
        "Each attack on each method" if first else f"The same by {reading.name}",
        ScatterPlot(points, lines, measure),
        f"Accuracy in percent against mean {reading.name}{' in dB' if measure is PSNR else ''}. {' '.join(spoken)}",
        _caption(numbered, points, reading, lines),
        TableBlock("What the marks stand for", [*numbered.columns(), ">accuracy", *units], rows, markers=marks),
    )


def _words(group: ResultGroup, reading: _Reading) -> str:
    return format_interval(group.mean_interval(reading.column), reading.measure.digits)


def _caption(numbered: NumberedGroups, points: Sequence[Point], reading: _Reading, lines: Sequence[Baseline]) -> str:
    """Return how to read a figure; those behind the first say what differs."""
    if reading.measure is not PSNR:
        reads = "the axis falls to the right, as 0 is equality" if reading.measure.falling else "1 is equality"
        return f"Further right, more leaked: {reads}.{baselines_in_words(lines, reading.measure)}"
    caption = (
        "Further right, pictures closer to the truth: more leaked. Further up, a better model. Shapes stand for "
        "methods, hollow ones under a defense; numbers for the rows of the legend. Whiskers are 95 % intervals, of "
        f"PSNR over images and seeds, {_accuracy_words(points)}{baselines_in_words(lines)}"
    )
    if numbered.several_rounds:
        caption += (
            " Of the rounds that were watched, each attack is shown at the one in which it leaked most, with the "
            "accuracy of that same round."
        )
    return caption


def _accuracy_words(points: Sequence[Point]) -> str:
    if all(point.y_interval for point in points):
        return "of accuracy over clients and seeds."
    if any(point.y_interval for point in points):
        return "of accuracy over clients and seeds where the accuracy of every client is on file."
    return "of accuracy none, as that of every single client is not on file."


def drawn_baselines(groups: Sequence[ResultGroup], column: str = "psnr") -> list[Baseline]:
    """Return the guesses that charts draw, with their means over the groups' images.

    Args:
        groups: of one chart.
        column: of the measure.
    """
    found = baseline_means([row for group in groups for row in group.image_rows], column)
    return [Baseline(guess, BASELINES[guess], found[guess]) for guess in DRAWN_BASELINES if guess in found]


def baselines_in_words(found: Sequence[Baseline], measure: Measure = PSNR) -> str:
    """Return a sentence, with a blank in front, on what a chart's broken lines are; nothing where there are none."""
    if not found:
        return ""
    words = join_words(
        [f"{floor.label} ({format_number(floor.value, measure.digits)}{measure.unit})" for floor in found]
    )
    return f" Broken lines: what a guess without the update scores on the same images, {words}."


def interval_ends(found: Interval | None, factor: float = 1) -> tuple[float, float] | None:
    """Return both ends of an interval times a factor; None where it has none."""
    if found is None or found.low is None or found.high is None:
        return None
    return factor * found.low, factor * found.high
