"""The command starts light, says its version, and names what hides its packages."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(*words: str, folder: Path = ROOT, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "hyperleak", *words]
    places = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=places, capture_output=True, text=True, check=False)


def test_the_version_is_that_of_the_distribution():
    assert start("--version").stdout == f"hyperleak {metadata.version('hyperleak')}\n"


def test_nothing_heavy_is_imported_before_it_is_used():
    code = "import sys, hyperleak, eval.cli; print(hyperleak.__version__, sorted({'torch', 'numpy'} & {*sys.modules}))"
    done = start(code=code)
    assert done.stdout == f"{metadata.version('hyperleak')} []\n", done.stderr


def test_a_project_with_an_eval_of_its_own_is_told_so(tmp_path):
    (tmp_path / "eval.py").write_text("")
    done = start("list", folder=tmp_path)
    assert done.returncode == 2
    assert "package 'eval' is hidden" in done.stderr
    assert str(tmp_path / "eval.py") in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_attribute_is_an_error():
    done = start(code="import hyperleak; hyperleak.nosuch")
    assert "module 'hyperleak' has no attribute 'nosuch'" in done.stderr
