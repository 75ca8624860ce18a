"""Experiments without any attack: accuracy and cost are reported, and leakage is left out with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import CONFIG
from typer.testing import CliRunner, Result

from eval import cli
from eval.experiment import yaml_config
from eval.io import yaml12
from eval.report.sections.overview import NO_ATTACK_ASKED

QUIET = yaml12.parse(CONFIG)
del QUIET["attack"]


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.commands.system_errors.signal.signal", lambda *_: None)


def run(folder: Path, *words: str) -> Result:
    path = folder / "quiet.yaml"
    path.write_text(yaml12.dump(QUIET))
    return CliRunner().invoke(cli.app, ["run", str(path), "--out", str(folder / "out"), "--device", "cpu", *words])


def test_it_is_an_experiment() -> None:
    found = yaml_config.read(QUIET)
    assert found.attack == ()
    assert found == yaml_config.read({**QUIET, "attack": []})
    assert yaml_config.read(yaml_config.to_plain(found)) == found
    assert yaml_config.override(yaml_config.read({**QUIET, "attack": "ig"}), "attack=[]") == found


def test_it_runs_and_reports_accuracy_and_cost(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    for part in ("fedavg", "hyperfl", "accuracy", NO_ATTACK_ASKED):
        assert part in " ".join(result.output.split())
    out = tmp_path / "out"
    for words in ("PSNR", "not applicable", "baseline", "leakage"):
        for text in (result.output, (out / "table.md").read_text(), (out / "report.md").read_text()):
            assert words.lower() not in text.lower().split("all settings")[0]
    words = (out / "report.md").read_text()
    for part in (
        NO_ATTACK_ASKED,
        "### Communication",
        "### Accuracy over rounds",
        "numbers up",
        "after local training",
    ):
        assert part in words
    for part in ("What the attacker", "Originals and reconstructions", "Where no attack applied", "**Watched**"):
        assert part not in words
    assert "<h1" in (out / "report.html").read_text()
    found = json.loads(run(tmp_path, "--json").stdout)["table"]
    assert found["columns"] == ["method", "accuracy", "flags"]
    assert [row[0] for row in found["rows"]] == ["fedavg", "hyperfl"]


def test_what_failed_is_still_said(tmp_path: Path) -> None:
    assert run(tmp_path, "--set", "federation.partition.train_size=2", "--set", "method.batch_size=1").exit_code == 0
    about = tmp_path / "out" / "run.json"
    known = json.loads(about.read_text())
    known["cells"][0] |= {"status": "failed", "reason": "the disk was full"}
    known.pop("sha256")
    about.write_text(json.dumps(known))
    (tmp_path / "out" / "manifest.json").unlink()  # it states what run.json was
    assert CliRunner().invoke(cli.app, ["report", str(tmp_path / "out")]).exit_code == 0
    assert "The disk was full" in (tmp_path / "out" / "report.md").read_text()


def test_an_empty_list_elsewhere_is_still_refused() -> None:
    for key in ("method", "defense"):
        with pytest.raises(ValueError, match=f"{key}: expected at least one"):
            yaml_config.read({**QUIET, key: []})
