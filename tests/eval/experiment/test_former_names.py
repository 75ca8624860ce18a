"""A config with the names that settings had before is read as one with those of today, and says so."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.cli import app
from eval.experiment import yaml_config
from eval.experiment.serialization import to_plain, with_current_names
from eval.experiment.spec import Experiment
from eval.io import yaml12
from eval.report.settings import RunSettings
from eval.run.cache_keys import run_id
from fl.settings import FormerNameWarning

NEW = """
task: {dataset: faces, model: hyperfl-grey}
federation: {partition: {name: iid, clients: 4}, rounds: 5, client_fraction: 0.5, diagnostics: [loss]}
method:
  - {name: fedavg, with: {federation.fine_tune_epochs: 2}}
  - hyperfl
attack: {name: peel+ig, iterations: 20, tv_weight: 0.5}
threat: {history_rounds: 2}
"""
FORMER = {
    "rate": "client_fraction",
    "measures": "diagnostics",
    "federation.fine_tune": "federation.fine_tune_epochs",
    "rounds: 2": "history_rounds: 2",
    "tv:": "tv_weight:",
}
OLD = NEW
for _former, _now in FORMER.items():
    OLD = OLD.replace(_now, _former)


def read(text: str) -> Experiment:
    return yaml_config.read(yaml12.parse(text))


def quietly(text: str) -> Experiment:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FormerNameWarning)
        return read(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "old.yaml"
    file.write_text(OLD)
    return file


def test_former_names_are_read_each_with_a_warning() -> None:
    with pytest.warns(FormerNameWarning) as caught:
        plain_data = with_current_names(yaml12.parse(OLD))
    assert {str(w.message) for w in caught} == {
        "'rate' is now 'client_fraction'",
        "'measures' is now 'diagnostics'",
        "'rounds' is now 'history_rounds'",
        "'tv' is now 'tv_weight'",
    }
    assert plain_data["federation"]["client_fraction"] == 0.5
    assert quietly(OLD).method[1] == read(NEW).method[1]
    assert quietly(OLD).attack == read(NEW).attack


def test_what_is_written_has_todays_names() -> None:
    text = yaml_config.dump(quietly(OLD))
    assert not re.search(r"\b(rate|measures|knows_draws|outsiders):", text)
    assert "client_fraction: 0.5" in text


def test_a_run_is_known_by_the_first_names() -> None:
    first = to_plain(read(NEW), oldest_names=True)
    assert (first["federation"]["rate"], first["threat"]["rounds"]) == (0.5, 2)
    assert first["method"][0]["with"] == {"federation.fine_tune": 2}
    assert run_id(read(NEW)) == run_id(quietly(OLD))


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("federation.rate=0.75", "federation", "client_fraction", 0.75),
        ("threat.rounds=1", "threat", "history_rounds", 1),
        ("federation.measures=[]", "federation", "diagnostics", ()),
    ],
)
def test_overrides_take_former_names(override: str, section: str, key: str, value: Any) -> None:
    with pytest.warns(FormerNameWarning, match=f"is now '{key}'"):
        changed = yaml_config.override(read(NEW), override)
    assert getattr(getattr(changed, section), key) == value


@pytest.mark.parametrize("swept", ["federation.rate", "federation.client_fraction"])
@pytest.mark.parametrize("given", ["federation.rate", "federation.client_fraction"])
def test_an_override_meets_a_sweep_by_whichever_name(tmp_path: Path, swept: str, given: str) -> None:
    file = tmp_path / "swept.yaml"
    file.write_text(f"{NEW}sweep: {{{swept}: [0.25, 0.5]}}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FormerNameWarning)
        labels = {entry.label for entry in yaml_config.load(file, [f"{given}=[0.5, 1]"]).method}
    assert labels == {f"{name}@client_fraction={share}" for name in ("fedavg", "hyperfl") for share in (0.5, 1)}


def test_the_same_setting_twice_is_an_error() -> None:
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(
            ValueError, match=r"federation\.client_fraction: expected it once, got it as client_fraction and"
        ),
    ):
        read(NEW.replace("rounds: 5", "rounds: 5, rate: 1"))
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(
            ValueError, match=r"sweep: expected it once, got it as federation\.rate and as federation\.client"
        ),
    ):
        read(f"{NEW}sweep: {{federation.rate: [0.5, 1], federation.client_fraction: [0.5]}}\n")


def test_what_is_close_is_told_of_todays_names_alone() -> None:
    with pytest.raises(ValueError, match="did you mean 'history_rounds'") as refused:
        read(NEW.replace("history_rounds", "histroy_rounds"))
    assert "knows_draws" not in str(refused.value)


def test_a_report_reads_the_config_of_an_old_run_without_a_word() -> None:
    assert RunSettings.from_plain(yaml12.parse(OLD)).section("federation")["client_fraction"] == 0.5


def test_the_command_notes_each_once(path: Path) -> None:
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0, shown.output
    notes = [line for line in shown.stderr.splitlines() if line.startswith("note: ")]
    assert sorted(notes) == [
        "note: 'fine_tune' is now 'fine_tune_epochs'",
        "note: 'measures' is now 'diagnostics'",
        "note: 'rate' is now 'client_fraction'",
        "note: 'rounds' is now 'history_rounds'",
        "note: 'tv' is now 'tv_weight'",
    ]
