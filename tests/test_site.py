"""The site: its pages are in the navigation, its reference has every entry, and links lead somewhere on it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml

from docs.hooks import module_pages, registry_pages
from eval.commands.list_ import registries
from fl.ranges import Count, Length, Range

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = registry_pages.pages()


def navigation() -> list[str]:
    """What the navigation names: pages, and places for generated ones."""
    text = (ROOT / "mkdocs.yml").read_text()
    found = yaml.safe_load(text[text.index("\nnav:") :])["nav"]

    def leaves(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [leaf for inner in entry.values() for leaf in leaves(inner)]
        return [leaf for inner in entry for leaf in leaves(inner)] if isinstance(entry, list) else [str(entry)]

    return leaves(found)


def test_every_page_is_in_the_navigation() -> None:
    named = set(navigation())
    for page in sorted(DOCS.rglob("*.md")):
        path = page.relative_to(DOCS).as_posix()
        generated = path.startswith("design/decisions/") or (path.startswith("results/") and path not in named)
        assert path in named or generated, f"{path} is not in mkdocs.yml"


def test_named_pages_exist() -> None:
    made = {*REFERENCE, "changelog.md"}
    for path in navigation():
        assert path.startswith("generated:") or path in made or (DOCS / path).exists(), path


@pytest.mark.parametrize("kind", sorted(registries()))
def test_reference_has_every_entry_with_its_settings(kind: str) -> None:
    overview = REFERENCE[f"reference/{kind}/index.md"]
    for name in registries()[kind].names():
        assert f"]({name}.md)" in overview
        page = REFERENCE[f"reference/{kind}/{name}.md"]
        assert page.startswith(f"# `{name}`")
        entry = registries()[kind].get(name)
        settings = [f.name for f in dataclasses.fields(entry) if f.init] if isinstance(entry, type) else []
        for setting in settings:
            assert f"| `{setting}` |" in page, f"{kind} {name} lacks {setting}"


def test_types_are_said_in_words() -> None:
    words = registry_pages.type_words
    assert words(Count) == "int >= 1"
    assert words(Annotated[float, Range(0, 1, above=True)]) == "float > 0 and <= 1"
    assert words(Literal["mean", "median"]) == 'one of "mean", "median"'
    assert words(Annotated[tuple[Count, ...], Length(1, 8)]) == "list of int >= 1, 1 to 8 of them"
    assert words(int | None) == "int or null"


def test_config_page_has_every_section_and_key() -> None:
    page = REFERENCE["reference/config.md"]
    for section, kind in registry_pages.SECTIONS.items():
        assert f"## `{section}`" in page
        for field in dataclasses.fields(kind):
            assert f"| `{field.name}` |" in page


def test_command_page_has_every_command_and_option() -> None:
    page = REFERENCE["reference/cli.md"]
    for command in ("run", "audit", "report", "compare", "list", "show", "doctor"):
        assert f"`hyperleak {command}" in page
    assert "--workers" in page


def test_markup_of_docstrings_is_shown_as_it_is() -> None:
    assert registry_pages.escape("a | b * c_d < e `x_y`") == r"a \| b \* c\_d &lt; e `x_y`"
    assert registry_pages.table(("a", "b"), [("1", "2")]).splitlines()[-1] == "| 1 | 2 |"


def test_modules_are_listed_with_their_first_sentence() -> None:
    text = module_pages.tables("fl")
    assert "| `seeds.py` |" in text
    assert "### `fl/methods`" in text
    with pytest.raises(ValueError, match="no folder"):
        module_pages.tables("nowhere")


def test_results_index_lists_every_page() -> None:
    index = (DOCS / "results" / "index.md").read_text()
    pages = [*(DOCS / "results").glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
    for page in pages:
        assert page.name == "index.md" or re.search(rf"[(/]{re.escape(page.name)}\)", index), page.name


def test_exit_codes_are_all_there() -> None:
    from eval.commands import audit

    page = (DOCS / "reference" / "exit-codes.md").read_text()
    for code in (0, audit.FAILURE, audit.USAGE, audit.LEAKED, audit.UNDECIDED, audit.STOPPED):
        assert re.search(rf"^\| .*\b{code}\b.* \|", page, re.MULTILINE), code


def test_flags_are_all_there() -> None:
    from eval.metrics.validity_flags import FLAGS

    page = (DOCS / "reference" / "metrics.md").read_text()
    assert all(f"| `{flag}` |" in page for flag in FLAGS)


def test_tutorials_are_listed_and_start_with_a_heading() -> None:
    index = (DOCS / "tutorials" / "index.md").read_text()
    files = sorted((DOCS / "tutorials").glob("*.py"))
    assert len(files) == 4
    for file in files:
        assert f"({file.name})" in index
        assert file.read_text().startswith("# %% [markdown]\n# # ")


@pytest.mark.slow
def test_tutorials_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tutorials = pytest.importorskip("docs.hooks.tutorials", reason="needs the extra 'docs'")
    monkeypatch.setattr(tutorials, "CACHE", tmp_path)
    for tutorial in tutorials.run_all():
        assert "leaked" in tutorial.page or tutorial.pictures
        assert json.loads(tutorial.notebook)["cells"]
