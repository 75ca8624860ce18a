"""Runs by several workers in threads of this process, so that a test needs no processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eval.experiment.spec import Experiment
from eval.run import runner
from eval.run.execute import RunOutcome, run_and_publish
from eval.run.executors.choice import ExecutorChoice
from eval.run.run_directory import RunDir
from eval.run.shared import caller, worker
from eval.run.shared.job import WorkerJob

Turn = Callable[[Mapping[str, Any]], tuple[str, str]]


def in_threads(monkeypatch: pytest.MonkeyPatch, turn: Turn | None = None) -> list[str]:
    """Have workers be threads; returns the list of their names, as they start.

    Args:
        monkeypatch: of the test.
        turn: what a worker does, given its job; by default its work.
    """
    started: list[str] = []

    def run_worker(job: Mapping[str, Any]) -> tuple[str, str]:
        started.append(job["worker"])
        return (turn or do)(job)

    monkeypatch.setattr(caller, "run_worker", run_worker)
    monkeypatch.setattr(caller, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(worker, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(worker, "log_to", lambda handler: nullcontext())  # the caller's log hears it
    return started


def do(job: Mapping[str, Any]) -> tuple[str, str]:
    """What a worker does."""
    return worker.work(WorkerJob(**job)), ""


class Killed(BaseException):
    """Stands for a SIGKILL: nothing is given up, and nobody else hears of it."""


def plan_and_run(
    experiment: Experiment, path: Path, workers: int | None, progress: runner.Progress = runner.silent, **settings: Any
) -> RunOutcome:
    """Run an experiment by so many workers; None is by this process alone."""
    folder = RunDir(path)
    choice = None if workers is None else ExecutorChoice(name="local", workers=workers)
    plan = runner.prepare(experiment, device="cpu")
    options = runner.Options(executor=choice, **settings)
    with folder.shared() if choice else folder.locked(), folder.logged():
        return run_and_publish(plan, folder, options, progress, with_report=False)
