"""Which way imports point: the contracts in pyproject.toml hold, they can fail, and no modules import each other."""

import graphlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("fl", "defenses", "attacks", "eval", "hyperleak")
CONTRACTS = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]


def imports(*packages: str) -> grimp.ImportGraph:
    """All imports among some packages, those inside of functions included."""
    return grimp.build_graph(*packages, cache_dir=None)


def cycle(graph: grimp.ImportGraph, package: str) -> list[str]:
    """One cycle of modules of a package that import each other; empty where there is none."""
    modules = {name for name in graph.modules if name.partition(".")[0] == package}
    known = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    try:
        graphlib.TopologicalSorter(known).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def check_contracts(tree: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of a tree of sources."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    command = [*CONTRACTS, "--no-cache"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources, to plant imports in."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=lambda _, names: {"__pycache__"} & {*names})
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(tree: Path, importer: str, imported: str) -> None:
    """Import a module inside of a function of another."""
    path = tree / f"{importer.replace('.', '/')}.py"
    code = path.read_text(encoding="utf-8")
    path.write_text(f"{code}\n\ndef planted() -> None:\n    import {imported}  # noqa\n", encoding="utf-8")


def test_contracts_hold():
    found = check_contracts(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("importer", "imported", "broken"),
    [
        ("fl.tensors", "eval.cli", "Packages: "),
        ("defenses.clip", "attacks.base", "Packages: "),
        ("attacks.result", "attacks.base", "Layers of attacks"),
        ("attacks.labels.counts", "attacks.gradient_matching.ig", "Layers of attacks"),
        ("eval.io.text", "eval.metrics.image", "Layers of eval"),
        ("fl.local.sampling", "fl.simulation.federation_state", "Layers of fl"),
        ("attacks.update.overflow_safe_scaling", "attacks.update.view_below_classifier", "No cycle "),
    ],
)
def test_contracts_can_fail(tree: Path, importer: str, imported: str, broken: str):
    plant(tree, importer, imported)
    found = check_contracts(tree)
    assert found.returncode == 1, found.stdout + found.stderr
    assert any(line.startswith(broken) and line.endswith("BROKEN") for line in found.stdout.splitlines())


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str):
    assert not cycle(imports(*PACKAGES), package)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("attacks.update.overflow_safe_scaling", "attacks.update.view_below_classifier"),
        ("attacks.result", "attacks"),
    ],
)
def test_cycles_are_found(importer: str, imported: str):
    graph = imports(*PACKAGES)
    graph.add_import(importer=importer, imported=imported)
    assert {importer, imported} <= {*cycle(graph, "attacks")}


def test_imports_inside_of_functions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "planted").mkdir()
    for name, code in (("__init__", ""), ("a", "import planted.b\n"), ("b", "def f():\n    from planted import a\n")):
        (tmp_path / "planted" / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert {*cycle(imports("planted"), "planted")} == {"planted.a", "planted.b"}
