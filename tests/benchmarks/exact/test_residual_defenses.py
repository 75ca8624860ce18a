"""`benchmarks.exact.residual_defenses`: each strength is a defense that can be built, and has a line of the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.exact import residual_defenses
from benchmarks.exact.residual_defenses import STRENGTHS, Strength, document, measure
from benchmarks.exact.residual_victims import SMOKE
from defenses import defenses

SOLVED: dict[str, Any] = {
    "verified": True,
    "note": "",
    "psnr": [100.0],
    "exact": [True],
    "false": False,
    "seconds": 9.0,
}


def test_every_strength_is_another_defense_that_can_be_built() -> None:
    assert len({strength.key for strength in STRENGTHS}) == len(STRENGTHS)
    for strength in STRENGTHS[1:]:
        assert defenses.build({"name": strength.name, **strength.settings}).name == strength.name
    assert {"noise", "quantize", "prune", "soteria"} <= {strength.name for strength in STRENGTHS}


def test_a_victim_is_attacked_behind_its_defense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_defenses, "CASE", SMOKE[0])
    monkeypatch.setattr(residual_defenses, "TESTED", "analytic")
    plain, noisy = (measure(strength, 0) for strength in (STRENGTHS[0], Strength("noise", "", {"std": 0.5})))
    assert plain["exact"] == [True]
    assert "moved" not in plain
    assert noisy.get("exact", [False]) == [False]
    assert 0.4 < noisy["moved"] < 0.6


def test_results_are_kept_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (residual_defenses, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(residual_defenses, "measure", lambda s, n: {"defense": s.key, "victim": n, **SOLVED})
    residual_defenses.main(["--victims", "1", "--only", "soteria"])
    residual_defenses.main(["--victims", "2", "--only", "none", "soteria"])
    rows = json.loads((tmp_path / "residual_defenses.json").read_text())["rows"]
    names = [s.key for s in STRENGTHS if s.name in {"none", "soteria"}]
    assert [(row["defense"], row["victim"]) for row in rows] == [(name, n) for name in names for n in (0, 1)]


def test_what_was_refused_counts_as_nothing() -> None:
    refused = {"defense": "signsgd", "victim": 1, "reason": "only signs", "moved": 3.0, "seconds": 1.0}
    lines = document([{**SOLVED, "defense": "signsgd", "victim": 0, "moved": 1.0}, refused])
    assert "| signsgd | - | 2 | 1 of 2 | 50 (0) | 1 | 0 | 2 | - | 5.0 |" in lines
    assert "- signsgd: `only signs`" in lines


def test_accuracy_under_defenses_is_kept_beside_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (residual_defenses, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(residual_defenses, "measure", lambda s, n: {"defense": s.key, "victim": n, **SOLVED})
    monkeypatch.setattr(residual_defenses, "STRENGTHS", [s for s in STRENGTHS if s.name in {"none", "signsgd", "clip"}])
    monkeypatch.setattr(
        residual_defenses,
        "TRAINING",
        {
            "task": {"dataset": "faces", "model": "hyperfl-grey"},
            "federation": {"partition": {"name": "iid", "clients": 2}, "rounds": 1},
            "method": [{"name": "fedavg", "lr": 0.05, "steps": 1}],
        },
    )
    residual_defenses.main(["--accuracy", str(tmp_path / "run")])
    residual_defenses.main(["--victims", "1", "--only", "clip"])
    kept = json.loads((tmp_path / "residual_defenses.json").read_text())
    assert kept["accuracy"].keys() == {"none", "signsgd"}
    assert all(0 <= share <= 1 for share in kept["accuracy"].values())
    assert [row["defense"] for row in kept["rows"]] == [s.key for s in STRENGTHS if s.name == "clip"]
