"""`hyperleak audit --out` : the folder is of one audit, and what Ctrl-C leaves of one."""

import json
import subprocess
import sys

import pytest
import torch
from support.audit_command import audit, written
from support.tiny import CONFIG, Crash, Refuse, Registered

from eval.commands import terminal

MODULE = """
import torch

def whole():
    torch.manual_seed(0)
    layers = torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 3)
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return torch.nn.Sequential(*layers), images, torch.tensor([0, 1, 2, 0])

def other():
    return whole()
"""


@pytest.fixture
def mine(monkeypatch, tmp_path):
    name = written(monkeypatch, tmp_path, "kept", MODULE)
    with Registered(), torch.random.fork_rng():
        yield name


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder, said, *words, code=terminal.USAGE):
    before = files(folder)
    result = audit(*words, "--out", folder)
    assert result.exit_code == code, result.output
    assert said in result.output
    assert result.output.count("\n") == 1
    assert "choose another --out" in result.output
    assert files(folder) == before


def test_the_folder_of_another_audit_is_refused(mine, tmp_path):
    words, folder = (f"{mine}:whole", "--attack", "guess"), tmp_path / "kept"
    folder.mkdir()
    assert audit(*words, "--out", folder).exit_code == 0  # an empty one is taken
    again = audit(*words, "--out", folder)
    assert again.exit_code == 0, again.output
    refused(folder, f"{folder} holds another run (Audit of {mine}:whole", f"{mine}:other", *words[1:])
    refused(folder, "an audit of the same with other settings, weights or images", *words, "--seed", 1)
    refused(folder, "holds another run (Audit of", "--method", "fedavg", "--dataset", "faces", "--attack", "guess")


def test_a_folder_of_something_else_is_refused(mine, tmp_path):
    words, folder = (f"{mine}:whole", "--attack", "guess"), tmp_path / "theirs"
    folder.mkdir()
    (folder / "guess.png").write_text("a stranger's")
    refused(folder, f"{folder} holds something other than results of hyperleak", *words)
    (folder / "run.json").write_text(json.dumps({"title": CONFIG.splitlines()[1]}))
    refused(folder, f"{folder} holds another run (title: A tiny experiment), not this audit", *words)


def test_a_folder_tells_nothing_of_the_machine(mine, tmp_path):
    model, *_ = __import__(mine).whole()
    torch.save({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, tmp_path / "update.pt")
    words = ("--update", tmp_path / "update.pt", "--model", f"{mine}:whole", "--attack", "guess")
    audit(*words, "--out", tmp_path / "kept")
    for name in ("config.yaml", "audit.json", "env.json", "images.jsonl", "report.md"):
        assert str(tmp_path) not in (tmp_path / "kept" / name).read_text()


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_leaves_what_was_found_before(mine, monkeypatch, as_json):
    monkeypatch.setattr(Crash, "attack_view", pressed)
    words = (f"{mine}:whole", "--attack", "guess", "--attack", "crash", "--attack", "{name: guess, spread: 0.2}")
    result = audit(*words, *(["--json"] if as_json else []), "--max-psnr", 1)
    assert result.exit_code == terminal.STOPPED
    assert result.stderr.splitlines()[-1].startswith("stopped at crash; what was found before it stands above")
    if as_json:
        found = json.loads(result.stdout)
        assert [finding["attack"] for finding in found["findings"]] == ["guess"]
        assert found["stopped"] == "crash"
    else:
        assert "\nguess: " in result.stdout
        assert "image 3: PSNR" in result.stdout


def test_ctrl_c_on_a_method_is_said_and_the_same_command_goes_on(mine, monkeypatch, tmp_path):
    words = ("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--count", 2)
    words += ("--attack", "guess", "--attack", "refuse")
    monkeypatch.setattr(Refuse, "attack_view", pressed)
    result = audit(*words, "--out", tmp_path / "kept")
    assert result.exit_code == terminal.STOPPED
    assert result.stderr.splitlines()[-1] == (
        "stopped at refuse; what was found before it stands above; the same command goes on from here "
        f"({tmp_path / 'kept'})"
    )
    unkept = audit(*words)
    assert unkept.exit_code == terminal.STOPPED
    assert unkept.stderr.endswith("it stands above; nothing is kept without --out FOLDER\n")
    monkeypatch.undo()
    again = audit(*words, "--out", tmp_path / "kept")
    assert again.exit_code == 0, again.output
    assert "fedavg: guess (" not in again.output  # it was finished
    assert "fedavg: refuse (" in again.output


def pressed(*_):
    raise KeyboardInterrupt


def test_two_audits_do_not_write_to_one_folder(mine, tmp_path):
    words, folder = (f"{mine}:whole", "--attack", "guess"), tmp_path / "kept"
    folder.mkdir()
    holding = (
        "import sys; from pathlib import Path; from eval.run.run_directory import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holding, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        refused(folder, f"{folder} is in use by another process", *words, code=terminal.FAILURE)
    finally:
        other.communicate()
    assert audit(*words, "--out", folder).exit_code == 0  # its lock file is no stranger's
