"""`hyperleak audit` in this process, of a module that the test writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eval import cli

PERCEPTRON = """
import torch

def build():
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 3))
    for p in model.parameters():
        p.data = torch.rand(p.shape, generator=generator) - 0.5
    return model
"""
"""The source of a small network's function."""


def audit(*words: object) -> Result:
    """What the command says of these words, on the CPU."""
    return CliRunner().invoke(cli.app, ["audit", *map(str, words), "--device", "cpu"])


def written(monkeypatch: pytest.MonkeyPatch, folder: Path, stem: str, source: str) -> str:
    """The name of a module of this source in the folder, which is the working directory and on the path from now on.

    Modules of two tests have two names, since an imported one stays.
    """
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    name = f"{stem}_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(source)
    return name
