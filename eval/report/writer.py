"""A report's files in the folder it is about."""

from __future__ import annotations

import re
from pathlib import Path

from eval.io import jsonl
from eval.report import render_html, render_markdown
from eval.report.assemble import build_report
from eval.report.blocks import FigureBlock, Report
from eval.report.charts.render import render_file
from eval.report.load import explain_damage
from fl.runtime.atomic_files import atomic_write, make_folder, refuse_link, remove_leftovers, remove_path

HTML, MARKDOWN = "report.html", "report.md"
FIGURES_FOLDER = "figures"
"""Where charts lie that were asked for as files."""
_OUR_FILES = re.compile(r"(picture-\d+-(best|median|worst|only|\d+)-(original|reconstruction)\.png|[a-z0-9-]+\.svg)")


def write_report(folder: str | Path, *, show: bool = True) -> tuple[Path, Path]:
    """Write `report.html`, `report.md` and what the latter shows, in `report/`, into a run directory.

    The same files in the folder give the same bytes. Of an earlier report nothing is left.

    Args:
        folder: that `hyperleak run` has written.
        show: whether private pictures are shown.

    Returns:
        The HTML file and the Markdown file.

    Raises:
        FileNotFoundError: it is no run directory.
        ValueError: a file in it is damaged; says which.
    """
    folder = Path(folder)
    beside = folder / render_markdown.FOLDER
    refuse_link(beside)  # before the work
    with jsonl.locked(folder):  # a run that puts its files in place is waited for
        return _write(folder, beside, show=show)


def write_figures(folder: str | Path, kind: str) -> list[Path]:
    """Write the charts of a run's report as files for papers and slides, into `figures/` in the run directory.

    Every chart is there twice: for the width of a page, and (`-column`) for a column. Each says itself what its marks
    stand for. The same run gives the same bytes. Charts of that format from before are removed.

    Args:
        folder: that `hyperleak run` has written.
        kind: one of `render.FORMATS`.

    Returns:
        The files.

    Raises:
        FileNotFoundError: it is no run directory.
        ValueError: a file in it is damaged, or there are no such figures; says which.
    """
    folder = Path(folder)
    beside = folder / FIGURES_FOLDER
    refuse_link(beside)
    with jsonl.locked(folder):
        files: dict[str, bytes] = {}
        with explain_damage(folder):
            for figure in _figure_blocks(build_report(folder, show=False)):
                for width, suffix in zip(figure.widths, ("", "-column"), strict=True):
                    files[f"{figure.name}{suffix}.{kind}"] = render_file(figure.chart, kind, width, alt=figure.alt)
        make_folder(beside)
        remove_leftovers(beside)
        for path in [*beside.glob(f"*.{kind}")]:
            if path.name not in files:
                remove_path(path)
        for name, content in files.items():
            _put(beside / name, content)
    return [beside / name for name in files]


def _figure_blocks(report: Report) -> list[FigureBlock]:
    return [block for section in report.sections for block in section.blocks if isinstance(block, FigureBlock)]


def _write(folder: Path, beside: Path, *, show: bool) -> tuple[Path, Path]:
    with explain_damage(folder):
        report = build_report(folder, show=show)
        page = render_html.render_html(report)
        text, shown = render_markdown.render_markdown(report)
    make_folder(beside)
    remove_leftovers(beside)
    for name, content in shown.items():
        _put(beside / name, content)
    _put(folder / HTML, page.encode())
    _put(folder / MARKDOWN, text.encode())
    for path in [*beside.iterdir()]:
        if path.name not in shown and _OUR_FILES.fullmatch(path.name):
            remove_path(path)
    return folder / HTML, folder / MARKDOWN


def _put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with atomic_write(path) as file:
        file.write(content)
