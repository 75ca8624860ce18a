"""Charts drawn with matplotlib. Import this module only where something is drawn: matplotlib takes a second to load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.patches import PathPatch
from matplotlib.patheffects import withStroke
from matplotlib.style import context
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Affine2D

from eval.io.sanitize import escape_controls
from eval.report.charts import style
from eval.report.charts.label_placement import Box, place_labels
from eval.report.charts.specs import Baseline, Chart, Curve, Heatmap, LineChart, Marker, Point, ScatterPlot, StripPlot

MAX_WHISKERS = 8
"""Rounds up to which intervals are drawn as whiskers; more make a band."""
_DPI = 72
"""So that a point is a pixel of an SVG."""
_CHARACTER_WIDTH = 0.65
"""Mean width of a character in units of its height."""
_MARKER_SIZE, _MARKER_EDGE = 10.0, 2.0
Span = tuple[float, float]
"""(low, high) of an interval."""
_ROW, _LINE_HEIGHT = 34, 1.25 * style.TEXT_SIZE
"""Pixels of a strip, and of a line of text."""
RC_PARAMS: Mapping[str, Any] = {
    "figure.dpi": _DPI,
    "savefig.dpi": _DPI,
    "figure.facecolor": style.PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": style.PAPER,
    "font.family": "DejaVu Sans",  # which comes with matplotlib, so that charts are laid out alike everywhere
    "font.size": style.TEXT_SIZE,
    "text.color": style.INK,
    "text.parse_math": False,  # labels come from files
    "axes.labelcolor": style.INK,
    "axes.labelsize": style.TEXT_SIZE,
    "axes.titlesize": style.TEXT_SIZE,
    "axes.titlelocation": "left",
    "axes.titlecolor": style.INK,
    "axes.titlepad": 8,
    "axes.edgecolor": style.MUTED,
    "axes.linewidth": 1,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": style.RULE,
    "grid.linewidth": 1,
    "xtick.color": style.MUTED,
    "ytick.color": style.MUTED,
    "xtick.labelsize": style.TEXT_SIZE,
    "ytick.labelsize": style.TEXT_SIZE,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.scale_dashes": False,
    "legend.frameon": False,
    "legend.fontsize": style.TEXT_SIZE,
    "legend.handlelength": 2.6,
    "legend.borderpad": 0,
    "figure.constrained_layout.h_pad": 4 / _DPI,
    "figure.constrained_layout.w_pad": 4 / _DPI,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hyperleak",  # the same ids for the same chart
    "pdf.fonttype": 42,
}
"""Settings of matplotlib for all charts; a user's own are left out of account."""


@contextmanager
def chart_style() -> Iterator[None]:
    """Use the charts' settings of matplotlib, and no others, for drawing and saving; put back what was there."""
    with matplotlib.rc_context(), context(dict(RC_PARAMS), after_reset=True):
        yield


def draw(chart: Chart, width: int, *, with_key: bool = False) -> Figure:
    """Draw a chart. Call within `chart_style`.

    Args:
        chart: what it shows.
        width: in pixels; a phone's for `style.NARROW`.
        with_key: whether the picture itself says what its marks stand for, for where no legend stands beside it.
    """
    match chart:
        case ScatterPlot():
            return _scatter(chart, width, with_key)
        case StripPlot():
            return _strips(chart, width)
        case LineChart():
            return _lines(chart, width, with_key)
        case Heatmap():
            return _heatmap(chart, width)


def draw_swatch(look: Marker) -> Figure:
    """Draw what a series looks like, for a row of a table. Call within `chart_style`."""
    width, height = 34 if look.line else 16, 16
    figure = Figure(figsize=(width / _DPI, height / _DPI))
    figure.patch.set_visible(False)  # the row's own background shows
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    if look.line:
        _line(axes, [1, width - 1], [height / 2] * 2, look.series)
    shape = MarkerStyle(style.marker(look.series))
    outline = shape.get_path().transformed(shape.get_transform())
    place = Affine2D().scale(9).translate(width / 2, height / 2)
    color = style.color(look.series)
    face = style.PAPER if look.hollow else color
    axes.add_patch(
        PathPatch(outline.transformed(place), facecolor=face, edgecolor=color, linewidth=_MARKER_EDGE, clip_on=False)
    )
    return figure


def add_halos(figure: Figure) -> None:
    """Make text that crosses lines legible, in formats that have no style sheet for that."""
    for axes in figure.axes:
        for text in axes.texts:
            text.set_path_effects([withStroke(linewidth=3, foreground=style.PAPER)])


def padded_range(
    values: Sequence[float], *, least: float, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    """Return a range that holds the values with a margin.

    Args:
        values: at least one.
        least: width of the range, at least.
        low: what a margin does not go below.
        high: what a margin does not go above.
    """
    bottom, top = min(values), max(values)
    margin = max(0.07 * (top - bottom), (least - (top - bottom)) / 2, 0)
    bottom, top = max(bottom - margin, low), min(top + margin, high)
    return bottom, max(top, bottom + least / 2)


def _scatter(chart: ScatterPlot, width: int, with_key: bool) -> Figure:
    points = [replace(p, y_interval=_within(p.y_interval, 0, 100)) for p in chart.points]
    key = [(_handle(p.marker), f"{p.number}  {p.label}") for p in points] if with_key else []
    measure = chart.measure
    figure, axes = _figure(width, 320 if width < 500 else 370, chart.baselines, key, measure.digits)
    xs = [v for p in points for v in (p.x, *(p.x_interval or ()))] + [b.value for b in chart.baselines]
    ys = [v for p in points for v in (p.y, *(p.y_interval or ()))]
    left, right = padded_range(xs, least=measure.span)
    axes.set_xlim((right, left) if measure.falling else (left, right))
    axes.set_ylim(padded_range(ys, least=10, low=0, high=100))
    axes.set_title("accuracy (%)")
    axes.set_xlabel(measure.label)
    _ticks(axes, width)
    _upright(axes, chart.baselines)
    for p in points:
        if p.x_interval:
            _whiskers(axes, [(p.x_interval, (p.y, p.y))], p.marker.series, cap="|")
        if p.y_interval:
            _whiskers(axes, [((p.x, p.x), p.y_interval)], p.marker.series, cap="_")
    for p in points:
        _mark(
            axes,
            p.x,
            p.y,
            p.marker,
            tooltip=f"{p.number}: {p.label}, {p.x:.{measure.digits}f}{measure.unit}, {p.y:.1f} %",
        )
    _number_points(figure, axes, points, chart.baselines)
    return figure


def _within(interval: Span | None, low: float, high: float) -> Span | None:
    """Return an interval as far as its values can be."""
    return None if interval is None else (max(interval[0], low), min(interval[1], high))


def _number_points(figure: Figure, axes: Axes, points: Sequence[Point], baselines: Sequence[Baseline]) -> None:
    """Write every point's number beside it, with a line to it where that is not next to it."""
    figure.draw_without_rendering()  # settles where the axes are

    def pixels(x: float, y: float) -> tuple[float, float]:
        place = axes.transData.transform((x, y))
        return float(place[0]), float(place[1])

    places = [pixels(p.x, p.y) for p in points]
    r = _MARKER_SIZE / 2 + _MARKER_EDGE
    lines: list[Box] = []
    for p in points:
        ends = [(v, p.y) for v in p.x_interval or ()], [(p.x, v) for v in p.y_interval or ()]
        for end in filter(None, ends):
            (left, right), (bottom, top) = (sorted(sides) for sides in zip(*(pixels(*at) for at in end), strict=True))
            lines.append((left - 2, bottom - 2, right + 2, top + 2))
    frame = axes.get_window_extent()
    uprights = [pixels(baseline.value, 0)[0] for baseline in baselines]
    lines += [(x - 2, frame.y0, x + 2, frame.y1) for x in uprights]
    placed = place_labels(
        places,
        [(_text_width(str(p.number)) + 3, style.TEXT_SIZE + 1) for p in points],
        marks=[(x - r, y - r, x + r, y + r) for x, y in places],
        lines=lines,
        inside=(frame.x0, frame.y0, frame.x1, frame.y1),
    )
    to_data = axes.transData.inverted().transform
    for p, label in zip(points, placed, strict=True):
        if label.leader:
            (x1, y1), (x2, y2) = to_data(label.leader)
            axes.plot([x1, x2], [y1, y2], color=style.MUTED, linewidth=1, clip_on=False, zorder=1.5)
        x, y = to_data(((label.box[0] + label.box[2]) / 2, (label.box[1] + label.box[3]) / 2))
        text = axes.text(x, y, str(p.number), ha="center", va="center_baseline", fontweight="bold")
        text.set_in_layout(False)


def _strips(chart: StripPlot, width: int) -> Figure:
    names = [_wrapped(f"{strip.number}  {strip.label}", width - 16) for strip in chart.strips]
    above = max(map(_text_width, names)) > width / 2 - 24
    count = len(names)
    row = _ROW + (_LINE_HEIGHT * max(name.count("\n") + 1 for name in names) if above else 0)
    figure, axes = _figure(width, round(row * count + 60), chart.baselines, [])
    values = [v for strip in chart.strips for v in (*strip.values, *(strip.interval or ()))]
    axes.set_xlim(padded_range([*values, *(b.value for b in chart.baselines)], least=4))
    axes.set_ylim(count - 1 + (_ROW / 2 / row if above else 0.5), -1 + _ROW / 2 / row if above else -0.5)
    axes.set_xlabel("PSNR (dB), one dot per image and seed" if width > 500 else "PSNR (dB)")
    axes.grid(visible=False)
    _ticks(axes, width)
    if above:
        axes.set_yticks([])
        for i, name in enumerate(names):
            text = axes.text(0, i - 10 / row, name, transform=axes.get_yaxis_transform(), va="bottom")
            text.set_in_layout(False)
    else:
        axes.set_yticks(range(count), names, color=style.INK)
    _upright(axes, chart.baselines)
    for i, strip in enumerate(chart.strips):
        look = strip.marker
        dots = {"linestyle": "none", "marker": "o", "markersize": 6.4, "markeredgewidth": 0, "alpha": 0.55}
        axes.plot(strip.values, [i] * len(strip.values), color=style.color(look.series), clip_on=False, **dots)  # type: ignore[arg-type]
        if strip.interval:
            _whiskers(axes, [(strip.interval, (i, i))], look.series, cap="|")
        _mark(axes, strip.mean, i, look, size=9, tooltip=f"{strip.number}: {strip.label}, mean {strip.mean:.1f} dB")
    return figure


def _lines(chart: LineChart, width: int, with_key: bool) -> Figure:
    curves = chart.curves
    key = [(_handle(Marker(c.series, line=True)), c.label) for c in curves] if with_key else []
    figure, axes = _figure(width, 274 if width < 500 else 314, chart.baselines, key)
    percent = chart.ylabel.endswith("(%)")
    last = max(x for curve in curves for x, _ in curve.points)
    ys = [y for curve in curves for _, y in curve.points]
    ys += [v for curve in curves for _, *ends in curve.band for v in ends] + [b.value for b in chart.baselines]
    least = 10 if percent else 1e-9 + 0.1 * max(map(abs, ys))
    low, high = 0.0 if min(ys) >= 0 else -math.inf, 100.0 if percent else math.inf
    axes.set_xlim(-0.015 * max(last, 1), 1.015 * max(last, 1))
    axes.set_ylim(padded_range(ys, least=least, low=low, high=high))
    axes.set_title(_wrapped(chart.ylabel, width - 16))
    axes.set_xlabel("rounds of training")
    _ticks(axes, width, whole=True)
    for baseline in chart.baselines:
        axes.axhline(baseline.value, **_baseline_look(baseline))
    for curve in curves:
        if len(curve.band) > MAX_WHISKERS:
            at, lower, upper = zip(*curve.band, strict=True)
            axes.fill_between(at, lower, upper, color=style.color(curve.series), alpha=0.16, linewidth=0, clip_on=False)
    for curve in curves:
        _curve(axes, curve)
    return figure


def _curve(axes: Axes, curve: Curve) -> None:
    """Return a line, with whiskers where there are few rounds, and with markers on some of them."""
    x, y = zip(*curve.points, strict=True)
    if len(curve.band) <= MAX_WHISKERS:
        _whiskers(axes, [((at, at), (low, high)) for at, low, high in curve.band], curve.series, cap="_")
    end, most = len(x) - 1, min(len(x) - 1, 6)
    chosen = sorted({end * i // max(most, 1) for i in range(most + 1)})
    _line(axes, x, y, curve.series, tooltip=curve.label, marked=chosen)


def _heatmap(chart: Heatmap, width: int) -> Figure:
    count = len(chart.values)
    figure = Figure(figsize=(width / _DPI, width / _DPI), layout="constrained")
    axes = figure.add_subplot()
    full = to_rgba(style.color(0))[:3]  # an opacity is right on a dark page, too
    axes.pcolormesh(
        [[(*full, shade) for shade in row] for row in chart.shades], antialiased=False, linewidth=0, edgecolors="none"
    )
    axes.set_ylim(count, 0)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    step = max(1, round(24 * count / width))
    ticks, numbers = [i + 0.5 for i in range(0, count, step)], [str(i) for i in range(0, count, step)]
    axes.set_xticks(ticks, numbers)
    axes.set_yticks(ticks, numbers)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    return figure


def _figure(
    width: int, height: int, baselines: Sequence[Baseline], key: Sequence[tuple[Any, str]], digits: int = 1
) -> tuple[Figure, Axes]:
    """Return an empty figure with the names of the baselines above its axes, and with its key below.

    Args:
        width: in pixels.
        height: in pixels, without the rows of names and key.
        baselines: named in the order of their values.
        key: handles with what they stand for.
        digits: of the baselines' values, behind the point.
    """
    ordered = sorted(baselines, key=_value)
    named = [(Line2D([], [], **_baseline_look(b)), f"{b.label} {b.value:.{digits}f}") for b in ordered]
    key = [(handle, _wrapped(words, width - 60)) for handle, words in key]
    beside, above = _legend_size(named, width)
    columns, below = _legend_size(key, width)
    height += above + below + (12 if key else 0)
    figure = Figure(figsize=(width / _DPI, height / _DPI), layout="constrained")
    rows: list[tuple[Sequence[tuple[Any, str]], Any, int]] = [
        (named, "outside upper right", beside),
        (key, "outside lower left", columns),
    ]
    for entries, where, ncols in rows:
        if entries:
            handles, words = zip(*entries, strict=True)
            stacked = {tuple: HandlerTuple(ndivide=1)}
            figure.legend(handles, words, loc=where, ncols=ncols, handler_map=stacked, labelspacing=0.4)
    return figure, figure.add_subplot()


def _legend_size(entries: Sequence[tuple[Any, str]], width: int) -> tuple[int, int]:
    """Return in how many columns the entries of a legend fit, and how high they are then, in pixels."""
    if not entries:
        return 1, 0
    columns = max(1, int(width / (60 + max(_text_width(words) for _, words in entries))))
    lines = max(words.count("\n") + 1 for _, words in entries)
    return columns, math.ceil(math.ceil(len(entries) / columns) * (lines * _LINE_HEIGHT + 3))


def _value(baseline: Baseline) -> float:
    return baseline.value


def _ticks(axes: Axes, width: int, *, whole: bool = False) -> None:
    """Return round figures on both axes."""
    axes.xaxis.set_major_locator(MaxNLocator(5 if width < 500 else 9, steps=[1, 2, 5, 10], integer=whole))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_tick_label))


def _tick_label(value: float, _: int | None) -> str:
    return f"{value:,.10g}".replace("-", "\N{MINUS SIGN}")


def _upright(axes: Axes, baselines: Sequence[Baseline]) -> None:
    for baseline in baselines:
        axes.axvline(baseline.value, **_baseline_look(baseline))


def _baseline_look(baseline: Baseline) -> dict[str, Any]:
    return {"color": style.INK, "linewidth": 1.3, "dashes": style.BASELINE_DASHES[baseline.guess], "clip_on": False}


def _whiskers(axes: Axes, intervals: Sequence[tuple[Span, Span]], series: int, *, cap: str) -> None:
    """Draw intervals, each of two ends in x and two in y, with a cap at either end."""
    if not intervals:
        return
    xs, ys = ([v for one in intervals for v in (*one[axis], math.nan)] for axis in (0, 1))
    look = {"linewidth": 1.6, "markersize": 8, "markeredgewidth": 1.6, "marker": cap, "zorder": 1.9}
    axes.plot(xs, ys, color=style.color(series), clip_on=False, **look)  # type: ignore[arg-type]


def _line(
    axes: Axes, x: Sequence[float], y: Sequence[float], series: int, *, tooltip: str = "", marked: Sequence[int] = ()
) -> None:
    """Draw a series' line, with its marker on the points of these indices."""
    look = {**_marker_look(Marker(series), 8), "linestyle": "solid", "markevery": list(marked)} if marked else {}
    (line,) = axes.plot(x, y, **{"color": style.color(series), "clip_on": False, **look})
    if dashes := style.dashes(series):
        line.set_dashes(dashes)
    if tooltip:
        line.set_gid(style.TOOLTIP + escape_controls(tooltip))


def _mark(axes: Axes, x: float, y: float, look: Marker, *, size: float = _MARKER_SIZE, tooltip: str = "") -> None:
    (mark,) = axes.plot(x, y, **_marker_look(look, size), clip_on=False, zorder=3)
    if tooltip:
        mark.set_gid(style.TOOLTIP + escape_controls(tooltip))


def _marker_look(look: Marker, size: float) -> dict[str, Any]:
    color = style.color(look.series)
    return {
        **{"linestyle": "none", "marker": style.marker(look.series), "markersize": size, "color": color},
        **{"markeredgewidth": _MARKER_EDGE, "markerfacecolor": style.PAPER if look.hollow else color},
    }


def _handle(look: Marker) -> tuple[Line2D, ...]:
    """Return what stands for a series in a key."""
    mark = Line2D([], [], **_marker_look(look, 8))
    if not look.line:
        return (mark,)
    line = Line2D([], [], color=style.color(look.series))
    if dashes := style.dashes(look.series):
        line.set_dashes(dashes)
    return line, mark


def _text_width(words: str) -> float:
    """Return about how wide words are, in pixels."""
    return max(map(len, words.split("\n"))) * style.TEXT_SIZE * _CHARACTER_WIDTH


def _wrapped(words: str, width: float) -> str:
    """Return words from anywhere, visible, on lines of at most so many pixels."""
    most = max(1, int(width / style.TEXT_SIZE / _CHARACTER_WIDTH))
    return "\n".join(wrap(escape_controls(words), most, break_on_hyphens=False)) or " "
