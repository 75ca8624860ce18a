"""The caller of a run that is computed by workers: starts them, shows how far they are, and replaces those that die."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.experiment import yaml_config
from eval.experiment.spec import Experiment
from eval.io.errors import RUN_ERRORS
from eval.run.cache_keys import source_digest
from eval.run.executors import Executor, Future, open_executor
from eval.run.executors.choice import ExecutorChoice, visible_gpus
from eval.run.members import CALLER, HEARTBEAT_SECONDS, SHARED, WORKER, Member
from eval.run.plan import Plan
from eval.run.run_directory import RunDir
from eval.run.run_options import Failure, Options, Progress, silent
from eval.run.run_status import RunStatus
from eval.run.runner import RunStopped, warn_of_state
from eval.run.shared import notes
from eval.run.shared.job import DEATH, DONE, REFUSAL, WorkerJob, caller_variables, run_worker
from eval.run.shared.progress import ProgressReader, RunPace

log = logging.getLogger(__name__)
POLL_SECONDS = 0.25
SHARE_OF_TIME = 20
"""The least that the pause between two looks at the folder is to a look: of thousands of cells that takes a while."""
MOST_REPLACED = 3
"""Workers that are replaced without that anything gets done meanwhile, for each that was asked for."""
STOP_SECONDS = 20.0
"""Seconds at most until workers that were told to leave are waited for no longer."""


class WorkersError(ValueError):
    """Workers can't compute the run; the text says why."""


def run(
    plan: Plan, folder: RunDir, options: Options, choice: ExecutorChoice, progress: Progress = silent
) -> list[Failure]:
    """Compute the cells that are not finished by workers; returns those that failed.

    The numbers are those of `eval.run.runner.run`. The caller has entered `folder.shared()`.

    Raises:
        RunStopped: Ctrl-C; the workers are told to leave, and what is finished stays.
        WorkersError: no worker can compute the run.
        ValueError: an executor or option that there is not.
    """
    count, caller = choice.count(plan.device_kind), folder.member
    if caller is None:
        raise RuntimeError("the folder is not shared")
    if not any(one.is_alive and one.name != caller.name for one in caller.members.states()):
        notes.forget(folder.path)  # what failed in a run before is tried again
    shared = _SharedWork(plan, folder, options, progress, caller, choice.name, count)
    try:
        shared.write_status("running")
        warn_of_state(plan, folder)
        if shared.open_cells():
            with_executor(shared, choice, count, folder.path / SHARED)
        shared.refresh()
        left = shared.open_cells()
        shared.write_status("failed" if shared.failures else "cut short" if left else "finished")
        return [*shared.failures.values()]
    except KeyboardInterrupt as stop:
        raise RunStopped([*notes.failures(folder.path).values()]) from stop
    except ValueError:  # no worker can compute it, say
        shared.write_status("failed")
        raise


def with_executor(shared: _SharedWork, choice: ExecutorChoice, count: int, place: Path) -> None:
    """Open the executor, have its workers do everything, and close it."""
    executor = open_executor(choice.name, choice.options, workers=count, device=shared.plan.device_kind, folder=place)
    try:
        shared.compute(executor)
    finally:
        shared.dismiss()
        executor.close()
        shared.repeat_logs()


@dataclass
class _Slot:
    """A place for one worker at a time.

    Attributes:
        number: from 0 on; of its GPU as well, where they are given out by number.
        worker: what the present one is called.
        future: what comes of it.
    """

    number: int
    worker: str
    future: Future


@dataclass
class _SharedWork:
    """A run that is computed by workers.

    Attributes:
        plan: of the run.
        folder: of the run.
        options: how it is done.
        progress: told how far it is.
        caller: this process as a member.
        engine: name of the executor.
        workers: how many.
        failures: cells that failed, by id.
    """

    plan: Plan
    folder: RunDir
    options: Options
    progress: Progress
    caller: Member
    engine: str
    workers: int
    failures: dict[str, Failure] = field(default_factory=dict)
    slots: list[_Slot] = field(default_factory=list)
    started: int = 0
    replaced: int = 0
    finished: int = 0
    parts_done: int = 0

    def __post_init__(self) -> None:
        self.reader = ProgressReader(self.progress, self.options.on_search)
        self.pace = RunPace(self.options.on_run)
        self.logs = notes.LogReader(self.folder.path)
        self._status = RunStatus(self.plan, self.folder, self.options, self.failures)

    def write_status(self, status: str) -> None:
        """Write down what the run is and how far it is."""
        self._status.write(status)

    def open_cells(self) -> list[str]:
        """Return the cells that can still be computed, by id."""
        cut_short = notes.ids_cut_short(self.folder.path)
        found = []
        for training in self.plan.trainings:
            attacks = [task.cell for task in training.attack_tasks] if training.cell.id not in self.failures else []
            for cell in (training.cell, *attacks):
                if not (cell.id in self.failures or cell.id in cut_short or self.folder.finished(cell)):
                    found.append(cell.id)
        return found

    def compute(self, executor: Executor) -> None:
        """Start workers, and wait until all is done, replacing those that die.

        Raises:
            WorkersError: none can compute the run, or they die without that anything gets done.
        """
        job = self._job()
        gpus = visible_gpus() if self.plan.device_kind == "cuda" and not executor.gives_gpus else []
        with executor.together():
            for number in range(min(self.workers, len(self.open_cells()))):
                self.slots.append(self._start(executor, job, number, gpus))
        beaten = time.monotonic()
        cost = 0.0
        while self.slots or self._others_at_work():
            time.sleep(max(POLL_SECONDS, SHARE_OF_TIME * cost))
            if time.monotonic() - beaten > HEARTBEAT_SECONDS:
                self.caller.beat()
                beaten = time.monotonic()
            began = time.monotonic()
            self.refresh()
            cost = time.monotonic() - began
            for slot in [slot for slot in self.slots if slot.future.done()]:
                self.slots.remove(slot)
                if self._ended_early(slot) and self.open_cells() and not self._is_out_of_time:
                    self.slots.append(self._start(executor, job, slot.number, gpus))

    @property
    def _is_out_of_time(self) -> bool:
        return self.options.control.seconds_left == 0

    def _others_at_work(self) -> bool:
        """Return whether workers of another caller are at what is left of this run."""
        others = (one for one in self.caller.members.states() if one.kind == WORKER and one.is_alive)
        return any(others) and bool(self.open_cells()) and not self._is_out_of_time

    def refresh(self) -> None:
        """Take in what workers have told, done and noted."""
        states = self.caller.members.states()
        self.reader.read(states)
        self.repeat_logs()
        self.failures.update(notes.failures(self.folder.path))
        done = sum(self.folder.finished(cell) for _, cell in self.plan.cells())
        if done != self.finished:
            self.finished = done
            self.write_status("running")
        if (parts := done + self.reader.parts_done) > self.parts_done:
            self.parts_done, self.replaced = parts, 0
        at_work = sum(state.is_alive and state.kind == WORKER for state in states)
        self.pace.tell(self.folder.about_run, at_work)

    def repeat_logs(self) -> None:
        """Log what workers have logged, but for those of another caller that is there: it does so itself."""
        others = (one for one in self.caller.members.states() if one.kind == CALLER and one.is_alive)
        self.logs.repeat({_own_part(one.name) for one in others if one.name != self.caller.name})

    def dismiss(self) -> None:
        """Have all workers of this caller leave, and wait until they have."""
        for slot in self.slots:
            self.caller.members.declare_gone(slot.worker)
            slot.future.cancel()
        waited = time.monotonic() + STOP_SECONDS
        while any(not slot.future.done() for slot in self.slots) and time.monotonic() < waited:
            time.sleep(POLL_SECONDS)
        self.slots.clear()

    def _ended_early(self, slot: _Slot) -> bool:
        """Return whether a worker has ended before the work was done, and another is to take its place.

        Raises:
            WorkersError: another would fare no better.
        """
        try:
            how, why = slot.future.result()
        except RUN_ERRORS as error:
            how, why = DEATH, f"{type(error).__name__}: {error}"
        self.caller.members.declare_gone(slot.worker)
        if how == REFUSAL:
            raise WorkersError(f"worker {slot.worker} can't compute this run: {why}")
        if how == DONE:
            return False
        if how == DEATH:
            log.warning("worker %s has died (%s); what it had claimed is free for others", slot.worker, why)
        self.replaced += 1
        if self.replaced > MOST_REPLACED * self.workers:
            raise WorkersError(f"{self.replaced} workers ended one after the other and got nothing done: {why or how}")
        return True

    def _start(self, executor: Executor, job: Mapping[str, Any], number: int, gpus: Sequence[str]) -> _Slot:
        self.started += 1
        worker = f"{self.engine}-{self.started:02d}-{_own_part(self.caller.name)}"
        gpu = gpus[number % len(gpus)] if gpus else None
        return _Slot(number, worker, executor.submit(run_worker, {**job, "worker": worker, "gpu": gpu}))

    def _job(self) -> dict[str, Any]:
        """Return what every worker is given, but for its name and GPU.

        Raises:
            ValueError: an experiment that can't be written as YAML.
        """
        experiment = self.plan.experiment
        if not isinstance(experiment, Experiment):
            raise ValueError("audits are not computed by workers of an executor; use --workers")
        left = self.options.control.seconds_left
        job = WorkerJob(
            folder=str(self.folder.path.resolve()),
            worker="",
            caller=self.caller.name,
            experiment=yaml_config.dump(experiment),
            cells=[cell.id for _, cell in self.plan.cells()],
            code=source_digest(),
            device=self.plan.device_kind,
            workers=self.workers,
            gpu=None,
            checkpoint_seconds=self.options.checkpoint_seconds,
            keep_checkpoints=self.options.keep_checkpoints,
            deadline=None if left == float("inf") else self.caller.members.now() + left,
            current_folder=str(Path.cwd()),
            module_folders=[str(Path(place).resolve()) for place in sys.path if place],
            imports=_imported_files(experiment),
            variables=caller_variables(),
        )
        return job.plain()


def _own_part(caller: str) -> str:
    """Return what tells a caller from others, and is in the names of its workers."""
    return caller.rpartition("-")[2]


def _imported_files(experiment: Experiment) -> list[str]:
    """Return the files of modules that the experiment imports by file."""
    names = [Path(word).stem for word in experiment.imports if word.endswith(".py")]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return [str(Path(file).resolve()) for file in files if file]
