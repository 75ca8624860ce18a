"""`benchmarks.common`: what a benchmark has measured is left as it is, and pages follow from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.common import RowBenchmark

CASES = [("a", 0), ("a", 1), ("b", 0)]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The cases that were measured, of a benchmark whose results are in a folder of their own."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return []


def benchmark(measured: list[tuple[str, int]], words: str = "rows") -> RowBenchmark:
    def measure(case: str, victim: int) -> dict[str, Any]:
        measured.append((case, victim))
        return {"case": case, "victim": victim}

    return RowBenchmark(
        page="peel", keys=("case", "victim"), measure=measure, document=lambda rows: [f"{len(rows)} {words}"]
    )


def rows() -> list[dict[str, Any]]:
    return json.loads((common.RESULTS / "peel.json").read_text())["rows"]


def test_a_row_that_is_known_is_not_measured_again(measured: list[tuple[str, int]]) -> None:
    benchmark(measured).main("", CASES[:2], [])
    benchmark(measured).main("", CASES, [])
    assert measured == CASES
    assert [(row["case"], row["victim"]) for row in rows()] == CASES
    benchmark(measured).main("", CASES[:1], ["--again"])
    assert measured == [*CASES, CASES[0]]
    assert len(rows()) == 1


def test_each_row_is_written_as_soon_as_it_is_done(measured: list[tuple[str, int]]) -> None:
    def stopping() -> Any:
        yield CASES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        benchmark(measured).main("", stopping(), [])
    assert [(row["case"], row["victim"]) for row in rows()] == CASES[:1]


def test_a_page_is_written_anew_without_measuring(measured: list[tuple[str, int]]) -> None:
    benchmark(measured).main("", CASES, [])
    benchmark(measured, "rows in other words").main("", CASES, ["--rewrite"])
    assert measured == CASES
    assert (common.RESULTS / "peel.md").read_text().startswith("3 rows in other words\n")
