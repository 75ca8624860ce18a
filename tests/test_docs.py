"""What the pages in docs/ tell a reader to type works as it stands, and what they point at is there."""

import ast
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.core import TyperGroup

from docs.hooks import SUMMARIES, registry_pages
from eval import harness
from eval.audit.request import AuditRequest
from eval.cli import app
from eval.commands.list_ import CONFIGS, KINDS, registries
from eval.commands.show import describe
from eval.experiment import config_catalog, yaml_config
from eval.experiment.serialization import SECTIONS
from eval.experiment.spec import Experiment
from eval.io import yaml12
from eval.rundir import RunDir
from fl.registry import UnknownNameError

ROOT = Path(__file__).parents[1]
ALL = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REPORTS = {path for path in ALL if path.parent.name == "results" and path.name not in SUMMARIES}
"""Pages on one committed run: labels there are the run's own."""
PAGES = [page for page in ALL if page not in REPORTS]
MADE = {ROOT / "docs" / name for name in registry_pages.pages()}
"""Pages that are written when the site is built."""
OURS = [page for page in PAGES if page.name != "README.md"]  # which has a test of its own
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w/]+)\.py\n")
PLURALS = {
    "method": "methods",
    "attack": "attacks",
    "defense": "defenses",
    "data set": "datasets",
    "network": "models",
    "partition": "partitions",
}
PLACEHOLDERS = {"DIR", "NAME"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text()) if kind == language]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def pages_with(language: str) -> list[Path]:
    return [page for page in OURS if blocks(page, language)]


def commands() -> Iterator[tuple[str, str]]:
    """Every command line that begins with `hyperleak`, in code spans and in blocks without a language."""
    for page in PAGES:
        spans = re.findall(r"`(hyperleak [^`\n]+)`", prose(page))
        lines = [line for body in blocks(page, "") for line in body.splitlines() if line.startswith("hyperleak ")]
        yield from ((name_of(page), line) for line in [*spans, *lines])


def table_names() -> Iterator[tuple[str, str, str]]:
    """Code spans in table columns that are headed by the word for one kind of entry: page, kind, name."""
    for page in PAGES:
        columns: list[str] = []
        for line in prose(page).splitlines():
            if not line.startswith("|"):
                columns = []
                continue
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            columns = columns or cells
            for column, cell in zip(columns, cells, strict=False):
                names = re.findall(r"`([^`]+)`", cell)
                yield from ((name_of(page), PLURALS[column], name) for name in names if column in PLURALS)


@pytest.fixture
def _registries() -> Iterator[None]:
    """Registries and modules as they were, whatever a page adds."""
    found = registries().values()
    before = [(registry, set(registry.names())) for registry in found]
    modules = set(sys.modules)
    yield
    for registry, names in before:
        for name in set(registry.names()) - names:
            del registry._entries[name]
    for module in set(sys.modules) - modules:
        if module.partition(".")[0] in {"fl", "attacks", "defenses"}:
            del sys.modules[module]


def load_file(path: str, text: str, folder: Path) -> None:
    """A block that is a whole file, imported under the name it would have in its package."""
    module = path.replace("/", ".")
    file = folder / f"{module}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])


@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "python"):
        if "hyperleak.flower" in text:  # `make federations` has what it needs
            pytest.importorskip("flwr")
        if found := FILE.match(text):
            assert not (ROOT / f"{found[1]}.py").exists(), f"{found[1]} is there: choose another example"
            load_file(found[1], text, tmp_path)
        else:
            with torch.random.fork_rng():  # user code may draw from the global generator
                exec(compile(text, name_of(page), "exec"), {})


def test_python_blocks_are_as_short_as_lines_here() -> None:
    for page in OURS:
        for text in blocks(page, "python"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("page", pages_with("yaml"), ids=name_of)
def test_yaml_blocks_are_settings(page: Path) -> None:
    whole = yaml12.parse((ROOT / "configs" / "quickstart.yaml").read_text())
    for text in blocks(page, "yaml"):
        assert yaml_config.read({**whole, **yaml12.parse(text)}).attack


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() or (file in MADE and page.name != "README.md"), target
        if anchor and file.exists():
            heads = re.findall(r"^#+ (.+)$", prose(file), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, target


@pytest.mark.parametrize("page", OURS, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:fl|attacks|defenses|eval|tests|benchmarks|configs)/[\w/.]*)`", prose(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_objects_exist(page: Path) -> None:
    for name in re.findall(r"`((?:fl|attacks|defenses|eval|hyperleak)(?:\.\w+)+)(?:\([^`]*\))?`", prose(page)):
        resolve(name)


IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
EXAMPLES = {"my_module", "lpips_NET"}
"""What pages call something of the reader's, or a family of columns."""


def looks_like_code(word: str) -> bool:
    """Whether a word is no plain English: it has an underscore, or capitals as classes have them."""
    return "_" in word or bool(re.search(r"[a-z][A-Z]|^[A-Z][a-z]", word))


@pytest.fixture(scope="module")
def source_words() -> set[str]:
    """All words of the source, of tests and of configs, and the names of their files."""
    folders = ("fl", "attacks", "defenses", "eval", "hyperleak", "benchmarks", "tests", "docs", "configs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".yaml"}]
    files += [ROOT / "pyproject.toml", ROOT / "Makefile"]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return words | {path.stem for path in files}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_identifiers_in_code_spans_are_in_the_source(page: Path, source_words: set[str]) -> None:
    """What was renamed in the code is renamed in the pages."""
    words = {word for span in re.findall(r"`([^`]+)`", prose(page)) for word in IDENTIFIER.findall(span)}
    assert not {word for word in words - source_words - EXAMPLES if looks_like_code(word)}


def resolve(name: str) -> object:
    """The module, class, function or attribute of a dotted name.

    Raises:
        AttributeError: there is none.
    """
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_keys_exist(page: Path) -> None:
    for section, key in re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)[^`]*`", prose(page)):
        assert key in SECTIONS[section].__dataclass_fields__, f"{section}.{key}"


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_commands_parse(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    with group.make_context("hyperleak", list(words), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, list(words))
        assert command is not None
        if not rest:  # the command's name and no more: there is nothing to parse
            return
        with command.make_context(name, rest, parent=context) as inner:
            given = inner.params
            if isinstance(command, TyperGroup):  # of audit, by source
                source, part, left = command.resolve_command(inner, [*inner._protected_args, *inner.args])
                assert part is not None
                given = {"target": None, "method": None, **part.make_context(source, left, parent=inner).params}
            check(str(name), given)


def changed(given: dict) -> Experiment:
    """The config of a command line as its options leave it; files that it imports are the reader's own."""
    narrowed = {key: given[key] or () for key in ("without", "only")}
    return yaml_config.load(config_catalog.find_config(given["config"]), given["set_"] or (), **narrowed)


def check(command: str, given: dict) -> None:
    """What the options say beside being options: names and settings that exist."""
    if command == "run" and given["watch"] is not None:
        assert not given["config"]
    elif command == "run" and not given["config"].startswith(tuple(PLACEHOLDERS)):
        assert changed(given).attack
    elif command == "show" and given["name"] not in PLACEHOLDERS:
        assert describe(given["name"])
    elif command == "list":
        assert given["kind"] in {None, *KINDS, CONFIGS}
    elif command == "audit":
        fields = AuditRequest.__dataclass_fields__
        asked = {name: value for name, value in given.items() if name in fields and value is not None}
        request = AuditRequest(**asked | {"attack": tuple(given["attack"] or ())})
        assert request.attacks
        if given["method"] and not given["target"]:
            assert request.plan().trainings


@pytest.mark.parametrize(("page", "kind", "name"), list(table_names()))
def test_names_in_tables_are_registered(page: str, kind: str, name: str) -> None:
    known = registries()[kind].names()
    for part in name.split("+"):
        assert part in known, f"{page}: no {part!r} among {kind}"


def test_there_is_something_to_check() -> None:
    assert {"add-an-attack.md", "hyperfl.md", "metrics.md", "peel.md", "sharp-edges.md", "threat-model.md"} <= {
        page.name for page in OURS
    }
    assert len(list(commands())) > 15
    assert ("docs/results/hyperfl.md", "attacks", "peel+ig") in set(table_names())
    with pytest.raises(UnknownNameError):
        check("show", {"name": "hyperfly"})


OWN_NETWORKS = ROOT / "docs" / "how-to" / "own-network.md"


@pytest.mark.parametrize("name", ["own_network", "timm_network"])
def test_networks_of_ones_own_run_as_the_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files lie beside a config with the page's settings, which is run."""
    files = {found[1]: text for text in blocks(OWN_NETWORKS, "python") if (found := FILE.match(text))}
    (task,) = (text for text in blocks(OWN_NETWORKS, "yaml") if name in text)
    (tmp_path / f"{name}.py").write_text(files[name])
    rest = """
federation: {partition: {name: iid, clients: 2}, rounds: 1}
method: {name: fedavg, lr: 0.1}
attack: {name: ig, iterations: 2}
observe: {images: 1, method: {steps: 1}}
"""
    (tmp_path / "own.yaml").write_text(task + rest)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plan = harness.prepare(yaml_config.load(tmp_path / "own.yaml"), device="cpu")
    folder = RunDir(tmp_path / "run")
    with folder.locked(), folder.logged():
        failures = harness.run(plan, folder, harness.Options(workers=1))
    assert not failures
    sys.modules.pop(name)
