"""`framework_filters`: each case is another filter that can be built, is attacked, and has a line of the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common
from benchmarks.leakage import framework_filters
from benchmarks.leakage.framework_filters import CASES, budgets, distance, document, measure
from fl.types import Batch

PICTURE = Batch(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([3]))


def case(filter_: str) -> framework_filters.Case:
    return next(one for one in CASES if one.filter_ == filter_)


def test_every_case_is_another_filter_that_can_be_built() -> None:
    assert len({one.key for one in CASES}) == len(CASES)
    built = {one.build().name for one in CASES}
    frameworks = ("nvflare-percentile", "nvflare-svt", "nvflare-exclude-vars", "flower-local-dp")
    assert built == {"none", *frameworks, "flower-fixed-clipping", "flower-adaptive-clipping"}


def test_a_picture_is_attacked_behind_a_filter() -> None:
    (plain,), (filtered,) = (measure(case(name), "mlp", PICTURE, 2) for name in ("none", "PercentilePrivacy"))
    assert plain["moved"] == 0
    assert plain["analytic"]["exact"] == plain["cascade"]["exact"] == [True]
    assert 0 < filtered["moved"] < 1
    assert filtered["analytic"]["exact"] == [True]
    assert "cut or altered" in filtered["cascade"]["reason"]
    assert {"knowing", "not knowing"} <= filtered.keys()
    assert "not knowing" not in plain
    lines = document([plain, filtered], [])
    assert any(line.startswith("| PercentilePrivacy | NVFlare's defaults |") and "refuses" in line for line in lines)
    assert "Pictures called verified that are wrong: 0." in lines


def test_features_of_a_convolutional_network_are_compared() -> None:
    task = framework_filters.network("cnn", 0)
    view = framework_filters.observe("cnn", case("none").build(), PICTURE, 0)
    assert sum(value.numel() for value in task.parameters.values()) == 62_006
    found = framework_filters.features(view, "cnn", PICTURE, 0)
    assert found is not None
    assert found["verified"]
    assert found["off"] < 1e-3


def test_budgets_are_the_frameworks_and_ours() -> None:
    assert budgets(case("none"), 10) == budgets(case("PercentilePrivacy"), 10) == (None, None)
    stated, ours = budgets(case("SVTPrivacy"), 62_006)
    assert stated == pytest.approx(620.2)
    assert ours is not None
    assert ours < 100
    told = budgets(case("LocalDpMod"), 10)
    assert told[0] == 10
    assert told[1] is not None
    assert told[1] > 1e8
    (row,) = framework_filters.cosines([2000])
    assert abs(row["cosine"]) < 0.2
    assert row["stated"] == pytest.approx(20.1)


def test_what_is_not_sent_counts_as_zero() -> None:
    plain: Any = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert distance({"a": plain["a"]}, plain) == {"moved": pytest.approx(0.8), "cosine": pytest.approx(0.6), "sent": 1}


def test_results_are_kept_case_by_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    shown = {"moved": 0.0, "cosine": 1.0, "numbers": 10, "floor": 9.0, "analytic": {"reason": "no"}, "knowing": 12.0}
    monkeypatch.setattr(framework_filters, "pictures", lambda count: PICTURE)
    monkeypatch.setattr(framework_filters, "cosines", lambda: [])
    monkeypatch.setattr(
        framework_filters, "measure", lambda c, kind, d, s: [{"case": c.key, "network": kind, "victim": 0, **shown}]
    )
    framework_filters.main(["--networks", "mlp", "--only", "none"])
    framework_filters.main(["--networks", "mlp", "--only", "SVTPrivacy"])
    rows = json.loads((tmp_path / "framework_filters.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [one.key for one in CASES if one.filter_ in {"none", "SVTPrivacy"}]
    framework_filters.main(["--rewrite"])
    assert "| SVTPrivacy |" in (tmp_path / "framework_filters.md").read_text()
