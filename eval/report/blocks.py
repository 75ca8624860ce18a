"""The parts a report is put together from; both renderings, HTML and Markdown, draw from these alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from eval.report.charts.render import render_svg
from eval.report.charts.specs import Chart, Marker
from eval.report.charts.style import NARROW, WIDE


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class DefinitionList:
    """A list of sentences, each with an optional term in front."""

    entries: list[tuple[str, str]]


@dataclass(frozen=True)
class Note:
    """A box that must not be missed.

    Attributes:
        title: of the box.
        entries: term and explanation.
    """

    title: str
    entries: list[tuple[str, str]]


@dataclass(frozen=True)
class FindingBlock:
    """What is said of one method under one defense.

    Attributes:
        subject: the method and its defense.
        verdict: in a few words.
        leaks: True if shown to leak, False if not shown, None if nothing can be said.
        lines: why.
        leaked: what leaked.
    """

    subject: str
    verdict: str
    leaks: bool | None
    lines: list[str]
    leaked: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TableBlock:
    """A table.

    Attributes:
        caption: what it shows.
        columns: names; those that begin with ">" hold figures and are aligned to the right.
        rows: of cells.
        lesser: rows below them that serve for comparison (baselines).
        marks: one for every row of `rows`, in a column of their own in front; or none at all.
    """

    caption: str
    columns: list[str]
    rows: list[list[str]]
    comparison_rows: list[list[str]] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)

    @property
    def column_names(self) -> list[str]:
        """Return the columns without their marks."""
        return [column.removeprefix(">") for column in self.columns]

    @property
    def numeric(self) -> list[bool]:
        """Return which columns hold figures."""
        return [column.startswith(">") for column in self.columns]


@dataclass(frozen=True)
class FigureBlock:
    """A chart with its title, caption and legend.

    Attributes:
        name: of its file, without ending.
        title: above it.
        chart: what it shows.
        alt: the same in words, for those who can't see it.
        caption: how to read it.
        legend: what its marks stand for.
        widths: of the chart in pixels, on a page and on a phone.
    """

    name: str
    title: str
    chart: Chart
    alt: str
    caption: str
    legend: TableBlock | None = None
    widths: tuple[int, int] = (WIDE, NARROW)

    @cached_property
    def wide(self) -> str:
        """Return the SVG of a page, as matplotlib writes it; drawn when it is first asked for."""
        return render_svg(self.chart, self.widths[0])

    @cached_property
    def narrow(self) -> str:
        """Return the SVG of a phone, as matplotlib writes it; drawn when it is first asked for."""
        return render_svg(self.chart, self.widths[1])


@dataclass(frozen=True)
class ImagePair:
    """One image beside what an attack made of it.

    Attributes:
        rule: why this one: "best".
        words: its score.
        original: a PNG file; None where nobody knows the true image.
        reconstruction: likewise.
        about: which image it is.
        size: (width, height) in pixels.
    """

    rule: str
    score: str
    original: bytes | None
    reconstruction: bytes
    description: str
    size: tuple[int, int]


@dataclass(frozen=True)
class GalleryBlock:
    """Cases of one attack.

    Attributes:
        name: of its files.
        title: which attack on which method.
        cases: chosen by rule.
    """

    name: str
    title: str
    pairs: list[ImagePair]


@dataclass(frozen=True)
class CodeBlock:
    """Text to be copied as it is.

    Attributes:
        title: what it is.
        text: the lines.
        folded: whether it is long, and folded away.
    """

    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Omission:
    """What could not be made, and why."""

    what: str
    reason: str


Block = (
    Paragraph | DefinitionList | Note | FindingBlock | TableBlock | FigureBlock | GalleryBlock | CodeBlock | Omission
)


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading of its own.

    Attributes:
        name: for links.
        title: the heading.
        blocks: its content.
    """

    name: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Report:
    """All that a report says, decided before it is drawn.

    Attributes:
        title: what was asked.
        lead: the answer in a sentence or two.
        facts: term and value, at a glance.
        sections: in the order of reading.
        alarms: errors that must be seen before anything else.
    """

    title: str
    lead: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    alarms: list[Note] = field(default_factory=list)
