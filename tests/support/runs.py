"""Runs of the tiny experiment, without the command line."""

from __future__ import annotations

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from support.tiny import CONFIG

from eval.experiment import yaml_config
from eval.experiment.spec import Experiment
from eval.io import yaml12
from eval.run import results, runner
from eval.run.run_directory import RunDir


def tiny(*overrides: str, sweep: dict[str, Any] | None = None) -> Experiment:
    """The tiny experiment, changed as `--set` does it, then spread."""
    data = yaml12.parse(CONFIG)
    found = yaml_config.read(data)
    for text in overrides:
        found = yaml_config.override(found, text)
    return yaml_config.read({**yaml_config.to_plain(found), "sweep": sweep or {}})


def run(experiment: Experiment, path: Path, **settings: Any) -> list[dict[str, Any]]:
    """Run an experiment in a folder; returns the rows of `images.jsonl`. A cell that fails is an error."""
    progress, device = settings.pop("progress", runner.silent), settings.pop("device", "cpu")
    folder = RunDir(path)
    with folder.locked():
        plan = runner.prepare(experiment, device=device)
        failures = runner.run(plan, folder, runner.Options(**settings), progress)
        assert not failures, failures
        return results.assemble(plan, folder)


@cache
def _computed(overrides: tuple[str, ...]) -> Path:
    place = Path(mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    run(tiny(*overrides), place / "run")
    return place / "run"


def finished(path: Path, *overrides: str) -> None:
    """Put a finished run of the tiny experiment there, computed once a process: for tests of what comes after it."""
    shutil.copytree(_computed(overrides), path)


def reader_files(path: Path) -> tuple[list[bytes], list[str]]:
    """The files for readers that must not depend on how the run went, and the names of its pictures."""
    files = [(path / name).read_bytes() for name in ("images.jsonl", "config.yaml")]
    return files, sorted(picture.name for picture in (path / "images").iterdir())


def unstated(path: Path) -> None:
    """Make a finished cell one of a version that kept no digests of its files."""
    about = json.loads((path / "cell.json").read_text())
    (path / "cell.json").write_text(json.dumps({key: about[key] for key in ("settings", "code", "seconds")}))
