"""What is measured beside accuracy, from a run's rows to its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fakerun import FakeRun
from support.runs import run, tiny
from support.tiny import Registered

from eval.io.jsonl import read_rows
from eval.report.assemble import build_report
from eval.report.blocks import FigureBlock, Omission, TableBlock
from eval.report.formatting import NO_VALUE
from eval.report.writer import write_report
from eval.run import runner
from eval.run.cache_keys import short_hash


def measured(folder: Path, *last: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Figures, grids and reasons of a report, by title, where the last round of fedavg (and hyperfl) has these."""
    fake = FakeRun()
    for method, found in zip(("fedavg", "hyperfl"), last, strict=False):
        fake.train(method, [0.1, 0.5, 0.4]).attack(method, "ig", [20.0])
        fake.rounds[-2] |= before or {}
        fake.rounds[-1] |= found
    built = build_report(fake.write(folder / "run"))
    blocks = [block for section in built.sections for block in section.blocks]
    titles = {block.title: block for block in blocks if isinstance(block, FigureBlock)}
    grids = {block.caption: block for block in blocks if isinstance(block, TableBlock)}
    return {**titles, **grids, **{block.what: block for block in blocks if isinstance(block, Omission)}}


def test_a_run_keeps_what_is_asked_for(tmp_path: Path) -> None:
    with Registered():
        run(tiny("federation.diagnostics=[loss, movement]", "attack=guess"), tmp_path / "a")
    rows = [row for row in read_rows(tmp_path / "a" / "rounds.jsonl") if row["method"] == "fedavg"]
    assert all(len(row["losses"]) == 3 and row["loss"] == pytest.approx(sum(row["losses"]) / 3) for row in rows)
    assert ["movement" in row for row in rows] == [False, True, True]
    assert not any("similarity" in row for row in rows)
    assert rows[2]["loss"] < rows[0]["loss"]


def test_cells_of_runs_that_measure_nothing_keep_their_names() -> None:
    with Registered():
        (first, *_) = runner.prepare(tiny(), device="cpu").trainings
    settings = first.cell.settings
    assert "measures" not in settings["federation"]
    assert short_hash(settings) == first.cell.id


def test_every_measure_has_a_curve(tmp_path: Path) -> None:
    first = {"loss": 2.0, "movement": [3.0, 5.0, 1.0], "divergence": {"a": 1.0, "b": 3.0}}
    first |= {"similarity": [[1.0, 0.5, 0.0], [0.5, 1.0, 0.1], [0.0, 0.1, 1.0]]}
    last = {"loss": 0.25, "movement": [1.0, 2.0, 4.5], "divergence": {"a": 0.0, "b": 0.5}}
    last |= {"similarity": [[1.0, 0.9, 0.6], [0.9, 1.0, 0.9], [0.6, 0.9, 1.0]]}
    found = measured(tmp_path, last, before=first)
    drawn = {title: block for title, block in found.items() if isinstance(block, FigureBlock)}
    words = {title: figure.legend.rows[0][2:] for title, figure in drawn.items() if figure.legend is not None}
    assert words["Loss on training images"] == ["2.000 (5)", "2.000 (5)", "0.250 (10)"]
    assert words["Movement of clients' weights in a round"] == ["3.000 (5)", "3.000 (5)", "2.500 (10)"]
    assert words["Divergence of clients' weights"] == ["2.000 (5)", "2.000 (5)", "0.250 (10)"]
    assert words["Similarity of clients' weights"] == ["0.200 (5)", "0.800 (10)", "0.800 (10)"]
    matrix = drawn["Similarity of clients' weights: fedavg, none, round 10, seed 0"]
    shades = [round(shade, 9) for row in matrix.chart.shades for shade in row]
    assert len(shades) == 9
    assert [shades.count(one) for one in (1, 0.75, 0)] == [3, 4, 2]  # 0.9 between 0.6 and 1
    assert "from 0.600 to 1" in matrix.alt


@pytest.mark.parametrize(
    ("least", "shades", "said"),
    [
        (1 - 1.2e-14, {1.0}, "All cosines are 1"),
        (1 + 2e-16, {1.0}, "All cosines are 1"),
        (0.99996, {1.0, 0.0}, "from 0.99996 to 1"),
        (0.9999, {1.0, 0.0}, "from 0.9999 to 1"),
    ],
)
def test_equal_clients_are_drawn_alike(tmp_path: Path, least: float, shades: set[float], said: str) -> None:
    found = measured(tmp_path, {"similarity": [[1.0, least], [least, 1.0]]})
    matrix = found["Similarity of clients' weights: fedavg, none, round 10, seed 0"]
    assert isinstance(matrix, FigureBlock)
    assert {shade for row in matrix.chart.shades for shade in row} == shades
    assert said in matrix.alt


def test_numbers_of_the_servers_step_have_a_line_for_each_client(tmp_path: Path) -> None:
    fake = FakeRun()
    for seed, (first, second) in enumerate([((0.2, 0.8), (0.5, 0.5)), ((0.4, 0.6), (0.5, 0.5))]):
        fake.train("hfedf", [0.1, 0.5, 0.4], seed=seed)
        fake.rounds[-2] |= {"clients": [4, 1], "server": {"alignment": list(first), "of embeddings": [None, 1.0]}}
        fake.rounds[-1] |= {"clients": [1, 4], "server": {"alignment": list(second)}}
    fake.train("fedavg", [0.1, 0.4])
    fake.rounds[-1]["server"] = {}
    fake.train("local", [0.1, 0.4])  # was not asked
    folder = fake.attack("hfedf", "ig", [20.0]).write(tmp_path / "run")
    built = build_report(folder)
    blocks = [block for section in built.sections for block in section.blocks]
    drawn = {block.title: block for block in blocks if isinstance(block, FigureBlock)}
    legend = drawn["Alignment: hfedf, none"].legend
    assert legend is not None
    assert legend.columns == ["whose", ">first", ">highest", ">last"]
    assert legend.rows == [
        ["client 1", "0.700 (5)", "0.700 (5)", "0.500 (10)"],
        ["client 4", "0.300 (5)", "0.500 (10)", "0.500 (10)"],
    ]
    assert [mark.series for mark in legend.markers] == [0, 1]
    only = drawn["Of embeddings: hfedf, none"].legend
    assert only is not None
    assert only.rows == [["client 1", *["1.000 (5)"] * 3]]
    (absent,) = [block for block in blocks if isinstance(block, Omission) and "server" in block.what]
    assert absent.what == "Numbers of the server's step: fedavg, none"
    assert "says nothing" in absent.reason
    write_report(folder)
    for name in ("report.html", "report.md"):
        written = (folder / name).read_text()
        assert "Alignment: hfedf, none" in written
        assert "0.300 (5)" in written


def test_numbers_of_many_clients_or_none_at_all_are_not_drawn(tmp_path: Path) -> None:
    many = {"clients": list(range(9)), "server": {"share": [0.1] * 9, "other": [None] * 9}}
    found = measured(tmp_path, many)
    for name, reason in (("Share", "more than 8 clients"), ("Other", "none of its values")):
        block = found[f"{name}: fedavg, none"]
        assert isinstance(block, Omission)
        assert reason in block.reason


def test_one_client_has_no_map(tmp_path: Path) -> None:
    assert not [title for title in measured(tmp_path, {"similarity": [[1.0]]}) if "weights: " in title]


def test_similarities_that_are_no_numbers_or_too_many_are_not_drawn(tmp_path: Path) -> None:
    many = [[1.0] * 51] * 51
    found = measured(tmp_path, {"similarity": many}, {"similarity": [[None, None], [None, 1.0]]})
    for method, reason in (("fedavg", "more than 50 clients"), ("hyperfl", "all zero or no numbers")):
        block = found[f"Similarity of clients' weights: {method}, none, round 10, seed 0"]
        assert isinstance(block, Omission)
        assert reason in block.reason


def test_confidences_are_shares_of_right_and_of_wrong_answers(tmp_path: Path) -> None:
    none = [0] * 10
    own = {"right": [0, 0, 0, 0, 0, 1, 0, 0, 0, 3], "wrong": none}
    found = measured(tmp_path, {"confidence": {"own": own}})
    (right, wrong) = found["Probability of the class named, after the last round (seed 0)"].rows
    assert right[2:5] == ["own", "right", "4"]
    assert [cell.replace("\N{NO-BREAK SPACE}", "") for cell in right[5:]] == [*["0%"] * 5, "25%", *["0%"] * 3, "75%"]
    assert wrong[4] == "0"
    assert set(wrong[5:]) == {NO_VALUE}  # no share of nothing


def test_without_measures_nothing_is_said_of_them(tmp_path: Path) -> None:
    assert not [title for title in measured(tmp_path, {}) if "weights" in title or "Loss" in title or "Prob" in title]
