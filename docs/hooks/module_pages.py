"""Lists the modules of a package with the first sentence of their docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.hooks.registry_pages import escape
from docs.hooks.registry_pages import table as markdown_table

ROOT = Path(__file__).resolve().parents[2]


def table(folder: str) -> str:
    """Return the modules directly in a folder of the repository as a Markdown table."""
    rows = [(f"`{path.name}`", escape(_first_sentence(path))) for path in _modules(ROOT / folder)]
    return markdown_table(("module", "what it is for"), rows)


def _modules(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"no folder {folder.relative_to(ROOT)} to list the modules of")
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


def _first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z])", text)[0]
