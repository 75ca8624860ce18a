"""The look of all charts: colors for light and dark pages, and the shapes and dashes that tell series apart."""

from __future__ import annotations

from collections.abc import Mapping

WIDE, NARROW = 680, 328
"""Widths in pixels: of a chart on a page, and of one on a phone or in a column of a paper."""
TEXT_SIZE = 12
"""Height of text in pixels."""
PAPER, INK, MUTED, RULE = "#ffffff", "#1c1e21", "#5a6068", "#d9dce0"
"""Background, text and baselines, tick labels, grid lines; on a light page."""
SERIES = ("#0b5394", "#b3400a", "#1b7a5a", "#8a3b8f", "#7a6200", "#a3195b", "#0f7c8a", "#4d4d4d")
SERIES_DARK = ("#7db7f0", "#f2935c", "#6fd0a8", "#d79bdb", "#d9c25a", "#f08ab8", "#6fd3df", "#c4c4c4")
SHAPES = ("circle", "square", "triangle", "diamond", "inverted triangle", "star")
MARKERS = ("o", "s", "^", "D", "v", "*")
"""The shapes as matplotlib calls them."""
DASHES = ((), (7, 4), (2, 3), (9, 3, 2, 3), (12, 4), (4, 2))
"""Lengths in pixels of strokes and gaps of a series' line; none for a solid line."""
BASELINE_DASHES = {"mean": (7, 4), "nearest": (2, 3), "grey": (9, 3, 2, 3), "noise": (1, 5)}
"""The same for the lines of baselines, by the name of the guess."""
TOOLTIP = "tooltip:"
"""Starts the id of an element that has a tooltip; its words follow."""
CSS_NAMES: Mapping[str, str] = {
    PAPER: "--paper",
    INK: "--ink",
    MUTED: "--muted",
    RULE: "--rule",
    **{color: f"--c{i}" for i, color in enumerate(SERIES)},
}
"""The CSS variables of a page that stand for the light colors: they change with the page."""


def color(series: int) -> str:
    """Return the color of a series on a light page."""
    return SERIES[series % len(SERIES)]


def marker(series: int) -> str:
    """Return the marker of a series as matplotlib calls it."""
    return MARKERS[series % len(MARKERS)]


def dashes(series: int) -> tuple[int, ...]:
    """Return the dashes of a series' line; empty for a solid one."""
    return DASHES[series % len(DASHES)]


def css_variables(colors: tuple[str, ...]) -> str:
    """Return CSS declarations of the series' colors."""
    return "".join(f"--c{i}:{color};" for i, color in enumerate(colors))
