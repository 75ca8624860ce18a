"""Finding one's way in a report."""

from __future__ import annotations

from eval.report.blocks import Omission, Report, TableBlock


def blocks(content: Report, kind: type) -> list:
    """All blocks of a kind, in order."""
    return [block for section in content.sections for block in section.blocks if isinstance(block, kind)]


def grid(content: Report, caption: str) -> TableBlock:
    """The table of this caption."""
    return next(block for block in blocks(content, TableBlock) if block.caption == caption)


def reasons(content: Report) -> str:
    """What was left out, and why."""
    return " ".join(f"{block.what}: {block.reason}" for block in blocks(content, Omission))
