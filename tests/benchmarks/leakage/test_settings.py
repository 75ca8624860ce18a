"""`benchmarks.leakage.settings`: what was swept is kept, what was not is measured, the page is of today's defaults."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import attacks
from attacks.base import Attack, Preset
from benchmarks import common
from benchmarks.leakage import settings, sweeps
from benchmarks.leakage.settings import Found
from benchmarks.leakage.sweeps import SWEEPS, Sweep
from fl.methods.fedavg import FedAvg
from fl.types import Truth
from fl.view import ServerView

SMALL = Sweep("ig", "lenet-zhu", "faces", {"tv": (0.0, 1.0)}, iterations=2, images=2)


@dataclass(frozen=True, kw_only=True)
class Thing(Attack):
    """An attack whose settings are all that a sweep asks for."""

    presets: ClassVar[dict[str, Preset]] = {"published": Preset("a paper", {"tv_weight": 2.0})}
    tv_weight: float = 3.0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, float, int]]:
    """What was measured: sweep, weight and first image; the PSNR is the weight and a bit, 1 decibel more on others."""
    done: list[tuple[str, float, int]] = []

    def added(sweep: Sweep, asked: Sequence[Any], before: Sequence[Any], first: int) -> list[Any]:
        known = [point["setting"] for point in before]
        lacking = [setting for setting in asked if setting not in known]
        done.extend((sweep.name, setting["tv"], first) for setting in lacking)
        shift = float(first != settings.FIRST)
        return [*before, *(point(setting["tv"], setting["tv"] + shift) for setting in lacking)]

    monkeypatch.setattr(settings, "added", added)
    monkeypatch.setattr(settings.attacks, "build", lambda spec: Thing(tv_weight=2.0 if "preset" in spec else 3.0))
    monkeypatch.setattr(attacks.attacks, "get", lambda name: Thing)
    for module in (settings, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["settings"])
    return done


def point(tv: float, psnr: float) -> dict[str, Any]:
    return {"setting": {"tv": tv}, "psnr": [psnr, psnr + 0.5], "seconds": None}


def page(path: Path) -> list[list[str]]:
    """The table's cells, without the head."""
    text = (path / "settings.md").read_text()
    found = [line for line in text[text.index("| attack | network | images of |") :].splitlines() if line[:2] == "| "]
    measured = found[1:-2]  # between its head and the table of the machine
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in measured]


def test_only_what_is_missing_is_measured(
    measured: list[tuple[str, float, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (SMALL, replace(SMALL, iterations=3))
    monkeypatch.setattr(settings, "SWEEPS", both)
    old, new = (sweep.name for sweep in both)
    known = [point(tv, tv) for tv in (0.0, 1.0, 2.0, 3.0)]
    kept = {old: {"choosing": known, "others": known[3:]}, "a sweep of the past": {"choosing": known}}
    (tmp_path / "settings.json").write_text(json.dumps({"sweeps": kept}))
    first, other = settings.FIRST, settings.FIRST + SMALL.images
    settings.main()
    again = [
        (old, 2.0, other),
        *((new, tv, first) for tv in (0.0, 1.0, 3.0, 2.0)),
        (new, 3.0, other),
        (new, 2.0, other),
    ]
    assert measured == again
    text = (tmp_path / "settings.md").read_text()
    assert "Incomplete" not in text
    assert "a sweep of the past" not in json.loads((tmp_path / "settings.json").read_text())["sweeps"]
    measured.clear()
    settings.main()
    assert measured == []
    monkeypatch.setattr(sys, "argv", ["settings", "--again"])
    settings.main()
    assert len(measured) == 2 * 4 + 2 * 2


def test_one_that_is_stopped_keeps_what_was_measured_before(
    measured: list[tuple[str, float, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SWEEPS", (SMALL, replace(SMALL, iterations=3)))
    settings.main()
    before = json.loads((tmp_path / "settings.json").read_text())["sweeps"]
    compared, calls = settings.compared, iter((0, 1))

    def stopped(sweep: Sweep, found: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return compared(sweep, found)

    monkeypatch.setattr(settings, "compared", stopped)
    monkeypatch.setattr(sys, "argv", ["settings", "--again"])
    with pytest.raises(KeyboardInterrupt):
        settings.main()
    assert json.loads((tmp_path / "settings.json").read_text())["sweeps"] == before
    assert "Incomplete" not in (tmp_path / "settings.md").read_text()


def test_the_page_is_of_the_defaults_of_its_day(
    measured: list[tuple[str, float, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SWEEPS", (SMALL,))
    settings.main()
    assert [(cells[4], cells[7]) for cells in page(tmp_path)] == [
        ("tv 3", "the default"),
        ("tv 2, `published`", "-1.0 [-1.0, -1.0]"),
    ]
    monkeypatch.setattr(settings.attacks, "build", lambda spec: Thing(tv_weight=2.0 if "preset" in spec else 1.0))
    settings.main()
    assert measured[-1] == (SMALL.name, 1.0, settings.FIRST + SMALL.images)
    assert [(cells[4], cells[6], cells[7]) for cells in page(tmp_path)] == [
        ("tv 3", "4.2 [1.1, 7.4]", "2.0 [2.0, 2.0]"),
        ("tv 2, `published`", "3.2 [0.1, 6.4]", "1.0 [1.0, 1.0]"),
        ("tv 1", "2.2 [0.0, 5.4]", "the default"),
    ]


def test_what_was_published_can_be_left_out(measured: list[tuple[str, float, int]]) -> None:
    assert set(settings.named_settings(SMALL)) == {"the default", "published"}
    assert set(settings.named_settings(replace(SMALL, published=False))) == {"the default"}


def test_a_page_of_some_sweeps_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (settings, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(settings, "SWEEPS", (SMALL,))
    settings.report({SMALL.name: {"choosing": [point(0.0, 1.0)]}})
    assert "Incomplete" in (tmp_path / "settings.md").read_text()


def test_a_small_sweep_measures_grid_default_and_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FIRST", 0)
    found: Found = settings.confirmed(SMALL, settings.compared(SMALL, {}))
    named = [setting["tv"] for setting in settings.named_settings(SMALL).values()]
    assert sorted({one["setting"]["tv"] for one in found["choosing"]}) == sorted({0.0, 1.0, *named})
    best = max(found["choosing"], key=lambda one: sum(one["psnr"]))["setting"]["tv"]
    assert {one["setting"]["tv"] for one in found["others"]} == {best, *named}
    assert settings.whole(SMALL, found)
    assert not settings.whole(SMALL, {**found, "others": found["others"][1:]})
    alike = [one["psnr"] == other["psnr"] for one, other in zip(found["choosing"], found["others"], strict=False)]
    assert not any(alike)  # other images


def test_no_two_sweeps_are_called_the_same() -> None:
    assert len({sweep.name for sweep in SWEEPS}) == len(SWEEPS)


def test_victims_are_of_the_network_after_training_under_the_defense(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CLIENTS", 2), ("IMAGES", 3), ("TESTED", 4)):
        monkeypatch.setattr(sweeps, name, value)
    monkeypatch.setattr(sweeps, "TRAINING", FedAvg(lr=0.05, steps=2, batch_size=2))
    sweeps.trained.cache_clear()
    whole = replace(SMALL, rounds=1, defense={"name": "noise", "std": 0.5})
    assert whole.where == ", after 1 rounds, noise 0.5"
    assert (whole.rounds, SMALL.where) == (1, "")
    before, after = victim(SMALL), victim(whole)
    begun, went_on = (sweeps.trained(SMALL.network, SMALL.dataset, n).server for n in (0, 1))
    assert begun.shared["head.weight"].ne(went_on.shared["head.weight"]).any()
    assert before.shared["head.weight"].equal(begun.shared["head.weight"])
    assert after.shared["head.weight"].equal(went_on.shared["head.weight"])
    assert (before.defense.name, after.defense.name) == ("none", "noise")
    assert after.method == before.method == SMALL.method
    assert 0 <= whole.accuracy() <= 1
    sweeps.trained.cache_clear()


def victim(sweep: Sweep) -> ServerView:
    seen: list[tuple[ServerView, Truth]] = sweep.victims(0)
    assert len(seen) == sweep.images
    return seen[0][0]
