"""What the charts show, as plain data; `eval.report.charts.draw` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Marker:
    """What a series looks like.

    Attributes:
        series: number of its color, shape and dashes.
        hollow: drawn as an outline.
        line: drawn as a line with markers on it.
    """

    series: int
    hollow: bool = False
    line: bool = False


@dataclass(frozen=True)
class Baseline:
    """What a guess made without the update scores.

    Attributes:
        guess: which one, a key of `style.BASELINE_DASHES`.
        label: the guess in words.
        value: its score.
    """

    guess: str
    label: str
    value: float


@dataclass(frozen=True)
class Measure:
    """What says how close pictures are.

    Attributes:
        label: name of the axis, with the unit.
        unit: behind a figure, with a blank in front of it; empty for none.
        digits: behind a figure's point.
        span: of the axis, at least.
        falling: whether small values are close pictures: the axis then falls to the right, where more is leaked.
    """

    label: str
    unit: str = ""
    digits: int = 2
    span: float = 0.2
    falling: bool = False


PSNR = Measure("PSNR of the reconstructions (dB)", " dB", digits=1, span=4)


@dataclass(frozen=True)
class Point:
    """One attack in a chart of accuracy against leakage.

    Attributes:
        number: by which the legend knows it.
        label: the attack in words.
        marker: of its method.
        x, y: leakage in units of the chart's measure, accuracy in percent.
        x_interval, y_interval: (low, high) of both, where there are any.
    """

    number: int
    label: str
    marker: Marker
    x: float
    y: float
    x_interval: tuple[float, float] | None = None
    y_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScatterPlot:
    """Accuracy (upwards) against leakage (to the right), with intervals and baselines."""

    points: Sequence[Point]
    baselines: Sequence[Baseline] = ()
    measure: Measure = PSNR


@dataclass(frozen=True)
class Strip:
    """The images of one attack, side by side on one line.

    Attributes:
        number: by which the legend knows it.
        label: the attack in words.
        marker: of its method.
        values: one PSNR in dB per image and seed.
        mean: of the values.
        interval: (low, high) of the mean, where there is one.
    """

    number: int
    label: str
    marker: Marker
    values: Sequence[float]
    mean: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class StripPlot:
    """Every image of every attack on a common scale of PSNR, with means, intervals and baselines."""

    strips: Sequence[Strip]
    baselines: Sequence[Baseline] = ()


@dataclass(frozen=True)
class Curve:
    """One line over rounds.

    Attributes:
        label: whose line it is.
        series: number of its color, shape and dashes.
        points: (round, value), rounds ascending.
        band: (round, low, high), where there is one.
    """

    label: str
    series: int
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class LineChart:
    """Values over rounds of training, with bands and baselines.

    Attributes:
        ylabel: name and unit of the values; values of one that ends in "(%)" lie in [0, 100].
        curves: the lines.
        baselines: drawn as level lines.
    """

    ylabel: str
    curves: Sequence[Curve]
    baselines: Sequence[Baseline] = field(default=())


@dataclass(frozen=True)
class Heatmap:
    """A square table of values as shades: the higher, the fuller the color.

    Attributes:
        values: (N, N), row by row.
        low, high: values drawn as blank and in full color.
    """

    values: Sequence[Sequence[float]]
    low: float
    high: float

    @property
    def shades(self) -> list[list[float]]:
        """Return the values as opacities from 0 to 1; all full where `low` and `high` are one."""
        span = self.high - self.low
        return [
            [1.0 if span <= 0 else min(max((value - self.low) / span, 0.0), 1.0) for value in row]
            for row in self.values
        ]


Chart = ScatterPlot | StripPlot | LineChart | Heatmap
