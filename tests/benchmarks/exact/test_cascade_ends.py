"""`benchmarks.exact.cascade_ends`: every kind makes a victim, and what is solved or refused has a line in its table."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import common
from benchmarks.exact import cascade_ends
from benchmarks.exact.cascade_ends import KINDS, Kind
from benchmarks.exact.residual import TooLongError
from fl.types import Batch

SIDES = {"mnist": 28, "cifar10": 32}
SOLVED: dict[str, Any] = {"psnr": 100.0, "exact": True, "verified": True, "seconds": 2.0, "note": "", "label": True}


def pictures(channels: int, side: int) -> Batch:
    drawn = torch.randint(256, (3, channels, side, side), generator=torch.Generator().manual_seed(0))
    return Batch(drawn.float() / 255, torch.arange(3))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_makes_a_victim(name: str) -> None:
    kind = KINDS[name]
    view, image = cascade_ends.victim(kind, pictures(kind.channels, SIDES[kind.data]), 1)
    assert image.labels.tolist() == [1]
    assert image.inputs.shape[2] == (kind.size or SIDES[kind.data])
    assert any(bool(value.any()) for value in view.update.values())


def test_what_was_solved_and_what_was_refused_have_a_line_each() -> None:
    first, second = list(KINDS)[:2]
    wrong = {**SOLVED, "kind": first, "psnr": 30.0, "exact": False, "note": "12 pixels are open", "features": 4e-6}
    rows = [{**SOLVED, "kind": first}, wrong, {"kind": second, "reason": "too few", "seconds": 1.0}]
    lines = [line for line in cascade_ends.document(rows) if line.startswith("| ")]
    assert lines[1] == f"| {first} | 2 | 1 | 2 | 1 | 65.0 (30.0) | 1 of 1, 4e-06 | 2.0 | 12 pixels are open |"
    assert lines[2] == f"| {second} | 1 | 0 | 0 | 0 | - | - | 1.0 | refused: too few |"
    assert len(lines) == 3  # with the head
    assert f"Not measured: {'; '.join(list(KINDS)[2:])}." in cascade_ends.document(rows)


def test_an_image_that_takes_too_long_is_a_row_that_a_longer_limit_measures_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (cascade_ends, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(cascade_ends, "KINDS", {"one": Kind(lambda: [nn.Flatten()], "mnist")})
    monkeypatch.setattr(cascade_ends.fl.data, "load", lambda name: SimpleNamespace(test=pictures(1, 6)))
    solve = cascade_ends.build

    def slow(name: str) -> Any:
        raise TooLongError

    def measured(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["cascade_ends", "--first", "0", "--images", "1", "--resume", *options])
        cascade_ends.main()
        return (tmp_path / "cascade_ends.md").read_text()

    monkeypatch.setattr(cascade_ends, "build", slow)
    assert "| no answer in 1000 CPU seconds, after which it was stopped |" in measured("--most", "1000")
    monkeypatch.setattr(cascade_ends, "build", solve)
    assert "no answer in 1000" in measured("--most", "900")
    assert "| one | 1 | 1 | 1 |" in measured("--most", "2000")


def test_kinds_that_are_left_out_keep_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (cascade_ends, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    kinds = {name: Kind(lambda: [nn.Flatten()], "mnist") for name in ("one", "two")}
    monkeypatch.setattr(cascade_ends, "KINDS", kinds)
    data = SimpleNamespace(test=pictures(1, 6))
    monkeypatch.setattr(cascade_ends.fl.data, "load", lambda name: data)

    def measured(*options: str) -> list[tuple[str, int]]:
        monkeypatch.setattr("sys.argv", ["cascade_ends", *options])
        cascade_ends.main()
        rows = json.loads((tmp_path / "cascade_ends.json").read_text())["rows"]
        assert all(row["exact"] for row in rows)
        return [(row["kind"], row["image"]) for row in rows]

    assert measured("--kinds", "one", "--first", "0", "--images", "2") == [("one", 0), ("one", 1)]
    assert measured("--kinds", "two", "--first", "1", "--images", "1") == [("one", 0), ("one", 1), ("two", 1)]
    assert measured("--kinds", "one", "--first", "2", "--images", "1") == [("two", 1), ("one", 2)]
    again = measured("--kinds", "one", "two", "--first", "1", "--images", "2", "--resume")
    assert again == [("two", 1), ("one", 2), ("one", 1), ("two", 2)]
    assert "| one | 2 | 2 |" in (tmp_path / "cascade_ends.md").read_text()
