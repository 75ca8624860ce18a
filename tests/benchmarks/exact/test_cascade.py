"""`benchmarks.exact.cascade` and `cascade_limits`: searches join rows that were there, and rows of other sets stay."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import Reconstruction
from benchmarks.exact import cascade, cascade_limits
from fl.types import Batch

IMAGE = Batch(torch.zeros(1, 1, 2, 2), torch.tensor([1]))
EXACT: dict[str, Any] = {"psnr": 100.0, "exact": True, "verified": True, "fixed": 1.0, "fixed_wrong": 0, "seconds": 2.0}
OLD: list[dict[str, Any]] = [{"set": name, "method": "FedAvg", "image": 500, **EXACT} for name in cascade.SETS]
FIRST = dict.fromkeys(cascade.SETS, 500)
ELSEWHERE = {"processor": "another"}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (cascade, cascade_limits):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def keep(folder: Path, **more: Any) -> None:
    (folder / "cascade.json").write_text(json.dumps({"machine": ELSEWHERE, "first": FIRST, "rows": OLD, **more}))


def test_a_search_is_added_to_rows_of_another_machine(results: Path) -> None:
    keep(results)
    assert cascade._before("cascade", ["cifar10"], ["ig"], FIRST) == (OLD, ELSEWHERE)
    assert cascade._before("cascade", ["cifar10"], ["cascade"], FIRST)[0] == []  # its seconds would be of two machines
    assert cascade._before("cascade", ["cifar10"], ["ig"], {**FIRST, "cifar10": 600})[0] == []
    keep(results, timed_on=cascade.machine())
    kept, timed_on = cascade._before("cascade", ["cifar10"], ["cascade", "ig"], FIRST)
    assert (kept, timed_on) == (OLD[:2], cascade.machine())


def test_the_search_stands_in_the_same_row() -> None:
    found = {"set": "cifar10", "method": "FedAvg", "attack": "ig", "image": 500, "psnr": 18.0, "seconds": 9.0}
    text = cascade.document([*OLD, {**found, "label": True}, {**found, "psnr": 20.0, "label": False}], FIRST, "another")
    (row,) = (line for line in text if line.startswith("| cifar10 | FedAvg"))
    assert row.startswith("| cifar10 | FedAvg | 1 | 100% | 100% | 100% | 0 |")
    assert row.endswith("| 2.0 | 2.0 | 2.0 | 19.0 (2) | 1 of 2 |")
    (row,) = (line for line in cascade.document([found], FIRST, "another") if line.startswith("| cifar10 | FedAvg"))
    assert row.endswith("| - | 18.0 (1) | - |")
    tables = [[*lines] for is_table, lines in groupby(text, lambda line: line.startswith("|")) if is_table]
    assert [len({line.count("|") for line in table}) for table in tables] == [1, 1]
    assert tables[1][2:] == ["| fashion_mnist | 500 |", "| handwritten62 | 500 |", "| cifar10 | 500 |"]


@pytest.mark.parametrize(
    ("labels", "right"),
    [(None, None), (torch.tensor([1]), True), (torch.tensor([0]), False), (torch.tensor([[0.2, 0.8]]), True)],
)
def test_a_label_is_right_or_not_or_not_told(labels: torch.Tensor | None, right: bool | None) -> None:
    result = Reconstruction(torch.zeros(1, 1, 2, 2), labels=labels, objective=0.0)
    assert cascade.score_image(result, IMAGE) == {"psnr": 100.0, "exact": True, "label": right}


def test_limits_are_one_line_a_set_update_and_method(results: Path) -> None:
    row = {"set": "fashion_mnist", "update": "float32", "method": "FedAvg", "attack": "cascade", **EXACT, "off": 0.0}
    row |= {"first": 700, "iterations": 1000}
    other = {**row, "set": "cifar10", "first": 800}
    (results / "cascade_limits.json").write_text(json.dumps({"rows": [row, other, row]}))
    found = cascade_limits._measured()
    assert found == {
        ("fashion_mnist", "float32", "FedAvg"): [row, row],
        ("cifar10", "float32", "FedAvg"): [other],
    }
    lines = [line for line in cascade_limits.document([*found.values()]) if line.startswith("| ")]
    assert [line.split(" | ")[:5] for line in lines[1:]] == [
        ["| fashion_mnist", "700", "float32", "FedAvg", "2"],
        ["| cifar10", "800", "float32", "FedAvg", "1"],
    ]
    first, second = found
    assert cascade_limits._place(first) < cascade_limits._place(second)
    assert cascade_limits._place(first) < cascade_limits._place(("fashion_mnist", "float16", "FedAvg"))
    assert cascade_limits._place(first) < cascade_limits._place(("fashion_mnist", "float32", "HyperFL"))
