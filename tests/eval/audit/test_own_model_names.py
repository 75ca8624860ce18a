"""How people name a model of their own on the command line, and what they are told where it is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.audit_command import PERCEPTRON, audit, written

from eval.commands import terminal

SOURCE = (
    PERCEPTRON
    + """
import sys

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

def of_class():
    return Net

def leaves():
    sys.exit(3)

def chatty():
    print("built")
    model = build()
    model.register_forward_hook(lambda *_: print("ran"))
    return model
"""
)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    np.savez(tmp_path / "true.npz", images=np.full((1, 8, 8), 90, np.uint8), labels=np.array([1]))
    return written(monkeypatch, tmp_path, "own_names", SOURCE)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{0}:Net", "it is called without arguments: name a function of your own that gives them"),
        ("{0}:Net(8)", "it is called without arguments: write a function that returns Net(8)"),
        ("{0}:of_class", "got type; the class is to be called: return Net(...)"),
        ("{0}:leaves", "raised SystemExit: 3"),
        ("{0}.build", "did you mean '{0}:build'?"),
        ("{0}.py", "name the function in it as well"),
        ("weights.pt", "a file of weights is no network: name a function that builds it and loads them"),
        ("/there/{0}.py:build", "give the file by --import /there/{0}.py and name '{0}:build'"),
    ],
)
def test_what_names_no_model_is_answered_with_what_does(mine: str, name: str, said: str) -> None:
    """A function that leaves is an error, not the code that it leaves with: 3 would say that an image leaked."""
    found = audit(name.format(mine), "--images", "true.npz", "--attack", "analytic")
    assert found.exit_code == terminal.USAGE, found.output
    assert said.format(mine) in " ".join(found.output.split())


def test_what_a_model_prints_is_no_part_of_what_was_found(mine: str) -> None:
    words = ("--images", "true.npz", "--attack", "analytic", "--workers", "1")
    found = audit(f"{mine}:chatty", *words, "--json")
    assert json.loads(found.stdout)["findings"]
    assert "built" in found.stderr
    assert "ran" in found.stderr


def test_what_worker_processes_print_goes_to_stderr_where_stdout_is_for_findings(tmp_path: Path) -> None:
    script = """
import os, sys
from contextlib import redirect_stdout
from fl.runtime.workers import Workers

def chatty():
    print("printed", flush=True)
    os.write(1, b"written")

if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        workers = Workers(1)
        workers.result(workers.submit(chatty))
        workers.close()
    print("found")
"""
    path = tmp_path / "chatty_workers.py"
    path.write_text(script)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, env=env)
    assert found.stdout == "found\n"
    assert "printed" in found.stderr
    assert "written" in found.stderr
