"""A report as Markdown, with its drawings and pictures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.io.sanitize import in_markdown as escape
from eval.io.sanitize import visible
from eval.report.blocks import Absent, Block, Code, Figure, Finding, Gallery, Grid, Items, Note, Report, Text
from eval.report.charts import style
from eval.report.charts.specs import Marker
from eval.report.charts.svg import to_file

FOLDER = "report"
"""Where the files lie, beside `report.md`."""


def render(report: Report) -> tuple[str, dict[str, bytes]]:
    """The text, and the files it shows by their names in `FOLDER`."""
    files: dict[str, bytes] = {}
    parts = [f"# {escape(report.title)}", *(_block(note, files) for note in report.alarms)]
    parts += [f"**{escape(report.lead)}**", _list(report.facts)]
    for section in report.sections:
        parts.append(f"## {escape(section.title)}")
        parts += [_block(block, files) for block in section.blocks]
    return "\n\n".join(parts) + "\n", files


def _block(block: Block, files: dict[str, bytes]) -> str:
    match block:
        case Text(words):
            return escape(words)
        case Items(entries):
            return _list(entries)
        case Note(title, entries):
            return "\n".join([f"> **{escape(title)}**", ">", *(f"> {line}" for line in _list(entries).splitlines())])
        case Finding():
            lines = "\n".join(f"- {escape(line)}" for line in block.lines)
            return f"### {escape(block.subject)}: {escape(block.verdict)}\n\n{lines}"
        case Grid():
            return f"### {escape(block.caption)}\n\n{_table(block)}"
        case Figure():
            return _figure(block, files)
        case Gallery():
            return _gallery(block, files)
        case Code():
            return _code(block)
        case Absent(what, why):
            return f"*Left out: {escape(what)}, because {escape(why)}.*"


def _list(entries: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- **{escape(term)}**: {escape(words)}" for term, words in entries)


def _table(grid: Grid) -> str:
    names = [*(["mark"] if grid.marks else []), *grid.names]
    right = [*([False] if grid.marks else []), *grid.right]
    rows = [_row(names), "|" + "|".join(" ---: " if figures else " --- " for figures in right) + "|"]
    for i, row in enumerate(grid.rows):
        rows.append(_row([*([_mark(grid.marks[i])] if grid.marks else []), *row]))
    rows += [_row([*([""] if grid.marks else []), *row]) for row in grid.lesser]
    return "\n".join(rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escape(cell) for cell in cells)} |"


def _mark(mark: Marker) -> str:
    shape = style.SHAPES[mark.series % len(style.SHAPES)]
    return f"{'hollow ' if mark.hollow else ''}{shape}"


def _figure(figure: Figure, files: dict[str, bytes]) -> str:
    name = f"{figure.name}.svg"
    files[name] = to_file(figure.wide, alt=figure.alt)
    shown = f"![{escape(figure.alt)}]({FOLDER}/{name})"
    parts = [f"### {escape(figure.title)}", shown, escape(figure.caption)]
    return "\n\n".join([*parts, *([_table(figure.legend)] if figure.legend else [])])


def _gallery(gallery: Gallery, files: dict[str, bytes]) -> str:
    lines = [
        f"### {escape(gallery.title)}",
        "",
        "| case | original | reconstruction | PSNR |",
        "| --- | --- | --- | --- |",
    ]
    for case in gallery.cases:
        shown = []
        for kind, picture in (("original", case.original), ("reconstruction", case.reconstruction)):
            name = f"{gallery.name}-{case.rule}-{kind}.png"
            files[name] = picture
            shown.append(f"![{kind}, {escape(case.rule)} case, {escape(case.about)}]({FOLDER}/{name})")
        lines.append(f"| {escape(case.rule)} | {shown[0]} | {shown[1]} | {escape(case.words)} |")
    return "\n".join(lines)


def _code(code: Code) -> str:
    shown = visible(code.text, lines=True)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    text = f"{fence}text\n{shown}\n{fence}"
    if code.folded:
        return f"<details><summary>{escape(code.title)}</summary>\n\n{text}\n\n</details>"
    return f"### {escape(code.title)}\n\n{text}"
