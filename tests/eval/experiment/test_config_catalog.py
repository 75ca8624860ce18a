"""Configs found by what a reader has of their name, listed and described."""

import json

import pytest
from typer.testing import CliRunner

from eval import cli
from eval.commands import terminal
from eval.commands.show import describe
from eval.experiment import config_catalog, yaml_config
from eval.run import plan, runner


def call(*words):
    return CliRunner().invoke(cli.app, list(words))


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A checkout's configs, few of them."""
    for name in ("quick", "a/b/table1", "a/b/table2", "a/c/table2"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# About\n#   {name}.\n\n# not this\ntitle: The {name}\n")
    monkeypatch.setattr(config_catalog, "CONFIGS", tmp_path)
    return tmp_path


def test_the_first_folders_of_a_name_may_be_left_out(few):
    for name in ("table1", "b/table1", "a/b/table1", "b/table1.yaml", str(few / "a" / "b" / "table1.yaml")):
        assert config_catalog.find_config(name) == few / "a" / "b" / "table1.yaml"
    assert config_catalog.find_config("c/table2") == few / "a" / "c" / "table2.yaml"
    assert config_catalog.config_name(config_catalog.find_config("c/table2")) == "a/c/table2"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("table2", "2 configs are called 'table2': a/b/table2, a/c/table2"),
        ("able1", r"no config 'able1'; did you mean 'a/b/table1' or .*\? `hyperleak list configs` shows all 4$"),
        ("c/tabel2", "did you mean 'a/c/table2' or"),
        ("xyz", "^no config 'xyz'; `hyperleak list configs` shows all 4$"),
        ("b", "'b' is a folder of configs; `hyperleak list configs b` shows them"),
    ],
)
def test_what_is_not_found_is_said_with_what_is_close(few, name, said):
    with pytest.raises(FileNotFoundError, match=said):
        config_catalog.find_config(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "tabel7",
            "^no config 'tabel7'; did you mean one of the 2 whose names begin with 'table7'\\? `hyperleak list con",
        ),
        ("table7", "one of the 2 whose names begin with 'table7'"),
        ("d/tabel7", "one of the 2 whose names begin with 'd/table7'"),
        ("table7-cifra10", "did you mean 'd/table7-cifar10'"),
        ("table8", "did you mean"),
    ],
)
def test_the_beginning_of_several_names(few, name, said):
    (few / "d").mkdir()
    for name_there in ("table7-cifar10", "table7-emnist"):
        (few / "d" / f"{name_there}.yaml").write_text("title: A table\n")
    with pytest.raises(config_catalog.UnknownConfigError, match=said):
        config_catalog.find_config(name)


def test_show_of_a_misspelled_config_names_configs():
    assert "`hyperleak list configs table1` shows them" in call("show", "tabel1").stderr
    assert "did you mean 'reproduce/hyperfl/table1-cifar10'" in call("show", "table1-cifra10").stderr


def test_an_installation_without_configs_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(config_catalog, "CONFIGS", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="this installation has none to name"):
        config_catalog.find_config("quickstart")


def test_list_configs(few):
    listed = [line.split("\t") for line in call("list", "configs").stdout.splitlines()]
    assert listed == [[name, f"The {name}"] for name in ("a/b/table1", "a/b/table2", "a/c/table2", "quick")]
    for prefix, names in (("a/b", ["a/b/table1", "a/b/table2"]), ("c/t", ["a/c/table2"]), ("able", [])):
        assert list(json.loads(call("list", "configs", prefix, "--json").stdout)["configs"]) == names


def test_the_comment_at_the_head(few):
    assert config_catalog.read_description(few / "quick.yaml") == "About quick."


def test_titles_are_those_of_the_configs():
    for name in ("quickstart", "reproduce/hyperfl/table3-emnist"):
        assert config_catalog.read_title(name) == yaml_config.load(config_catalog.find_config(name)).title


def test_show_of_a_config():
    shown = call("show", "quickstart").stdout
    for part in (
        "quickstart (config)\nDo federated updates give faces away?\n",
        "`make demo`: two ways to learn together on real faces",
        "methods: fedavg, hyperfl\ndefenses: none\n"
        "attacks: ig, cascade, joint, peel+ig, peel+cascade\ncells: 7 (2 trainings, 5 attacks)\n",
    ):
        assert part in shown
    (about,) = describe("leakage-over-training")
    assert about["kind"] == "config"
    assert json.loads(call("show", "leakage-over-training", "--json").stdout) == [about]


@pytest.mark.parametrize("overrides", [[], ["seeds=[0, 1]", "observe.rounds=[0, 2]", "defense=[none, noise]"]])
def test_cells_are_counted_without_the_data(overrides):
    experiment = yaml_config.load(config_catalog.find_config("quickstart"), overrides)
    assert sum(plan.count_tasks(experiment)) == sum(1 for _ in runner.prepare(experiment, device="cpu").cells())


def test_a_slip_in_a_name_gets_the_nearest_of_all():
    third = "reproduce/hyperfl/table3-emnist"
    for name, near in (("quickstrat", "quickstart"), ("hyperf", "hyperfl"), ("hyperfl/table3-emnst", third)):
        shown = call("show", name)
        assert shown.exit_code == terminal.USAGE
        assert f"did you mean {near!r}" in shown.stderr
