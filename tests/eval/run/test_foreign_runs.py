"""Run directories that somebody else made: what is in them names no file elsewhere, and breaks nothing."""

from __future__ import annotations

import pytest
from support.fakerun import FakeRun
from support.reports import reasons
from typer.testing import CliRunner

from eval.cli import app
from eval.report.assemble import build_report
from eval.report.load import picture_file_names
from eval.report.writer import write_report


@pytest.mark.parametrize("key", ["method", "defense", "attack"])
@pytest.mark.parametrize("label", ["../../../secret", "a/b", "..", "", "<b>", "x" * 201, "\x1b[31m", 3, None, ["a"]])
def test_a_label_is_no_path(tmp_path, key, label):
    run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0])
    run.rows[1][key] = label
    with pytest.raises(ValueError, match=rf"images\.jsonl, line 2: expected {key} of at most 200 letters"):
        build_report(run.write(tmp_path / "out"))


@pytest.mark.parametrize(
    ("key", "value"), [("round", "../x"), ("round", -1), ("seed", True), ("seed", 1.5), ("seed", None)]
)
def test_what_names_a_file_is_a_number(tmp_path, key, value):
    run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0])
    run.rows[1][key] = value
    with pytest.raises(ValueError, match=rf"line 2: expected {key} as a whole number"):
        build_report(run.write(tmp_path / "out"))


def test_pictures_are_not_read_from_elsewhere(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0])
    folder = run.write(tmp_path / "out")
    (folder / "images").rename(tmp_path / "private")
    (folder / "images").symlink_to(tmp_path / "private")
    assert "leads out of" in str(reasons(build_report(folder)))


@pytest.mark.parametrize("name", ["config.yaml", "images.jsonl", "rounds.jsonl", "run.json", "env.json"])
def test_no_file_of_a_run_is_read_from_elsewhere(tmp_path, name):
    run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0]).train("fedavg", [0.1, 0.5])
    run.about = {"name": "x"}
    folder = run.write(tmp_path / "out")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match="leads out of"):
        build_report(folder)


def test_long_names_of_pictures_are_cut():
    long = "x" * 200
    names = picture_file_names([(long, "none", f"{long[:-1]}{i}", 0, 0) for i in range(2)])
    assert len(set(names.values())) == 2
    assert all(len(name) < 230 for name in names.values())
    assert picture_file_names([("a", "b", "c", 1, 2)]) == {("a", "b", "c", 1, 2): "a-b-c-round1-seed2"}


@pytest.mark.parametrize("depth", [100_000])
def test_values_too_deep_in_each_other_are_an_error(tmp_path, depth):
    folder = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0]).write(tmp_path / "out")
    (folder / "run.json").write_text('{"a": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ValueError, match="too deep in each other"):
        build_report(folder)


def test_values_of_other_types_are_a_line(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0])
    run.rows[1]["psnr"] = {"a": 1}
    with pytest.raises(ValueError, match="holds something else than `hyperleak run` writes"):
        write_report(run.write(tmp_path / "out"))


def test_figures_of_other_types_are_a_line_in_comparisons(tmp_path):
    folders = []
    for name in ("a", "b"):
        run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0])
        run.rows[1]["floor_grey_psnr"] = ["x"] if name == "a" else 10.0
        folders.append(str(run.write(tmp_path / name)))
    for words in (["compare", *folders], ["compare", *folders, "--json"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, done.output
        assert "holds something else than `hyperleak run` writes" in done.output
