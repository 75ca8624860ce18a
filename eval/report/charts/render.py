"""Charts as SVG, PDF and PNG: the same bytes for the same chart. matplotlib is loaded when the first is drawn."""

from __future__ import annotations

import logging
from functools import lru_cache
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING

from eval.report.charts import svg
from eval.report.charts.specs import Chart, Marker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "png", "svg")
"""Formats of files that charts can be written to."""
PNG_DPI = 288
"""Dots of a PNG to 72 pixels of the page."""


def render_svg(chart: Chart, width: int) -> str:
    """Return matplotlib's own SVG of a chart; `svg.to_element` and `svg.to_file` make something of it."""
    draw = _draw()
    with draw.chart_style():
        return _saved_svg(draw.draw(chart, width))


def render_file(chart: Chart, kind: str, width: int, *, alt: str) -> bytes:
    """Return a file that stands alone: it says itself what its marks stand for.

    Args:
        chart: what it shows.
        kind: one of `FORMATS`.
        width: in pixels; `style.NARROW` for a column of a paper.
        alt: what it shows in words, for an SVG.

    Raises:
        ValueError: the format is none of `FORMATS`.
    """
    if kind not in FORMATS:
        raise ValueError(f"no figures as {kind!r}; choose from {', '.join(FORMATS)}")
    draw = _draw()
    with draw.chart_style():
        figure = draw.draw(chart, width, with_key=True)
        if kind == "svg":
            return svg.to_file(_saved_svg(figure), alt=alt)
        draw.add_halos(figure)
        return _saved(figure, kind)


@lru_cache
def render_swatch(marker: Marker) -> str:
    """Return an SVG element that shows what a series looks like, for a row of a table."""
    draw = _draw()
    with draw.chart_style():
        drawn = _saved_svg(draw.draw_swatch(marker))
    return svg.to_element(drawn, name="", alt="")


def _draw() -> ModuleType:
    """Return the module that draws, loaded without matplotlib's remarks on where it keeps its list of fonts."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from eval.report.charts import draw
    finally:
        logger.setLevel(level)
    return draw


def _saved_svg(figure: Figure) -> str:
    return _saved(figure, "svg").decode()


def _saved(figure: Figure, kind: str) -> bytes:
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    buffer = BytesIO()
    figure.savefig(buffer, format=kind, metadata=dates[kind], dpi=PNG_DPI if kind == "png" else 72)
    return buffer.getvalue()
