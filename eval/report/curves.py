"""One figure of a value over rounds, a line for each of whom it is of, with its legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.report.blocks import FigureBlock, TableBlock
from eval.report.charts.specs import Curve, LineChart, Marker
from eval.report.formatting import format_number
from eval.report.round_series import RoundSeries


def line_figure(
    name: str,
    title: str,
    ylabel: str,
    labels: Mapping[str, Sequence[str]],
    found: Sequence[RoundSeries],
    series: Sequence[int],
) -> FigureBlock:
    """One figure of a value over rounds.

    Args:
        name: of the file.
        title: of the figure.
        ylabel: of the axis; one that ends in "(%)" has percents on it.
        labels: what tells the courses from each other: columns of the legend, each with a word for every course.
        found: the courses.
        series: the look of each.
    """
    percents = ylabel.endswith("(%)")
    whose = list(zip(*labels.values(), strict=True))
    rows = [[*label, *_words(course, small=not percents)] for label, course in zip(whose, found, strict=True)]
    curves = [
        Curve(_short(label), look, course.points, course.band)
        for label, look, course in zip(whose, series, found, strict=True)
    ]
    marks = [Marker(curve.series, line=True) for curve in curves]
    legend = TableBlock("What the lines stand for", [*labels, ">first", ">highest", ">last"], rows, markers=marks)
    spoken = [f"{', '.join(row[:-3])}: first {row[-3]}, highest {row[-2]}, last {row[-1]}." for row in rows]
    alt = f"{title}. {' '.join(spoken)}"
    band = "Lines are means over seeds; bands, or whiskers where there are few rounds, reach from lowest to highest."
    seeds = band if any(course.band for course in found) else "One seed: no band."
    untrained = "Round 0 is before training. " if any(at == 0 for course in found for at, _ in course.points) else ""
    caption = f"{seeds} {untrained}In the legend, values with their rounds in brackets."
    return FigureBlock(name, title, LineChart(ylabel, curves), alt, caption, legend)


def _short(label: Sequence[str]) -> str:
    """A line's name in a chart's key; no defence goes unsaid."""
    return ", ".join(word for word in label if word != "none")


def _words(course: RoundSeries, *, small: bool) -> list[str]:
    """First, highest and last value, with more digits where `small` figures may matter."""
    points = course.points
    digits = 3 if small and max(abs(value) for _, value in points) < 10 else 1
    chosen = (points[0], max(points, key=lambda point: point[1]), points[-1])
    return [f"{format_number(value, digits)} ({at:.0f})" for at, value in chosen]
