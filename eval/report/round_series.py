"""Values over rounds of training, from `rounds.jsonl`, and the figure that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from eval.metrics.score import Row
from eval.report.blocks import FigureBlock, TableBlock
from eval.report.charts.specs import Curve, LineChart, Marker
from eval.report.formatting import format_number

RowValue = Callable[[Row], float | None]
"""Reads a value off a row of `rounds.jsonl`; None where the row has none."""


@dataclass(frozen=True)
class RoundSeries:
    """How a value of one method under one defense runs over rounds.

    Attributes:
        method: the method's label.
        defense: the defense's label.
        values: the value by round, then by seed.
    """

    method: str
    defense: str
    values: dict[int, dict[int, float]]

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return (round, mean over seeds), ascending."""
        return [(float(number), fmean(seeds.values())) for number, seeds in sorted(self.values.items())]

    @property
    def band(self) -> list[tuple[float, float, float]]:
        """Return (round, lowest seed, highest seed) of the rounds with several seeds."""
        several = [(number, seeds.values()) for number, seeds in sorted(self.values.items()) if len(seeds) > 1]
        return [(float(number), min(values), max(values)) for number, values in several]


def collect_series(rows: Sequence[Row], value: RowValue) -> list[RoundSeries]:
    """Return a value over rounds for every method under every defense that has it."""
    by_subject: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
    for row in rows:
        if (figure := value(row)) is not None:
            by_round = by_subject.setdefault((row["method"], row["defense"]), {})
            by_round.setdefault(int(row["round"]), {})[row["seed"]] = float(figure)
    return [RoundSeries(*subject, values) for subject, values in by_subject.items()]


@dataclass(frozen=True)
class Line:
    """One line of a figure over rounds.

    Attributes:
        names: what tells it from the others, a word for every column of the figure's legend.
        look: number of its color, shape and dashes.
        series: its values.
    """

    names: Sequence[str]
    look: int
    series: RoundSeries


def line_figure(name: str, title: str, ylabel: str, columns: Sequence[str], lines: Sequence[Line]) -> FigureBlock:
    """Return one figure of a value over rounds, with its legend.

    Args:
        name: name of the file.
        title: words above the figure.
        ylabel: name of the axis; values of one that ends in "(%)" lie in [0, 100].
        columns: names of the legend's columns that tell the lines from each other.
        lines: at least one.
    """
    in_percent = ylabel.endswith("(%)")
    rows = [[*line.names, *_landmarks(line.series, small=not in_percent)] for line in lines]
    curves = [Curve(_key_label(line.names), line.look, line.series.points, line.series.band) for line in lines]
    markers = [Marker(line.look, line=True) for line in lines]
    legend = TableBlock("What the lines stand for", [*columns, ">first", ">highest", ">last"], rows, markers=markers)
    spoken = [f"{', '.join(row[:-3])}: first {row[-3]}, highest {row[-2]}, last {row[-1]}." for row in rows]
    alt = f"{title}. {' '.join(spoken)}"
    band = "Lines are means over seeds; bands, or whiskers where there are few rounds, reach from lowest to highest."
    seeds = band if any(line.series.band for line in lines) else "One seed: no band."
    untrained = any(at == 0 for line in lines for at, _ in line.series.points)
    start = "Round 0 is before training. " if untrained else ""
    caption = f"{seeds} {start}In the legend, values with their rounds in brackets."
    return FigureBlock(name, title, LineChart(ylabel, curves), alt, caption, legend)


def _key_label(names: Sequence[str]) -> str:
    """Return a line's name in the key of a chart that stands alone; no defense goes unsaid."""
    return ", ".join(name for name in names if name != "none")


def _landmarks(series: RoundSeries, *, small: bool) -> list[str]:
    """Return first, highest and last value, with more digits where `small` figures may matter."""
    points = series.points
    digits = 3 if small and max(abs(value) for _, value in points) < 10 else 1
    chosen = (points[0], max(points, key=lambda point: point[1]), points[-1])
    return [f"{format_number(value, digits)} ({at:.0f})" for at, value in chosen]
