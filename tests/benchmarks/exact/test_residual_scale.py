"""`benchmarks.exact.residual_scale`: each size is measured once, in a process of its own, and has a line of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.exact import residual_scale
from benchmarks.exact.residual_scale import SIZES, document, main, measure
from benchmarks.exact.residual_victims import SMOKE

SOLVED: dict[str, Any] = {"verified": True, "psnr": [100.0], "exact": [True], "seconds": 9.0}


def test_sizes_have_names_of_their_own() -> None:
    assert len({case.name for case in SIZES}) == len(SIZES)


def test_a_victim_is_attacked_and_its_memory_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_scale, "TESTED", "analytic")
    row = measure(SMOKE[0])
    assert row["exact"] == [True]
    assert 0 < row["before"] <= row["peak"]


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_scale.sys, "executable", "false")
    row = residual_scale.measure_apart(SIZES[0])
    assert row["error"]
    assert "peak" not in row


def test_what_is_measured_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (residual_scale, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    asked: list[str] = []

    def solved(case: Any) -> dict[str, Any]:
        asked.append(case.name)
        return {"case": case.name, **SOLVED, "before": 100.0, "peak": 350.0}

    monkeypatch.setattr(residual_scale, "measure_apart", solved)
    main(["--only", "resnet18-2"])
    main(["--only", "resnet18-2", "resnet18-1"])
    assert asked == ["resnet18-2", "resnet18-1"]
    rows = json.loads((tmp_path / "residual_scale.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["resnet18-1", "resnet18-2"]


def test_a_size_has_a_line() -> None:
    lines = document([{"case": "resnet18-imagenet-64", **SOLVED, "before": 100.0, "peak": 350.0, "note": "ended"}])
    assert "| ImageNet's | 64 x 64 | 1 | 1 of 1 | 100 | yes | 9 | 250 |" in lines
    assert "- `resnet18-imagenet-64`: `ended`" in lines
