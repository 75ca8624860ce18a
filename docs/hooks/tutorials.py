"""Runs the tutorials and turns them into pages: Python files in cells, shown with what they print and draw."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
CACHE = ROOT / "build" / "tutorials"
PACKAGES = ("fl", "defenses", "attacks", "eval", "hyperleak", "hyperleak.py", "configs")
SECONDS = 240
"""How long a single cell may take."""
AT_ONCE = 2
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HYPERLEAK_DATA": "",  # tutorials take what comes with scikit-image
    "MALLOC_TRIM_THRESHOLD_": "2000000000",  # glibc keeps what is given back: a third of the time of large solves
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


@dataclass
class Tutorial:
    """A tutorial that was run.

    Attributes:
        name: of its file, without an ending.
        page: its text, code and outputs in Markdown.
        pictures: what it drew, PNG by file name.
        notebook: the whole as an .ipynb file, outputs included.
    """

    name: str
    page: str
    notebook: str
    pictures: dict[str, bytes] = field(default_factory=dict)


def names() -> list[str]:
    """Return the tutorials' names in the order of their numbers."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def title(name: str) -> str:
    """Return the heading of a tutorial."""
    found = re.search(r"^# # (.+)$", (FOLDER / f"{name}.py").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/tutorials/{name}.py: expected a first cell with a heading, '# # ...'")
    return found[1]


def run_all() -> list[Tutorial]:
    """Run every tutorial whose code, or the packages', changed since it was run here last."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, names()))


def run(name: str) -> Tutorial:
    """Run one tutorial, or take what it gave before for the same code."""
    text = (FOLDER / f"{name}.py").read_text()
    kept = CACHE / f"{name}-{_digest(text)}.ipynb"
    if kept.exists():
        notebook = nbformat.read(kept, as_version=4)
    else:
        notebook = execute(text)
        CACHE.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, kept)
    page, pictures = render(notebook, name)
    return Tutorial(name, page, nbformat.writes(notebook), pictures)


def execute(text: str) -> Any:
    """Run the cells of a Python file in a kernel of their own, in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = jupytext.reads(text, fmt="py:percent")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": paths, **ENVIRONMENT}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env=os.environ | settings)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    return notebook


def render(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            parts.append(_output(output, name, pictures))
    parts.insert(1, f"*[Download this page as a notebook]({name}.ipynb). It was run when this page was built.*")
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _output(output: Any, name: str, pictures: dict[str, bytes]) -> str:
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = base64.b64decode(data["image/png"])
        return f"![What the cell above draws]({file})"
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>| border=\"1\"| style=\"[^\"]*\"", "", data["text/html"], flags=re.DOTALL)
        return "\n".join(line.strip() for line in table.splitlines() if line.strip())
    if "text/plain" in data:
        return f"```text\n{data['text/plain']}\n```"
    return ""


def _digest(text: str) -> str:
    found = hashlib.sha256(text.encode())
    for package in PACKAGES:
        place = ROOT / package
        files = [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.yaml")])
        for file in files:
            found.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:16]
