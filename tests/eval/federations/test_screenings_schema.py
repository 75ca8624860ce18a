"""The schema of `screenings.jsonl`: rows follow it, and what does not is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import pytest
from support import recorded as support
from support.json_schema import closed, faults

from eval.federations.exposures import LEVELS, Exposure
from eval.federations.round_report import ROWS, SCHEMA_VERSION, RoundReports
from eval.federations.screening import Screening, Verdict
from eval.io import jsonl

SCHEMA = json.loads(resources.files("eval.federations").joinpath("screenings.schema.json").read_text(encoding="utf-8"))
CLOSED = closed(SCHEMA)
Row = dict[str, Any]


@pytest.fixture
def row(tmp_path: Path) -> Row:
    """What is kept of a client whose update leaks and is recorded."""
    screening = Screening(
        verdict="leaked",
        reason="an image is recovered (analytic)",
        exposures=(Exposure("images", "analytic", "an image is recovered"),),
        tried={"analytic": "images, confirmed"},
        notes=("read as one step",),
        seconds=0.1,
    )
    RoundReports(folder=tmp_path, record=True).add(support.recorded(support.network()), screening, "withheld")
    (found,) = jsonl.read_rows(tmp_path / "round-3" / ROWS)
    return found


def test_a_row_follows_it_and_has_every_property(row: Row) -> None:
    assert not faults(row, CLOSED, CLOSED)
    assert {*row} == {*SCHEMA["properties"]}
    assert {*row} - {*SCHEMA["required"]} == {"update"}
    assert {*row["training"]} == {*SCHEMA["properties"]["training"]["required"]}


def test_verdicts_kinds_and_version_are_those_of_the_code() -> None:
    known = SCHEMA["properties"]
    assert known["verdict"]["enum"] == [*get_args(Verdict)]
    assert known["exposures"]["items"]["properties"]["kind"]["enum"] == [*LEVELS]
    assert known["schema_version"]["enum"] == [SCHEMA_VERSION]
    assert SCHEMA["$id"].endswith(f":{SCHEMA_VERSION}")


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("schema_version"),
        lambda told: told.update(schema_version=2),
        lambda told: told.update(verdict="fine"),
        lambda told: told.update(seconds="long"),
        lambda told: told["exposures"][0].update(kind="other"),
        lambda told: told["tried"].update(ig=3),
        lambda told: told["training"].pop("lr"),
        lambda told: told["training"].update(steps=0.5),
    ],
)
def test_what_does_not_follow_it_is_told(row: Row, change: Callable[[Row], object]) -> None:
    wrong = copy.deepcopy(row)
    change(wrong)
    assert faults(wrong, SCHEMA, SCHEMA)


def test_a_reader_takes_what_is_added(row: Row) -> None:
    assert not faults({**row, "news": 1}, SCHEMA, SCHEMA)
