"""`hyperleak reproduce`: an item at a scale is a run like others, and ends beside the paper's figures."""

import json

import pytest
from support.tiny import CONFIG, Registered
from typer.main import get_command
from typer.testing import CliRunner

from eval import cli
from eval.commands import terminal
from eval.experiment import config_catalog

PUBLISHED = """
published:
  - {method: fedavg, attack: guess, psnr: 12.5, source: "Toy, Table 1"}
  - {method: hyperfl, accuracy: 0.5, source: "Toy, Table 1", note: Its seeds are not given.}
scales:
  smoke: {federation.partition.train_size: 10}
"""


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    """A paper with one table, and an empty working folder."""
    folder = tmp_path / "configs" / "reproduce" / "toy"
    folder.mkdir(parents=True)
    (folder / "table1.yaml").write_text(CONFIG + PUBLISHED)
    monkeypatch.setattr(config_catalog, "CONFIGS", tmp_path / "configs")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with Registered():
        yield tmp_path


def call(*words: object):
    return CliRunner().invoke(cli.app, ["reproduce", *map(str, words)])


def test_an_item_runs_at_a_scale_and_goes_on_in_its_folder(toy):
    result = call("table1", "--scale", "smoke", "--workers", 1)
    assert result.exit_code == 0, result.output
    folder = toy / "results/reproduce/toy/table1/smoke"
    config = (folder / "config.yaml").read_text()
    assert "rounds: 1\n" in config
    assert "train_size: 10\n" in config
    table = (folder / "published.md").read_text()
    assert "scale smoke, less than the paper's" in table
    assert "| fedavg | guess | PSNR (dB) | 12.50 | " in table
    assert "hyperfl: Its seeds are not given." in table
    assert "beside the paper" in result.output
    cells = {path.name: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    again = call("toy/table1", "--scale", "smoke", "--workers", 1, "--json")
    assert again.exit_code == 0, again.output
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()} == cells
    found = json.loads(again.stdout)
    assert (found["item"], found["scale"], found["status"]) == ("toy/table1", "smoke", "finished")
    assert [(one["method"], one["paper"]) for one in found["published"]] == [("fedavg", 12.5), ("hyperfl", 0.5)]
    assert {"difference", "low", "high", "over", "paper_within"} <= set(found["published"][0])


def test_words_of_run_are_taken(toy):
    words = ("--scale", "paper", "--out", toy / "mine", "--only", "fedavg", "--only", "guess", "--workers", 1)
    result = call("table1", *words, "--set", "federation.rounds=0")
    assert result.exit_code == 0, result.output
    config = (toy / "mine" / "config.yaml").read_text()
    assert "rounds: 0\n" in config
    assert "hyperfl" not in config
    own = {word for option in get_command(cli.app).commands["reproduce"].params for word in option.opts}
    run = {word for option in get_command(cli.app).commands["run"].params for word in option.opts}
    assert run - own <= {"config", "--watch"}
    assert own - run == {"item", "--list", "--scale"}


def test_a_plan_is_printed_and_nothing_computed(toy):
    for more in ((), ("--json",)):
        result = call("table1", "--scale", "small", "--plan", *more)
        assert result.exit_code == 0, result.output
        assert "beside the paper" not in result.output
    assert json.loads(result.stdout)["open"] == 5
    assert not (toy / "results/reproduce/toy/table1/small/cells").exists()


def test_a_part_that_fails_is_said_and_the_rest_set_beside_the_paper(toy):
    result = call("table1", "--scale", "smoke", "--workers", 1, "--set", "attack=[guess, crash]")
    assert result.exit_code == terminal.FAILURE
    assert "beside the paper" in result.output
    assert "failed: fedavg: crash" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("table1",),
            "expected --scale smoke or small or paper for toy/table1; `hyperleak reproduce --list toy/table1`",
        ),
        (("--scale", "smoke"), "expected a table or figure and --scale; `hyperleak reproduce --list` shows all"),
        (("tabel1", "--scale", "smoke"), "did you mean toy/table1? `hyperleak reproduce --list` shows all"),
        (("--list", "toi"), "no paper, table or figure is called 'toi'; did you mean toy? "),
        (("--list", "toy", "--set", "seeds=1", "--workers", "2"), "--json alone; got --set, --workers beside it"),
    ],
)
def test_what_is_missing_is_said(words, said):
    result = call(*words)
    assert result.exit_code == terminal.USAGE
    assert said in result.output


def test_the_list_has_scales_costs_and_what_is_measured():
    lines = call("--list").output.splitlines()
    assert lines[1].split("\t") == [
        "item",
        "rows",
        "smoke: measured, cost",
        "small: measured, cost",
        "paper: measured, cost",
        "otherwise",
    ]
    assert lines[2].startswith("toy/table1\t2\t-, ")
    assert lines[3].startswith("all\t2\t0\t0\t0\t0")
    small = call("--list", "--scale", "small").output.splitlines()
    assert small[1].split("\t") == ["item", "rows", "small: measured, cost", "otherwise"]
    assert small[2].split("\t")[2] == lines[2].split("\t")[3]
    (found,) = json.loads(call("--list", "toy", "--scale", "small", "--json").stdout)
    assert set(found["scales"]) == {"small"}
    (found,) = json.loads(call("--list", "toy", "--json").stdout)
    assert found["scales"]["paper"]["measured"] == 0
    assert found["scales"]["smoke"]["trainings"] == 2
    assert found["scales"]["smoke"]["seconds"] is None  # nobody can tell of its attack, which is none of ours
    assert found["rows"] == 2
