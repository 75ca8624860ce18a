"""Lists the modules of a package with the first sentence of their docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.hooks.registry_pages import escape
from docs.hooks.registry_pages import table as markdown_table

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("module", "what it is for")


def tables(package: str) -> str:
    """Return a table of a package's own modules, and one for each folder in it, as Markdown.

    Raises:
        ValueError: there is no such folder.
    """
    place = ROOT / package
    if not place.is_dir():
        raise ValueError(f"no folder {package} to list the modules of")
    parts = [_table(place)]
    for folder in sorted(path.parent for path in place.rglob("__init__.py") if path.parent != place):
        if own := _table(folder):
            about = escape(first_sentence(folder / "__init__.py"))
            parts.append(f"### `{folder.relative_to(ROOT).as_posix()}`\n\n{about}\n\n{own}")
    return "\n\n".join(parts)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z])", text)[0]


def _table(folder: Path) -> str:
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    rows = [(f"`{path.name}`", escape(first_sentence(path))) for path in modules]
    return markdown_table(COLUMNS, rows) if rows else ""
