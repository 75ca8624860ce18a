"""Methods compared at different defaults: said in a line, unless a config writes them down."""

from typing import Any

import pytest
from typer.testing import CliRunner

from eval.cli import app
from eval.experiment import config_catalog, yaml_config
from eval.experiment.default_differences import differences_in_file, differing_defaults
from eval.io import jsonl, yaml12

CONFIG = """
task: {dataset: {name: faces, size: 8}, model: {name: mlp, input_shape: [1, 8, 8]}}
federation: {partition: {name: iid, clients: 3, train_size: 24, test_size: 6}, rounds: 1}
method:
  - {name: fedavg, lr: 0.1}
  - {name: dp-fedavg, lr: 0.1, images: 8, epsilon: 8}
attack: []
"""
WRITTEN = {
    "fedavg": {"epochs": 1, "momentum": 0, "weight_decay": 0, "sampler": "shuffle"},
    "dp-fedavg": {"epochs": 5, "momentum": 0.5, "weight_decay": 5e-4, "sampler": "poisson"},
}


def config(*methods: Any, **changes: Any) -> dict[str, Any]:
    return {**yaml12.parse(CONFIG), "method": list(methods), **changes}


def said(data: dict[str, Any], *overrides: str) -> str:
    experiment = yaml_config.read(data)
    for text in overrides:
        experiment = yaml_config.override(experiment, text)
    return differing_defaults(experiment, data, overrides)


def test_defaults_that_differ_are_named_with_what_to_write() -> None:
    words = said(yaml12.parse(CONFIG))
    assert "epochs 1 (fedavg), 5 (dp-fedavg);" in words
    assert "momentum 0 (fedavg), 0.5 (dp-fedavg);" in words
    assert "weight_decay 0 (fedavg), 0.0005 (dp-fedavg);" in words
    assert "sampler shuffle (fedavg), poisson (dp-fedavg)" in words
    assert "lr" not in words
    assert words.endswith("--set method.epochs=1")
    assert "\n" not in words


@pytest.mark.parametrize("names", [("hyperfl", "dp-hyperfl"), ("fedavg", "fedper"), ("fedavg",)])
def test_like_defaults_need_no_word(names: tuple[str, ...]) -> None:
    assert said(config(*names)) == ""


def test_what_is_written_for_all_is_meant() -> None:
    both = [{"name": name, "lr": 0.1, **own} for name, own in WRITTEN.items()]
    assert said(config(*both)) == ""
    assert "epochs" in said(config(both[0], {key: value for key, value in both[1].items() if key != "epochs"}))


@pytest.mark.parametrize(
    ("override", "silent"),
    [
        ("method.epochs=2", True),
        ("method.fedavg.epochs=5", True),  # what the other has by default
        ("method.fedavg.epochs=2", False),
        ("method.steps=2", True),
        ("method=[{name: fedavg, epochs: 1}, {name: dp-fedavg, epochs: 5, images: 8}]", True),
        ("method.lr=0.2", False),
    ],
)
def test_overrides_write_settings_too(override: str, silent: bool) -> None:
    assert ("epochs" not in said(yaml12.parse(CONFIG), override)) == silent


def test_a_sweep_over_all_methods_writes_its_setting() -> None:
    words = said({**yaml12.parse(CONFIG), "sweep": {"method.epochs": [1, 2]}})
    assert "epochs" not in words
    assert "momentum 0 (fedavg), 0.5 (dp-fedavg)" in words


def test_steps_take_the_place_of_epochs() -> None:
    assert "epochs 5 (dp-fedavg), steps 2 (fedavg);" in said(
        config({"name": "fedavg", "steps": 2}, {"name": "dp-fedavg", "images": 8})
    )


def test_without_training_the_observed_round_is_all_there_is() -> None:
    federation = {"partition": {"name": "iid", "clients": 3}, "rounds": 0}
    data = config("fedavg", "hyperfl", federation=federation, observe={"method": {"steps": 1, "lr": 0.1}})
    words = said(data)
    assert "epochs" not in words
    assert "lr" not in words.split("momentum")[0]


def test_shipped_configs_write_down_what_they_compare() -> None:
    found = {}
    for name in ("quickstart", "reproduce/hyperfl/table3-cifar10", "reproduce/hyperfl/figure4-emnist"):
        path = config_catalog.find_config(name)
        found[name] = differences_in_file(yaml_config.load(path), path)
    assert not any(found.values()), found


def test_a_run_says_it_first_and_keeps_it_for_its_readers(tmp_path) -> None:
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text(CONFIG.replace("fedavg, lr", "fedavg, batch_size: 4, lr"))
    words = differences_in_file(yaml_config.load(file), file)

    def run(path: Any) -> str:
        done = CliRunner().invoke(app, ["run", str(path), "--out", str(out), "--workers", "1"])
        assert done.exit_code == 0, done.output
        return done.output

    def kept() -> None:
        assert jsonl.read_json(out / "run.json")["unlike_defaults"] == words
        assert "Not like with like" in (out / "table.md").read_text()
        assert "Not like with like" in (out / "report.html").read_text()

    assert f"note: {words}" in run(file)
    kept()
    assert "note: not like" not in run(out / "config.yaml")  # there everything is written down
    kept()
