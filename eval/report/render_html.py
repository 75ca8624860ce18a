"""A report as one HTML file that needs nothing else: styles, drawings and pictures inside, no script."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import groupby

from jinja2 import Environment, StrictUndefined

from eval.io.sanitize import escape_controls
from eval.report.blocks import Block, FigureBlock, Report
from eval.report.charts import style
from eval.report.charts.render import render_swatch
from eval.report.charts.svg import to_element


def render_html(report: Report) -> str:
    """Return the page; all words are escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True, finalize=_shown)
    environment.filters["groupby_kind"] = _by_kind
    environment.globals |= {"kind_of": _kind, "png": _png, "swatch": render_swatch, "wide": _wide, "narrow": _narrow}
    template = environment.from_string(_file("report.html.j2"))
    return template.render(report=report, css=_css())


def _shown(value: object) -> object:
    """Return words with their control characters made visible; markup as it is."""
    return escape_controls(value, lines=True) if type(value) is str else value


def _file(name: str) -> str:
    return (resources.files("eval.report") / "templates" / name).read_text(encoding="utf-8")


def _css() -> str:
    colors = {"/*light*/": style.css_variables(style.SERIES), "/*dark*/": style.css_variables(style.SERIES_DARK)}
    css = _file("report.css")
    for place, words in colors.items():
        css = css.replace(place, words)
    return css


def _by_kind(blocks: Iterable[Block]) -> Iterator[tuple[str, list[Block]]]:
    """Return runs of blocks of one kind, so that galleries can stand side by side."""
    for kind, run in groupby(blocks, _kind):
        yield kind, list(run)


def _kind(block: Block) -> str:
    return type(block).__name__


def _png(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")


def _wide(figure: FigureBlock) -> str:
    return to_element(figure.wide, name=f"{figure.name}-wide", alt=figure.alt)


def _narrow(figure: FigureBlock) -> str:
    return to_element(figure.narrow, name=f"{figure.name}-narrow", alt=figure.alt)
