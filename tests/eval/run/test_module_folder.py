"""A run goes on from its own config, though the module of its network lies beside the first one."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eval.cli import app
from eval.experiment.plugins import recorded_module_folder
from eval.io import jsonl

NETWORK = """
from torch import nn

def build(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], num_classes))
"""
CONFIG = """
task: {dataset: {name: faces, size: 8}, model: net_beside_config:build}
federation: {partition: {name: iid, clients: 3}, rounds: 1}
method: fedavg
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a config and its network below."""
    (tmp_path / "here" / "mine").mkdir(parents=True)
    (tmp_path / "here" / "mine" / "net_beside_config.py").write_text(NETWORK)
    (tmp_path / "here" / "mine" / "net.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """The command as a new process has it: without the modules and places of the one before."""
    sys.modules.pop("net_beside_config", None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        return CliRunner().invoke(app, ["run", *words, "--workers", "1"])


def finished(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("cells/*/cell.json")}


def test_a_run_goes_on_from_its_own_config(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "mine/net.yaml", "--out", "out").exit_code == 0
    before = finished(project / "out")
    for _ in range(2):
        again = run(monkeypatch, "out/config.yaml")
        assert again.exit_code == 0, again.output
        assert finished(project / "out") == before
        assert jsonl.read_json(project / "out" / "run.json")["module_folder"] == "mine"
    assert not [path for path in (project / "out").rglob("*.*") if str(project).encode() in path.read_bytes()]


def test_elsewhere_it_says_how_to_give_the_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert run(monkeypatch, "../mine/net.yaml", "--out", "out").exit_code == 0
    assert "module_folder" not in jsonl.read_json(Path("out/run.json"))
    lost = run(monkeypatch, "out/config.yaml")
    assert lost.exit_code == 2
    assert lost.output.count("\n") == 1
    assert "no module 'net_beside_config'" in lost.output
    assert "give its file by --import FOLDER/net_beside_config.py" in lost.output
    before = finished(Path("out"))
    found = run(monkeypatch, "out/config.yaml", "--import", "../mine/net_beside_config.py")
    assert found.exit_code == 0, found.output
    assert finished(Path("out")) == before


@pytest.mark.parametrize("recorded", ["../other", "/", "", 3, None, "."])
def test_a_run_leads_nowhere_but_below_the_current_folder(project: Path, recorded: object) -> None:
    (project / "out").mkdir()
    (project.parent / "other").mkdir()
    jsonl.write_text(project / "out" / "run.json", json.dumps({"module_folder": recorded}))
    assert recorded_module_folder(Path("out")) == ""
