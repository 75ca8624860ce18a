"""A report's files in the folder it is about."""

from __future__ import annotations

import re
from pathlib import Path

from eval.io import jsonl
from eval.report import html, markdown
from eval.report.content import build
from eval.report.load import reading
from fl.runtime.atomic_files import make, refuse_link, remove, replacing, sweep

HTML, MARKDOWN = "report.html", "report.md"
_OURS = re.compile(r"(picture-\d+-(best|median|worst|only)-(original|reconstruction)\.png|[a-z0-9-]+\.svg)")


def write(folder: str | Path, *, show: bool = True) -> tuple[Path, Path]:
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
    beside = folder / markdown.FOLDER
    refuse_link(beside)  # before the work
    with jsonl.locked(folder):  # a run that puts its files in place is waited for
        return _write(folder, beside, show=show)


def _write(folder: Path, beside: Path, *, show: bool) -> tuple[Path, Path]:
    with reading(folder):
        report = build(folder, show=show)
        page = html.render(report)
        text, shown = markdown.render(report)
    make(beside)
    sweep(beside)
    for name, content in shown.items():
        _put(beside / name, content)
    _put(folder / HTML, page.encode())
    _put(folder / MARKDOWN, text.encode())
    for path in [*beside.iterdir()]:
        if path.name not in shown and _OURS.fullmatch(path.name):
            remove(path)
    return folder / HTML, folder / MARKDOWN


def _put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as file:
        file.write(content)
