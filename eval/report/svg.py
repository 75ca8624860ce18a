"""Drawings as text: axes, marks and lines in SVG, the same bytes for the same figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eval.io.sanitize import visible

SERIES = 8
"""Colours there are; shapes and dashes tell further series apart."""
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 2")
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "hexagon")
SIZE, SMALL = 13, 12
"""Text in pixels."""
_DIGIT = 0.56
"""Mean width of a character in units of its size."""

COLOURS = ("#0b5394", "#b3400a", "#1b7a5a", "#8a3b8f", "#7a6200", "#a3195b", "#0f7c8a", "#4d4d4d")
DARK = ("#7db7f0", "#f2935c", "#6fd0a8", "#d79bdb", "#d9c25a", "#f08ab8", "#6fd3df", "#c4c4c4")


def style(scope: str = "svg") -> str:
    """Rules of all drawings; the colours themselves are variables of the page."""
    series = "".join(
        f"{scope} .c{i}{{stroke:var(--c{i});color:var(--c{i})}}{scope} .f{i}{{fill:var(--c{i})}}" for i in range(SERIES)
    )
    return (
        f"{scope} text{{font:{SIZE}px var(--sans);fill:var(--ink)}}{scope} .small{{font-size:{SMALL}px}}"
        f"{scope} .halo{{stroke:var(--paper);stroke-width:4px;paint-order:stroke}}"
        f"{scope} .muted{{fill:var(--muted)}}{scope} .grid{{stroke:var(--rule)}}{scope} .axis{{stroke:var(--muted)}}"
        f"{scope} .floor{{stroke:var(--ink);stroke-width:1.3}}{scope} .line{{fill:none;stroke-width:2}}"
        f"{scope} .mark{{stroke-width:2}}{scope} .open{{fill:var(--paper)}}{scope} .bar{{stroke-width:1.6}}"
        f"{scope} .band{{stroke:none;opacity:.16}}{scope} .dot{{stroke:none;opacity:.55}}" + series
    )


def variables(colours: Sequence[str] = COLOURS) -> str:
    """The colours of the series as CSS variables."""
    return "".join(f"--c{i}:{colour};" for i, colour in enumerate(colours))


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element; children are markup already, attributes are escaped (`class_` for `class`, `_` for `-`)."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(visible(_number(value)), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{''.join(children)}</{name}>"


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """Words at a place, escaped."""
    return tag("text", escape(visible(words), quote=False), x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def path(points: Sequence[tuple[float, float]], *, close: bool = False, **attributes: object) -> str:
    """A line through points, or the area inside."""
    steps = " ".join(f"{'L' if i else 'M'}{_number(x)} {_number(y)}" for i, (x, y) in enumerate(points))
    return tag("path", d=steps + (" Z" if close else ""), **attributes)


def mark(x: float, y: float, series: int, *, hollow: bool = False, size: float = 5.5) -> str:
    """The mark of a series: its shape and colour."""
    look = f"mark c{series % SERIES} {'open' if hollow else f'f{series % SERIES}'}"
    shape, r = SHAPES[series % len(SHAPES)], size
    if shape == "circle":
        return tag("circle", cx=x, cy=y, r=r, class_=look)
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "triangle": [(0, -1.15), (1.05, 0.8), (-1.05, 0.8)],
        "diamond": [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        "cross": [(-1, -1), (0, -0.35), (1, -1), (0.35, 0), (1, 1), (0, 0.35), (-1, 1), (-0.35, 0)],
        "hexagon": [(math.cos(a * math.pi / 3), math.sin(a * math.pi / 3)) for a in range(6)],
    }[shape]
    return path([(x + a * r, y + b * r) for a, b in corners], close=True, class_=look)


def width_of(words: str, size: float = SIZE) -> float:
    """About how wide words are, in pixels."""
    return len(words) * size * _DIGIT


def drawing(width: int, height: int, *parts: str, alt: str) -> str:
    """The whole of it, with its description for those who can't see it."""
    return tag(
        "svg", *parts, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", **{"aria-label": alt}
    )


def swatch(series: int, *, hollow: bool = False, dashed: bool = False) -> str:
    """What a series looks like, for a legend."""
    stroke = f"line c{series % SERIES}"
    dash = DASHES[series % len(DASHES)] or None
    parts = [line(0, 8, 34, 8, class_=stroke, stroke_dasharray=dash)] if dashed else []
    size = 34 if dashed else 16
    return tag(
        "svg",
        *parts,
        mark(size / 2, 8, series, hollow=hollow, size=5),
        viewBox=f"0 0 {size} 16",
        width=size,
        height=16,
        aria_hidden="true",
    )


@dataclass(frozen=True)
class Scale:
    """From figures to pixels.

    Attributes:
        low, high: figures at the ends.
        start, stop: pixels there.
    """

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """The pixel of a figure."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, most: int) -> list[float]:
        """Round figures inside, at most `most` of them (two at least)."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 10) for i in range(first, last + 1)]


def around(
    values: Sequence[float], *, least: float, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    """A range that holds the values with a margin, at least `least` wide, and within [low, high] as far as can be."""
    bottom, top = min(values), max(values)
    margin = max(0.07 * (top - bottom), (least - (top - bottom)) / 2, 0)
    bottom, top = max(bottom - margin, low), min(top + margin, high)
    return (bottom, max(top, bottom + least / 2))


def short(value: float) -> str:
    """A figure for an axis: no more digits than it needs."""
    return f"{value:,.10g}".replace("-", "\N{MINUS SIGN}")


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
