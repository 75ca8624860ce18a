"""The composite GitHub Action: its inputs are options of the command, and its script calls that with their values."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from eval.cli import app

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
(AUDIT,) = (step for step in STEPS if step.get("id") == "audit")
OWN = {"args", "undecided", "install", "working-directory"}
"""Inputs that are no options of the command."""
VALUES = {
    "model": "my_model:build",
    "update": "update 1.npz",
    "method": "{name: fedavg, lr: 0.1}",
    "dataset": "faces",
    "images": "faces $(touch owned)",
    "count": "4",
    "batch-size": "2",
    "input-shape": "1,8,8",
    "attack": '{name: ig, "iterations": 3}',
    "defense": "noise",
    "max-psnr": "20.0",
    "max-ssim": "-0.5",
    "minutes": "3.0",
    "out": "-audit",
    "junit": "a.xml",
    "sarif": "a.sarif",
}
NEEDED = {"model": {"model"}, "update": {"update", "model"}, "method": {"method", "dataset"}}
FAKE = """#!{python}
import json, os, sys
open("called.json", "w").write(json.dumps(sys.argv[1:]))
sys.exit(int(os.environ["CODE"]))
"""
BLOCK = re.compile(r"^```yml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def options(source):
    """The parameters of the command of a source, by the name that an input has."""
    audit = typer.main.get_command(app).commands["audit"].commands[source]
    return {option.opts[0].removeprefix("--"): option for option in audit.params}


def variables(given):
    """What the runner makes of the inputs: the step's environment."""
    whole = {name: about["default"] for name, about in ACTION["inputs"].items()} | given
    found = {}
    for name, value in AUDIT["env"].items():
        (read,) = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value).groups()
        found[name] = whole[read]
    return found


def call(folder, given, code=0):
    """Run the script as a runner does, with a command that notes how it was called."""
    fake = folder / "hyperleak"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    noted = folder / "output"
    places = {"PATH": f"{folder}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(noted), "CODE": str(code)}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", AUDIT["run"]]
    done = subprocess.run(
        shell, cwd=folder, env={**places, **variables(given)}, capture_output=True, text=True, check=False
    )
    called = folder / "called.json"
    return done, json.loads(called.read_text()) if called.exists() else None, noted


def test_it_is_composite_and_every_step_says_its_shell():
    assert ACTION["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" for step in STEPS)
    assert {*ACTION} >= {"name", "description", "inputs", "runs"}
    assert all({*about} == {"description", "default"} for about in ACTION["inputs"].values())
    assert all(isinstance(about["default"], str) for about in ACTION["inputs"].values())


def test_every_input_is_an_option_of_the_command():
    known = {name for source in NEEDED for name in options(source)} | {"model", "update", "method"}
    assert {*ACTION["inputs"]} - OWN == {*VALUES}
    assert {*VALUES} <= known
    limits = {name for name in known if name.startswith("max-")}
    assert limits <= {*VALUES}, "a limit that the action does not know"


def test_inputs_reach_the_script_as_variables_alone():
    assert not any("${{" in step["run"] for step in STEPS)
    read = {re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value)[1] for value in AUDIT["env"].values()}
    assert read == {*ACTION["inputs"]} - {"install", "working-directory"}
    assert STEPS[0]["if"] == "${{ inputs.install == 'true' }}"
    assert AUDIT["working-directory"] == "${{ inputs.working-directory }}"


@pytest.mark.parametrize("source", NEEDED)
def test_what_is_given_is_what_the_command_gets(source, tmp_path):
    known = options(source)
    foreign = {"model": {"update", "dataset", "input-shape"}, "update": {"dataset", "count"}}
    left_out = foreign.get(source, {"update", "images", "input-shape"})
    given = {name: value for name, value in VALUES.items() if name not in left_out}
    done, words, noted = call(tmp_path, {**given, "args": "--seed\n3\n--device=cpu\n"})
    assert done.returncode == 0, done.stderr
    assert noted.read_text() == "exit-code=0\n"
    assert words[:2] == ["audit", source]
    assert not (tmp_path / "owned").exists()
    group = typer.main.get_command(app).commands["audit"]
    with group.make_context("audit", words[1:]) as context:
        _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        parsed = command.make_context(source, rest, parent=context).params
    assert {name for name in given if name.replace("-", "_") not in parsed} <= {"model"}
    for name, value in given.items():
        argument = "target" if name == source == "model" else name.replace("-", "_")
        found = parsed[argument]
        assert str(found[0] if isinstance(found, list | tuple) else found) == value, name
    assert (parsed["seed"], parsed["device"]) == (3, "cpu")
    assert {*parsed} == {parameter.name for parameter in known.values()}


@pytest.mark.parametrize(
    ("code", "undecided", "ends"), [(0, "fail", 0), (1, "pass", 1), (3, "pass", 3), (4, "fail", 4), (4, "pass", 0)]
)
def test_the_step_ends_as_the_audit_does(code, undecided, ends, tmp_path):
    done, words, noted = call(tmp_path, {"model": "my_model:build", "undecided": undecided}, code)
    assert words == ["audit", "model", "--", "my_model:build"]
    assert done.returncode == ends
    assert noted.read_text() == f"exit-code={code}\n"
    assert ("::warning::" in done.stdout) is (code != ends)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "expected model, update and model, or method and dataset"),
        ({"dataset": "faces"}, "expected model, update and model, or method and dataset"),
        ({"method": "fedavg"}, "expected model, update and model, or method and dataset"),
        ({"model": "my_model:build", "undecided": "maybe"}, "undecided: expected fail or pass, got maybe"),
    ],
)
def test_what_is_asked_for_wrongly_is_an_error(given, said, tmp_path):
    done, words, _ = call(tmp_path, given)
    assert done.returncode == 2
    assert f"::error::{said}" in done.stdout
    assert words is None


def test_it_installs_what_it_lies_beside():
    install = STEPS[0]["run"]
    assert '"$GITHUB_ACTION_PATH"' in install
    assert "https://download.pytorch.org/whl/cpu" in install
    assert "https://download.pytorch.org/whl/cpu" in (ROOT / "Makefile").read_text()


def test_the_workflow_of_the_page_gives_inputs_that_there_are():
    (block,) = BLOCK.findall((ROOT / "docs" / "how-to" / "use-in-ci.md").read_text())
    (job,) = yaml.safe_load(block)["jobs"].values()
    (ours,) = (step for step in job["steps"] if "hyperleak" in step.get("uses", ""))
    assert {*ours["with"]} <= {*ACTION["inputs"]}
    (upload,) = (step for step in job["steps"] if "upload-sarif" in step.get("uses", ""))
    assert upload["with"]["sarif_file"] == ours["with"]["sarif"]
    assert job["permissions"]["security-events"] == "write"
