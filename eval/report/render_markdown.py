"""A report as Markdown, with its drawings and pictures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.io.sanitize import escape_controls
from eval.io.sanitize import escape_markdown as escape
from eval.report.blocks import (
    Block,
    CodeBlock,
    DefinitionList,
    FigureBlock,
    FindingBlock,
    GalleryBlock,
    Note,
    Omission,
    Paragraph,
    Report,
    TableBlock,
)
from eval.report.charts import style
from eval.report.charts.specs import Marker
from eval.report.charts.svg import to_file

FOLDER = "report"
"""Where the files lie, beside `report.md`."""


def render_markdown(report: Report) -> tuple[str, dict[str, bytes]]:
    """Return the text, and the files it shows by their names in `FOLDER`."""
    files: dict[str, bytes] = {}
    parts = [f"# {escape(report.title)}", *(_block(note, files) for note in report.alarms)]
    parts += [f"**{escape(report.lead)}**", _list(report.facts)]
    for section in report.sections:
        parts.append(f"## {escape(section.title)}")
        parts += [_block(block, files) for block in section.blocks]
    return "\n\n".join(parts) + "\n", files


def _block(block: Block, files: dict[str, bytes]) -> str:
    match block:
        case Paragraph(words):
            return escape(words)
        case DefinitionList(entries):
            return _list(entries)
        case Note(title, entries):
            return "\n".join([f"> **{escape(title)}**", ">", *(f"> {line}" for line in _list(entries).splitlines())])
        case FindingBlock():
            lines = "\n".join(f"- {escape(line)}" for line in block.lines)
            return f"### {escape(block.subject)}: {escape(block.verdict)}\n\n{lines}"
        case TableBlock():
            return f"### {escape(block.caption)}\n\n{_table(block)}"
        case FigureBlock():
            return _figure(block, files)
        case GalleryBlock():
            return _gallery(block, files)
        case CodeBlock():
            return _code(block)
        case Omission(what, why):
            return f"*Left out: {escape(what)}, because {escape(why)}.*"


def _list(entries: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- **{escape(term)}**: {escape(words)}" for term, words in entries)


def _table(grid: TableBlock) -> str:
    names = [*(["mark"] if grid.markers else []), *grid.column_names]
    right = [*([False] if grid.markers else []), *grid.numeric]
    rows = [_row(names), "|" + "|".join(" ---: " if figures else " --- " for figures in right) + "|"]
    for i, row in enumerate(grid.rows):
        rows.append(_row([*([_mark(grid.markers[i])] if grid.markers else []), *row]))
    rows += [_row([*([""] if grid.markers else []), *row]) for row in grid.comparison_rows]
    return "\n".join(rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escape(cell) for cell in cells)} |"


def _mark(mark: Marker) -> str:
    shape = style.SHAPES[mark.series % len(style.SHAPES)]
    return f"{'hollow ' if mark.hollow else ''}{shape}"


def _figure(figure: FigureBlock, files: dict[str, bytes]) -> str:
    name = f"{figure.name}.svg"
    files[name] = to_file(figure.wide, alt=figure.alt)
    shown = f"![{escape(figure.alt)}]({FOLDER}/{name})"
    parts = [f"### {escape(figure.title)}", shown, escape(figure.caption)]
    return "\n\n".join([*parts, *([_table(figure.legend)] if figure.legend else [])])


def _gallery(gallery: GalleryBlock, files: dict[str, bytes]) -> str:
    blind = all(case.original is None for case in gallery.pairs)
    columns = (
        ["case", "reconstruction", "what the attack says"] if blind else ["case", "original", "reconstruction", "PSNR"]
    )
    lines = [f"### {escape(gallery.title)}", "", _row(columns), _row(["---"] * len(columns))]
    for case in gallery.pairs:
        shown = []
        for kind, picture in (("original", case.original), ("reconstruction", case.reconstruction)):
            if picture is None:
                continue
            name = f"{gallery.name}-{case.rule}-{kind}.png"
            files[name] = picture
            shown.append(f"![{kind}, {escape(case.rule)} case, {escape(case.description)}]({FOLDER}/{name})")
        lines.append(f"| {' | '.join([escape(case.rule), *shown, escape(case.score)])} |")
    return "\n".join(lines)


def _code(code: CodeBlock) -> str:
    shown = escape_controls(code.text, lines=True)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    text = f"{fence}text\n{shown}\n{fence}"
    if code.folded:
        return f"<details><summary>{escape(code.title)}</summary>\n\n{text}\n\n</details>"
    return f"### {escape(code.title)}\n\n{text}"
