"""Hooks of mkdocs: pages that are made at the build, the navigation over them, and links that work here and there."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.hooks import SUMMARIES, module_pages, registry_pages, tutorials  # noqa: E402 - the line above makes it importable

BENCHMARKS = "benchmarks/results"
"""Where benchmarks keep their pages, in the repository."""
SHOWN_AT = "results/benchmarks"
"""Where the site has them."""
KINDS = ("methods", "attacks", "defenses", "datasets", "models", "partitions", "augmentations")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
INTERVAL = re.compile(r"\[-?[\d.]+, -?[\d.]+\](?=[^<>]*</td>)")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Fill the navigation's places for generated pages."""
    config.nav = [item for entry in config.nav for item in _expand(entry)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is made at the build: reference, tutorials, pages of benchmarks, the changelog."""
    made: dict[str, str | bytes] = dict(registry_pages.pages())
    made["changelog.md"] = (ROOT / "CHANGELOG.md").read_text()
    for path in sorted((ROOT / BENCHMARKS).rglob("*")):
        if path.is_file():
            made[f"{SHOWN_AT}/{path.relative_to(ROOT / BENCHMARKS).as_posix()}"] = path.read_bytes()
    for tutorial in tutorials.run_all():
        made[f"tutorials/{tutorial.name}.md"] = tutorial.page
        made[f"tutorials/{tutorial.name}.ipynb"] = tutorial.notebook
        made |= {f"tutorials/{name}": data for name, data in tutorial.pictures.items()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write what stands for generated lists, and turn links into the repository into links within the site."""
    source = page.file.src_uri
    if source.startswith(f"{SHOWN_AT}/"):  # wide tables need the room beside them
        page.meta.setdefault("hide", ["toc"])
    markdown = re.sub(r"<!-- modules: ([\w/]+) -->", lambda m: module_pages.tables(m[1]), markdown)
    home = repository_path(source)
    return "".join(
        part if part.startswith("```") else LINK.sub(lambda m: _link(m, home, source, files), part)
        for part in FENCED.split(markdown)
    )


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keep intervals in tables on one line each."""
    return INTERVAL.sub(lambda found: f'<span class="interval">{found[0]}</span>', html)


def repository_path(source: str) -> str:
    """Return where a page of the site stands in the repository."""
    if source.startswith(f"{SHOWN_AT}/"):
        return f"{BENCHMARKS}/{source.removeprefix(f'{SHOWN_AT}/')}"
    return "CHANGELOG.md" if source == "changelog.md" else f"docs/{source}"


def site_path(path: str) -> str | None:
    """Return where the site has a file of the repository, or None."""
    if path.startswith(f"{BENCHMARKS}/"):
        return f"{SHOWN_AT}/{path.removeprefix(f'{BENCHMARKS}/')}"
    if path.startswith("docs/tutorials/") and path.endswith(".py"):
        return path.removeprefix("docs/").removesuffix(".py") + ".md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return {"CHANGELOG.md": "changelog.md", "README.md": "index.md"}.get(path)


def _link(found: re.Match[str], home: str, source: str, files: Any) -> str:
    mark, words, target = found.groups()
    path, sharp, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:"):
        return found[0]
    place = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(home), path)))
    if place is None:
        return f"`{posixpath.normpath(posixpath.join(posixpath.dirname(home), path))}`" if not mark else found[0]
    return f"{mark}[{words}]({os.path.relpath(place, PurePosixPath(source).parent)}{sharp}{anchor})"


# ---- navigation ------------------------------------------------------------------------------------------------------
def _expand(entry: Any) -> list[Any]:
    if isinstance(entry, str):
        return _generated(entry.removeprefix("generated:")) if entry.startswith("generated:") else [entry]
    ((title, value),) = entry.items()
    return [{title: [item for inner in value for item in _expand(inner)]}] if isinstance(value, list) else [entry]


def _generated(kind: str) -> list[Any]:
    if kind == "tutorials":
        return [{tutorials.title(name): f"tutorials/{name}.md"} for name in tutorials.names()]
    if kind in KINDS:
        names = registry_pages.registries()[kind].names()
        return [f"reference/{kind}/index.md", *({name: f"reference/{kind}/{name}.md"} for name in names)]
    if kind == "benchmarks":
        return [f"{SHOWN_AT}/{path.name}" for path in sorted((ROOT / BENCHMARKS).glob("*.md"))]
    if kind == "runs":
        found = [path.name for path in sorted((ROOT / "docs/results").glob("*.md"))]
        return [f"results/{name}" for name in found if name not in SUMMARIES]
    if kind == "decisions":
        return [f"design/decisions/{path.name}" for path in sorted((ROOT / "docs/design/decisions").glob("*.md"))]
    raise ValueError(f"mkdocs.yml: nothing generates {kind!r}")
