"""`hyperleak audit` of a model of one's own: attacks that fail, progress, images that do not fit, labels."""

import json
import re

import pytest
import torch
from support.tiny import Registered
from typer.testing import CliRunner

from eval import cli, terminal

MODULE = """
import torch

def grey():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 3))

def whole():
    return grey(), torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])
"""
METHOD = ("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--count", 1)


@pytest.fixture
def mine(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    with Registered(), torch.random.fork_rng():
        yield name


def audit(*words: object):
    return CliRunner().invoke(cli.app, ["audit", *map(str, words), "--device", "cpu"])


CRASHING = ("--attack", "{name: crash, fault: true}", "--attack", "guess")


@pytest.mark.parametrize("own", [True, False])
def test_what_other_attacks_found_is_kept_where_one_fails(mine, tmp_path, own):
    words = ((f"{mine}:whole",) if own else METHOD) + CRASHING
    result = audit(*words)
    assert result.exit_code == terminal.FAILURE, result.output
    assert "\nguess: " in result.stdout
    assert "image 0: PSNR" in result.stdout
    assert "\ncrash: failed: RuntimeError: expected the sky to hold, got rain\n" in result.stdout
    hint = "error: crash failed: RuntimeError: expected the sky to hold, got rain (--out FOLDER keeps the traceback)"
    assert hint in result.stderr
    kept = audit(*words, "--json", "--max-psnr", 1, "--out", tmp_path / "kept")
    assert kept.exit_code == terminal.LEAKED, kept.output  # what leaked counts for more
    found = {finding["attack"]: finding for finding in json.loads(kept.stdout)["findings"]}
    assert found["guess"]["failed"] is None
    assert found["guess"]["images"]
    assert found["crash"]["failed"] == "RuntimeError: expected the sky to hold, got rain"
    where = tmp_path / found["crash"]["traceback"]
    assert where.read_text().rstrip().endswith("RuntimeError: expected the sky to hold, got rain")
    assert f"(the traceback is in {where})" in kept.stderr


def test_an_attack_that_fails_keeps_no_limit(mine):
    assert audit(f"{mine}:whole", *CRASHING, "--max-psnr", 60).exit_code == terminal.FAILURE
    assert audit(f"{mine}:whole", "--attack", "guess", "--max-psnr", 60).exit_code == 0


def test_an_audit_tells_on_stderr_how_far_it_is(mine):
    words = (f"{mine}:whole", "--attack", "guess", "--batch-size", 2)
    for more in ((), ("--json",)):
        result = audit(*words, *more)
        first, last = result.stderr.splitlines()
        assert first == "guess: images (0/4)"
        assert re.fullmatch(r"guess: images \(4/4\), [0-9.]+ s", last)
        assert "images (" not in result.stdout
