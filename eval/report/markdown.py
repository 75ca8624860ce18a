"""A report as Markdown, with its drawings and pictures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.io.sanitize import in_markdown as escape
from eval.io.sanitize import visible
from eval.report import svg
from eval.report.blocks import Absent, Block, Code, Figure, Finding, Gallery, Grid, Items, Mark, Note, Report, Text

FOLDER = "report"
"""Where the files lie, beside `report.md`."""
_LIGHT = (
    "--paper:#fff;--ink:#1c1e21;--muted:#5a6068;--rule:#d9dce0;--sans:system-ui,'Liberation Sans',Arial,sans-serif;"
)


def render(report: Report) -> tuple[str, dict[str, bytes]]:
    """The text, and the files it shows by their names in `FOLDER`."""
    files: dict[str, bytes] = {}
    parts = [f"# {escape(report.title)}", *(_block(note, files) for note in report.alarms)]
    parts += [f"**{escape(report.lead)}**", _list(report.facts)]
    for section in report.sections:
        parts.append(f"## {escape(section.title)}")
        parts += [_block(block, files) for block in section.blocks]
    return "\n\n".join(parts) + "\n", files


def standalone(drawing: str) -> bytes:
    """An SVG file of an SVG element, on white, with its own styles."""
    head, rest = drawing.split(">", 1)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    style = f"<style>svg{{{_LIGHT}{svg.variables()}}}{svg.style()}</style>"
    return f'{head}>{style}<rect width="100%" height="100%" fill="#fff"></rect>{rest}\n'.encode()


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


def _mark(mark: Mark) -> str:
    shape = svg.SHAPES[mark.series % len(svg.SHAPES)]
    return f"{'hollow ' if mark.hollow else ''}{shape}"


def _figure(figure: Figure, files: dict[str, bytes]) -> str:
    name = f"{figure.name}.svg"
    files[name] = standalone(figure.wide)
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
