"""The figures: accuracy against leakage, every image on its own, and what changes over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.report import svg
from eval.report.svg import Scale, around, line, path, short, tag, text

WIDE, NARROW = 680, 328
FEW = 8
"""Points up to which intervals are drawn as whiskers; more make a band."""
FLOOR_DASHES = {"mean": "7 4", "nearest": "2 3", "grey": "9 3 2 3", "noise": "1 5"}


@dataclass(frozen=True)
class Point:
    """One attack in the picture of accuracy against leakage.

    Attributes:
        number: that the legend explains.
        series: of its method.
        hollow: whether there is a defence.
        x, y: leakage in dB, accuracy in percent.
        x_range, y_range: their intervals, where there are any.
    """

    number: int
    series: int
    hollow: bool
    x: float
    y: float
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Strip:
    """One attack's images on a line.

    Attributes:
        number: that the legend explains.
        name: beside the line.
        series: of its method.
        hollow: whether there is a defence.
        values: one per image and seed, in dB.
        mean: of them.
        range: interval of the mean, where there is one.
    """

    number: int
    name: str
    series: int
    hollow: bool
    values: list[float]
    mean: float
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curve:
    """One line over rounds.

    Attributes:
        series: its colour, shape and dash.
        points: (round, value).
        band: (round, low, high), where there is one.
    """

    series: int
    points: list[tuple[float, float]]
    band: list[tuple[float, float, float]]


@dataclass(frozen=True)
class Floor:
    """A floor as a line: its guess, its words and its value in dB."""

    guess: str
    words: str
    value: float


def scatter(points: Sequence[Point], floors: Sequence[Floor], *, alt: str, width: int = WIDE) -> str:
    """Accuracy (upwards) against PSNR (to the right) with intervals, floors as upright lines."""
    xs = [v for p in points for v in (p.x, *(p.x_range or ()))] + [floor.value for floor in floors]
    ys = [v for p in points for v in (p.y, *(p.y_range or ()))]
    left, right, bottom = 50, 14, 46
    names, top = _floor_names(floors, Scale(*around(xs, least=4), left, width - right), width)
    height = top + bottom + (250 if width < 500 else 300)
    x = Scale(*around(xs, least=4), left, width - right)
    y = Scale(*around(ys, least=10, low=0, high=100), height - bottom, top)
    parts = [_axes(x, y, "PSNR of the reconstructions (dB)", "accuracy (%)", width)]
    parts += [_upright(floor, x, y) for floor in floors]
    parts += names
    taken = [(x(p.x) - 7, y(p.y) - 7, x(p.x) + 7, y(p.y) + 7) for p in points]
    for p in points:
        look = f"bar c{p.series % svg.SERIES}"
        if p.x_range:
            parts.append(_whisker([(x(v), y(p.y)) for v in p.x_range], look))
        if p.y_range:
            parts.append(_whisker([(x(p.x), y(v)) for v in p.y_range], look))
    parts += [svg.mark(x(p.x), y(p.y), p.series, hollow=p.hollow) for p in points]
    for p in points:
        parts.append(_numbered(x(p.x), y(p.y), str(p.number), taken, (left, top, width - right, height - bottom)))
    return svg.drawing(width, height, *parts, alt=alt)


def strips(rows: Sequence[Strip], floors: Sequence[Floor], *, alt: str, width: int = WIDE) -> str:
    """Every image of every attack on a common scale of PSNR, with means, intervals and floors."""
    room = 24 + max(svg.width_of(f"{row.number}  {row.name}") for row in rows)
    narrow = room > width / 2
    right, bottom, step, left = 14, 46, 44 if narrow else 34, 12 if narrow else room
    xs = [v for row in rows for v in (*row.values, *(row.range or ()))] + [floor.value for floor in floors]
    x = Scale(*around(xs, least=4), left, width - right)
    names, top = _floor_names(floors, x, width)
    height = int(top + bottom + step * len(rows))
    y = Scale(0, 1, top, height - bottom)
    parts = [_ticks_below(x, y, "PSNR (dB), one dot per image and seed", width, left)]
    parts += [_upright(floor, x, y) for floor in floors] + names
    for i, row in enumerate(rows):
        middle = top + step * (i + (0.68 if narrow else 0.5))
        words = f"{row.number}  {row.name}"
        if narrow:
            parts.append(text(left, middle - 13, words, class_="small halo"))
        else:
            parts.append(text(left - 12, middle + 4, words, text_anchor="end"))
        parts += [
            tag("circle", cx=x(v), cy=middle, r=3.2, class_=f"dot f{row.series % svg.SERIES}") for v in row.values
        ]
        if row.range:
            parts.append(_whisker([(x(v), middle) for v in row.range], f"bar c{row.series % svg.SERIES}"))
        parts.append(svg.mark(x(row.mean), middle, row.series, hollow=row.hollow, size=5))
    return svg.drawing(width, height, *parts, alt=alt)


def lines(
    curves: Sequence[Curve],
    *,
    ylabel: str,
    alt: str,
    floors: Sequence[Floor] = (),
    width: int = WIDE,
    percent: bool = False,
) -> str:
    """Values over rounds, with bands and, where they apply, floors as level lines."""
    points = [point for curve in curves for point in curve.points]
    ys = [v for _, v in points] + [v for c in curves for _, *ends in c.band for v in ends] + [f.value for f in floors]
    last = max(x for x, _ in points)
    left, right, top, bottom = 54, 14, 28, 46
    height = top + bottom + (200 if width < 500 else 240)
    x = Scale(0, max(last, 1), left + 8, width - right - 8)
    high = 100.0 if percent else float("inf")
    least, low = 10 if percent else 1e-9 + 0.1 * max(map(abs, ys)), 0.0 if min(ys) >= 0 else -float("inf")
    y = Scale(*around(ys, least=least, low=low, high=high), height - bottom, top)
    parts = [_axes(x, y, "rounds of training", ylabel, width, whole=True)]
    for floor in floors:
        dash = FLOOR_DASHES[floor.guess]
        parts.append(line(x.start, y(floor.value), x.stop, y(floor.value), class_="floor", stroke_dasharray=dash))
    for curve in curves:
        if len(curve.band) > FEW:
            upper, lower = ([(x(r), y(v[i])) for r, *v in curve.band] for i in (1, 0))
            parts.append(path([*upper, *reversed(lower)], close=True, class_=f"band f{curve.series % svg.SERIES}"))
    for curve in curves:
        parts += _curve(curve, x, y)
    for floor in floors:
        parts.append(text(x.stop, y(floor.value) - 5, floor.words, class_="small halo", text_anchor="end"))
    return svg.drawing(width, height, *parts, alt=alt)


def _curve(curve: Curve, x: Scale, y: Scale) -> list[str]:
    """A line with whiskers where there are few points, and its mark on some of them."""
    look, dash = f"c{curve.series % svg.SERIES}", svg.DASHES[curve.series % len(svg.DASHES)] or None
    drawn = [(x(r), y(value)) for r, value in curve.points]
    parts = [path(drawn, class_=f"line {look}", stroke_dasharray=dash)] if len(drawn) > 1 else []
    if len(curve.band) <= FEW:
        parts += [_whisker([(x(r), y(low)), (x(r), y(high))], f"bar {look}") for r, low, high in curve.band]
    last, most = len(drawn) - 1, min(len(drawn) - 1, 6)
    chosen = sorted({last * i // max(most, 1) for i in range(most + 1)})
    return parts + [svg.mark(drawn[i][0], drawn[i][1], curve.series, size=4.5) for i in chosen]


def _axes(x: Scale, y: Scale, xlabel: str, ylabel: str, width: int, *, whole: bool = False) -> str:
    """Grid, ticks and names of both axes."""
    left = min(x.start, 54)
    parts = []
    for value in y.ticks(6):
        parts.append(line(left, y(value), x.stop, y(value), class_="grid"))
        parts.append(text(left - 7, y(value) + 4, short(value), class_="small muted", text_anchor="end"))
    parts.append(text(4, 14, ylabel, class_="small"))
    return "".join(parts) + _ticks_below(x, y, xlabel, width, left, whole=whole)


def _ticks_below(x: Scale, y: Scale, label: str, width: int, left: float, *, whole: bool = False) -> str:
    floor = max(y.start, y.stop)
    parts = [line(left, floor, x.stop, floor, class_="axis")]
    for value in x.ticks(5 if width < 500 else 9):
        if whole and value != int(value):
            continue
        parts.append(line(x(value), floor, x(value), floor + 4, class_="axis"))
        parts.append(text(x(value), floor + 18, short(value), class_="small muted", text_anchor="middle"))
    parts.append(text((left + x.stop) / 2, floor + 38, label, class_="small", text_anchor="middle"))
    return "".join(parts)


def _upright(floor: Floor, x: Scale, y: Scale) -> str:
    ends = sorted((y.start, y.stop))
    return line(
        x(floor.value), *(ends[0], x(floor.value), ends[1]), class_="floor", stroke_dasharray=FLOOR_DASHES[floor.guess]
    )


def _floor_names(floors: Sequence[Floor], x: Scale, width: int) -> tuple[list[str], int]:
    """Names of upright lines above the picture, in as many rows as keep them apart; and where the picture starts."""
    rows: list[list[tuple[float, float]]] = []
    placed = []
    for floor in sorted(floors, key=lambda item: item.value):
        words = f"{floor.words} {floor.value:.1f}"
        half = svg.width_of(words, svg.SMALL) / 2
        middle = min(max(x(floor.value), half + 2), width - half - 2)
        span = (middle - half - 6, middle + half + 6)
        row = next(
            (i for i, taken in enumerate(rows) if all(b <= span[0] or a >= span[1] for a, b in taken)), len(rows)
        )
        rows[row : row + 1] = [[*(rows[row] if row < len(rows) else []), span]]
        placed.append((floor, words, middle, row))
    top = 26 + 16 * len(rows)
    parts = [
        text(middle, top - 6 - 16 * row, words, class_="small", text_anchor="middle")
        for _, words, middle, row in placed
    ]
    return parts, top


def _whisker(ends: Sequence[tuple[float, float]], look: str) -> str:
    """An interval with its two caps."""
    (x1, y1), (x2, y2) = ends
    dx, dy = (0, 4) if abs(y1 - y2) < abs(x1 - x2) else (4, 0)
    parts = [line(x1, y1, x2, y2, class_=look)]
    parts += [line(x - dx, y - dy, x + dx, y + dy, class_=look) for x, y in ends]
    return "".join(parts)


Box = tuple[float, float, float, float]


def _numbered(x: float, y: float, words: str, taken: list[Box], inside: Box) -> str:
    """A number beside a mark, where it covers least of what is drawn already."""
    w, h = svg.width_of(words), svg.SIZE
    places = [(9, -8), (9, 18), (-9 - w, -8), (-9 - w, 18), (-w / 2, -12), (-w / 2, 24), (14, -22), (14, 32)]
    boxes = [(x + dx, y + dy - h, x + dx + w, y + dy) for dx, dy in places]
    best = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken) + 10 * _outside(box, inside))
    taken.append(best)
    return text(best[0], best[3], words, class_="halo", font_weight="600")


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(box: Box, inside: Box) -> float:
    return sum(
        max(0.0, gap) for gap in (inside[0] - box[0], inside[1] - box[1], box[2] - inside[2], box[3] - inside[3])
    )
