"""`benchmarks.settings`: what was swept before is kept, what was not is measured, and the page has both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, settings
from benchmarks.settings import SWEEPS, Sweep


def line(sweep: Sweep, word: str) -> dict[str, Any]:
    """What a sweep comes to, with `word` for its setting."""
    cells = [sweep.attack, sweep.network, sweep.dataset, str(sweep.iterations), word, "", "", "", ""]
    return {"seconds": None, "lines": [cells], "others": [], "grid": []}


@pytest.mark.parametrize(("again", "measured"), [([], 2), (["--again"], len(SWEEPS))])
def test_only_what_is_missing_is_measured(
    again: list[str], measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({sweep.name for sweep in SWEEPS}) == len(SWEEPS)
    done: list[str] = []

    def swept(sweep: Sweep) -> dict[str, Any]:
        done.append(sweep.name)
        return line(sweep, "new")

    before = {sweep.name: line(sweep, "old") for sweep in SWEEPS[2:]} | {"a sweep of the past": line(SWEEPS[0], "gone")}
    (tmp_path / "settings.json").write_text(json.dumps({"sweeps": before}))
    for module in (settings, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(settings, "swept", swept)
    monkeypatch.setattr(sys, "argv", ["settings", *again])
    settings.main()
    assert done == [sweep.name for sweep in SWEEPS[:measured]]
    page = (tmp_path / "settings.md").read_text()
    assert page.count("| new |") == measured
    assert page.count("| old |") == len(SWEEPS) - measured
    assert "gone" not in page
    assert "Incomplete" not in page


def test_a_small_sweep_names_best_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Sweep("ig", "lenet-zhu", "faces", {"tv": (0.0, 1.0)}, iterations=2, images=2)
    monkeypatch.setattr(settings, "FIRST", 0)
    found = settings.swept(small)
    points = [point["setting"] for point in found["grid"]]
    assert sorted(point["tv"] for point in points) == [0.0, 3e-3, 1.0]
    means = [sum(point["psnr"]) / 2 for point in found["grid"]]
    assert means == sorted(means, reverse=True)
    assert [cells[7] for cells in found["lines"]].count("the default") == 1
    assert found["lines"][0][4] == f"tv {points[0]['tv']:g}"
