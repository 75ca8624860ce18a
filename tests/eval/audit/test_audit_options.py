"""An option that does nothing is an error that names it: every option beside every kind of audit."""

import json

import numpy as np
import pytest
from support.tiny import Registered
from typer.testing import CliRunner

from eval import cli
from eval.commands import terminal
from fl.capture import from_batch

MODULE = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.rand(p.shape, generator=generator) - 0.5
    return model

def logits(output):
    return output

def whole():
    return build(), torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])

def local():
    class Own(torch.nn.Sequential):
        pass
    return Own(*build()), *whole()[1:]
"""
FACES = "{name: faces, size: 8}"
SOURCES = {
    "method": ("--method", "fedavg", "--dataset", FACES, "--model", "tiny"),
    "model": ("MINE:whole",),
    "update": ("--update", "update.npz", "--model", "MINE:whole"),
}
"""What can be audited, as the command line asks for it."""
OPTIONS = {
    "--method": "fedavg",
    "--dataset": FACES,
    "--model": "MINE:build",
    "--update": "update.npz",
    "--before": "update.npz",
    "--after": "update.npz",
    "--kind": "gradient",
    "--clients": "2",
    "--images": FACES,
    "--attack": "guess",
    "--defense": "{name: clip, max_norm: 1000}",
    "--count": "2",
    "--batch-size": "1",
    "--rounds": "1",
    "--input-shape": "1,8,8",
    "--mean": "0.5",
    "--std": "0.5",
    "--loss": "cross-entropy",
    "--threat": "{knows_labels: true}",
    "--output": "MINE:logits",
    "--head": "3.",
    "--input-range": "0,2",
    "--max-psnr": "99",
    "--max-ssim": "0.99",
    "--seed": "3",
    "--device": "cpu",
    "--out": "out",
    "--junit": "found.xml",
    "--sarif": "found.sarif",
    "--workers": "2",
    "--minutes": "0.0001",
    "--import": "json",
}
"""Every option that takes a value and goes with pictures."""
SWITCHES = {"--json", "--offline"}
TABLES = {"--categories", "--targets", "--labels"}
"""What goes with tables alone, with own losses, or without images."""
IDLE = {
    "method": {
        "--update",
        "--images",
        "--input-shape",
        "--mean",
        "--std",
        "--before",
        "--after",
        "--kind",
        "--clients",
        "--labels",
        "--loss",
        "--targets",
        "--output",
        "--head",
        "--input-range",
        "--categories",
    },
    "model": {"--dataset", "--model", "--rounds", "--input-shape", "--before", "--kind", "--clients", "--labels"},
    "update": {"--dataset", "--count", "--rounds", "--workers", "--before", "--after"},
}
"""What does nothing there."""
PAIR = {"--before", "--after"}
"""What stands for an update."""


@pytest.fixture
def mine(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"options_{abs(hash(tmp_path.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    model, images, labels = __import__(name).whole()
    view, _ = from_batch(model, images[:1], labels[:1])
    np.savez("update.npz", **{key: value.numpy() for key, value in view.update.items()})
    with Registered():
        yield name


def audit(*words: object):
    return CliRunner().invoke(cli.app, ["audit", *map(str, words)])


def test_the_table_has_every_option():
    from typer.main import get_command

    command = get_command(cli.app).commands["audit"].commands["any"]
    known = {word for option in command.params for word in option.opts if word.startswith("--")}
    assert known - set(OPTIONS) == {*SWITCHES, *TABLES}


@pytest.mark.parametrize("source", SOURCES)
def test_the_command_of_a_source_has_its_own_options_alone(mine, source):
    from typer.main import get_command

    command = get_command(cli.app).commands["audit"].commands[source]
    known = {word for option in command.params for word in option.opts if word.startswith("--")}
    own = PAIR if source == "update" else set()
    assert known == ({*SWITCHES, *OPTIONS, *TABLES} - IDLE[source] - {f"--{source}", "--update"} - PAIR) | own
    words = [word.replace("MINE", mine) for word in SOURCES[source] if word not in {"--method", "--update"}]
    result = audit(source, *words, "--attack", "guess", "--device", "cpu")
    assert result.exit_code in {0, terminal.UNDECIDED}, result.output
    assert "No such option" in audit(source, *words, *(min(IDLE[source] - PAIR), "1")).output


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_does_something_or_is_refused_by_name(mine, source, option):
    base = [word for word in SOURCES[source]]
    if option in base and option not in IDLE[source]:
        del base[base.index(option) : base.index(option) + 2]
    words = [*base, option, OPTIONS[option]]
    if option != "--attack":
        words += ["--attack", "guess"]
    if option == "--model" and source != "model":
        words[words.index("MINE:build")] = "tiny" if source == "method" else "MINE:whole"
    result = audit(*(word.replace("MINE", mine) for word in words))
    if option in IDLE[source]:
        assert result.exit_code == terminal.USAGE, result.output
        # it is an update that is audited
        named = "--dataset" if source == "method" and option in {"--update", *PAIR} else option
        assert named in result.output
        assert result.output.count("\n") == 1
    else:
        assert result.exit_code not in {terminal.USAGE, terminal.FAILURE}, result.output


def test_the_number_of_processes_changes_no_result(mine, monkeypatch):
    """With no patience the second process starts at once."""
    monkeypatch.setattr("attacks.parallel.START_SECONDS", 0.0)
    monkeypatch.setattr("attacks.parallel.AttackPool.__init__.__defaults__", (1, 0.0))
    words = (f"{mine}:whole", "--attack", "{name: ig, iterations: 30, stack: 1}", "--json")
    alone, together = (audit(*words, "--workers", number) for number in (1, 2))
    assert alone.exit_code == together.exit_code, together.output
    assert json.loads(alone.stdout) == json.loads(together.stdout)


def test_a_model_that_no_other_process_can_import_is_attacked_in_this_one(mine, monkeypatch):
    monkeypatch.setattr("attacks.parallel.AttackPool.__init__.__defaults__", (1, 0.0))
    result = audit(f"{mine}:local", "--attack", "{name: ig, iterations: 60, stack: 1}", "--workers", 2)
    assert result.exit_code in {0, terminal.UNDECIDED}, result.output
    assert "attacks run in one process: the model can't be sent to another" in result.output


@pytest.mark.parametrize("option", ["--method", "--dataset", "--attack", "--defense", "--model", "--images", "--loss"])
def test_settings_that_are_no_yaml_are_named_by_their_option(mine, option):
    source = "model" if option in {"--images", "--loss"} else "method"
    given = dict(zip(SOURCES["method"][::2], SOURCES["method"][1::2], strict=True)) if source == "method" else {}
    given[option] = "{name: fedavg, steps: [1}"
    target = (SOURCES["model"][0].replace("MINE", mine),) if source == "model" else ()
    result = audit(*target, *(word for pair in given.items() for word in pair), "--device", "cpu")
    assert result.exit_code == terminal.USAGE, result.output
    assert f"error: {option}: line 1: expected ',' or ']'" in result.output


def test_options_of_executors_that_are_no_yaml_are_named(tmp_path):
    (tmp_path / "config.yaml").write_text("method: fedavg\ntask: {dataset: faces, model: lenet-zhu}\n")
    words = ("run", str(tmp_path / "config.yaml"), "--executor", "slurm", "--executor-option", "gpus=[1}")
    result = CliRunner().invoke(cli.app, [*words, "--workers", "1"])
    assert result.exit_code == terminal.USAGE, result.output
    assert "--executor-option gpus: line 1: expected ',' or ']'" in result.output
