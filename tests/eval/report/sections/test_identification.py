"""What reports and tables say of images named by picture, by features and by the update; old cells have the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fakerun import CONFIG, FakeRun
from support.reports import grid, reasons

from eval.experiment import yaml_config
from eval.io import yaml12
from eval.metrics.lineup import BY_FEATURES, BY_UPDATE
from eval.report import results_table
from eval.report.assemble import build_report
from eval.report.formatting import NO_VALUE

CAPTION = "Images named among others of their class"
PRIVATE_HEAD = "updates depend on what the client keeps to itself (head.weight), so nobody else can compute them"


def named(run: FakeRun, ways: tuple[str, ...]) -> FakeRun:
    """With two of six images named by picture, three by features, and all by the update, as far as told."""
    run.attack("fedavg", "ig", [9.0] * 6, label_correct=None, identified_among=50, candidates=2)
    for i, row in enumerate(run.rows[-6:]):
        told = {"identified": i < 2, BY_FEATURES: i < 3, BY_UPDATE: True}
        row.update({way: told[way] for way in ways})
    return run


def test_a_report_sets_the_three_ways_side_by_side(tmp_path: Path) -> None:
    run = named(FakeRun(), ("identified", BY_FEATURES, BY_UPDATE))
    (line,) = grid(build_report(run.write(tmp_path / "run")), CAPTION).rows
    assert [cell.partition("\N{NO-BREAK SPACE}")[0] for cell in line[-5:]] == ["33", "50", "4", "100", "2"]
    assert "[54, 100]" in line[-2]


def test_cells_from_before_are_reported_as_they_were(tmp_path: Path) -> None:
    run = named(FakeRun(), ("identified",))
    content = build_report(run.write(tmp_path / "run"))
    (line,) = grid(content, CAPTION).rows
    assert line[-5].startswith("33")
    assert [line[-4], *line[-2:]] == [NO_VALUE] * 3
    assert "naming by" not in reasons(content)
    nothing = build_report(FakeRun().attack("fedavg", "ig", [9.0] * 6).write(tmp_path / "older"))
    with pytest.raises(StopIteration):
        grid(nothing, CAPTION)


def test_what_could_not_be_told_says_why(tmp_path: Path) -> None:
    run = named(FakeRun(), ("identified",))
    for row in run.rows:
        row.update({BY_UPDATE: None, "missing": {BY_UPDATE: PRIVATE_HEAD}})
    assert f"naming by update under fedavg (ig): {PRIVATE_HEAD}" in reasons(build_report(run.write(tmp_path / "run")))


def test_an_attack_without_pictures_has_the_update_s() -> None:
    run = named(FakeRun(), (BY_UPDATE,))
    for row in run.rows:
        row["psnr"] = None
    found = results_table.build_table(run.rows, yaml_config.read(yaml12.parse(CONFIG)))
    assert found.rows[0][found.columns.index("named")] == "- / - / 100%"


def test_a_table_has_the_shares_in_one_column() -> None:
    experiment = yaml_config.read(yaml12.parse(CONFIG))
    run = named(FakeRun(), ("identified", BY_FEATURES, BY_UPDATE)).refuse("hyperfl", "peel+ig", "not in the mood")
    found = results_table.build_table(run.rows, experiment)
    at = found.columns.index("named")
    assert [row[at] for row in found.rows] == ["33% / 50% / 100%", "-"]
    assert [len(row) for row in (*found.rows, *found.baselines)] == [len(found.columns)] * 6
    assert results_table.NAMED in found.legend
    old = results_table.build_table(FakeRun().attack("fedavg", "ig", [9.0] * 6).rows, experiment)
    assert "named" not in old.columns
    assert results_table.NAMED not in old.legend
