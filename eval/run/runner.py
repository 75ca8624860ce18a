"""Run an experiment's cells: those that are not finished, each by itself, so that one that fails stops no other."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

from attacks.parallel import AttackPool
from attacks.search_control import SearchControl
from eval.io import jsonl
from eval.io.errors import RUN_ERRORS, describe_origin
from eval.metrics import self_verification
from eval.report.sections import partition_notes
from eval.run import attack_cell, partition_files, training_cell
from eval.run.attack_cell import AttackExecution
from eval.run.cache_keys import Cell, source_digest
from eval.run.observation import Observation
from eval.run.plan import AttackTask, CaptureTask, ObservationSpec, Plan, Source, TrainingTask, prepare
from eval.run.run_directory import FILES, LostLockError, RunDir
from eval.run.run_options import Failure, Options, Progress, silent
from eval.run.run_status import RunStatus
from eval.run.training_cell import OutOfTimeError, TrainingExecution
from fl.federation import Federation
from fl.runtime.main_guard import UnguardedError

__all__ = ["RUN_ERRORS", "Failure", "Options", "Progress", "prepare", "run", "silent"]
log = logging.getLogger(__name__)
SHARE_OF_TIME = 20
"""How many times as long as it takes to write how far a run is, is waited before it is written again."""


class RunStopped(KeyboardInterrupt):
    """Ctrl-C has ended a run.

    Attributes:
        failures: cells that could not be finished before.
    """

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__()
        self.failures = failures


def run(plan: Plan, folder: RunDir, options: Options | None = None, progress: Progress = silent) -> list[Failure]:
    """Compute the cells that are not finished; returns those that failed.

    Every number is a function of the experiment and the data alone (on one kind of device, and up to rounding of the
    libraries), whatever was finished before. The caller holds the folder's lock.

    Where `options.control` ends the run before it is done, cells are left: `unfinished_attacks` names them. What a
    search had found that was cut short is in a cell of its own (`eval.run.run_directory.RunDir.latest`), and the next
    run computes the whole.

    Raises:
        RunStopped: Ctrl-C, or an interrupt of `options.control`; what is finished stays.
    """
    options = options or Options()
    with closing(AttackPool(options.workers)) as spread:
        running = Run(plan, folder, options, progress, spread)
        try:
            return running.run()
        except KeyboardInterrupt as stop:
            running.write_status("running")  # what is finished by now, for the report of an audit that was stopped
            raise RunStopped([*running.failures.values()]) from stop


def unfinished_attacks(plan: Plan, folder: RunDir, failures: Sequence[Failure] = ()) -> dict[str, bool]:
    """Return by name a plan's attacks that are neither finished nor failed, nor on a training that failed.

    Returns:
        Whether there is something of each: it was cut short; else it has not begun.
    """
    failed = {failure.id for failure in failures}
    failed |= {
        task.cell.id for training in plan.trainings if training.cell.id in failed for task in training.attack_tasks
    }
    waiting = {
        name: cell
        for name, cell in plan.cells()
        if cell.settings["kind"] == "attack" and cell.id not in failed and not folder.finished(cell)
    }
    return {name: folder.latest(cell) is not None for name, cell in waiting.items()}


def warn_of_state(plan: Plan, folder: RunDir) -> None:
    """Log what is to be known before a run begins: of who holds which images, and of cells that are there already."""
    for note in partition_notes.shared_images([about for _, about in partition_files.distinct_partitions(plan)]):
        log.warning(note)
    done = {cell.id: cell for _, cell in plan.cells() if folder.finished(cell)}
    if stale := [cell for cell in done.values() if folder.about(cell)["code"] != source_digest()]:
        log.warning("%d finished cells are of other source code; remove cells/ to compute them again", len(stale))
    if older := [cell for cell in done.values() if FILES not in folder.about(cell)]:
        log.warning("%d finished cells are of an older version, which kept no digests: not checked", len(older))


@dataclass
class Run:
    """A run in progress, by the process that has its folder's lock; the parts of it that compute a cell serve others.

    Attributes:
        plan: of the run.
        folder: of the run.
        options: how it is done.
        progress: told how far it is.
        spread: processes for attacks.
        failures: cells that could not be finished, by id.
        left_out: ids of attacks that are of no use any more.
        cut_short: ids of attacks that a time limit or an interrupt ended.
    """

    plan: Plan
    folder: RunDir
    options: Options
    progress: Progress
    spread: AttackPool
    failures: dict[str, Failure] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    cut_short: set[str] = field(default_factory=set)
    _status_due: float = field(default=0.0, init=False)

    def run(self) -> list[Failure]:
        """Run all cells."""
        self.write_status("running")
        warn_of_state(self.plan, self.folder)
        for training in self.plan.trainings:
            self.run_training(training)
        for capture in self.plan.captures:
            self.run_capture(capture)
        left = [cell for _, cell in self.plan.cells() if self.is_open(cell)]
        self.write_status("failed" if self.failures else "cut short" if left else "finished")
        return list(self.failures.values())

    def write_status(self, status: str) -> None:
        """Write down what the run is and how far it is."""
        RunStatus(self.plan, self.folder, self.options, self.failures, self.left_out).write(status)

    def write_progress(self) -> None:
        """Write down how far the run is, where that was not done a moment ago."""
        began = time.monotonic()
        if began >= self._status_due:
            self.write_status("running")
            self._status_due = began + SHARE_OF_TIME * (time.monotonic() - began)

    @property
    def is_out_of_time(self) -> bool:
        """Whether nothing more is to begin."""
        return self.options.control.seconds_left == 0

    def is_open(self, cell: Cell) -> bool:
        """Return whether there is something to be done for a cell, as far as is known by now."""
        return not (cell.id in self.failures or cell.id in self.left_out or self.folder.finished(cell))

    def share_of_time(self, stage: str) -> SearchControl:
        """Return the control of the next search: an equal share of the time left, with those behind it."""
        parts = sum(cell.id not in self.cut_short for cell in self.open_searches())
        return self.options.control.share(parts, partial(self.options.on_search, stage))

    def open_searches(self) -> list[Cell]:
        """Return the cells that share the time left, each once; none where time is not limited."""
        if self.options.control.seconds_left == math.inf:
            return []
        attacks = [task.cell for task in self.plan.attacks if task.attack.item.is_controllable]
        cells = {cell.id: cell for cell in (*attacks, *(training.cell for training in self.plan.trainings))}
        return [cell for cell in cells.values() if self.is_open(cell)]

    def run_training(self, training: TrainingTask) -> None:
        """Run one training with its attacks."""
        if self.is_out_of_time:
            return
        tasks = [task for task in training.attack_tasks if self.is_pending(training, task)]
        if not self.folder.finished(training.cell):
            self.train(training, tasks)
        if not self.folder.finished(training.cell):
            return
        if tasks:
            self._attacks(training, tasks)
        self.drop_checkpoints(training)

    def train(self, training: TrainingTask, tasks: Sequence[AttackTask]) -> None:
        """Do the training itself, with checkpoints for the attacks `tasks`; it ends in a cell, or in a failure."""
        stage = f"{training.name}: training"
        with self._cell(training.cell, stage):
            count = ProgressCounter(
                self.progress if training.federation.rounds else silent, stage, training.federation.rounds
            )
            execution = TrainingExecution(
                watched=training.observed_rounds(tasks),
                checkpoint_seconds=self.options.checkpoint_seconds,
                workers=self.options.workers,
                tick=count.set,
                is_out_of_time=lambda: self.is_out_of_time,
                check_writable=partial(self.folder.check_writable, training.cell),
                on_checkpoint=partial(self.note_checkpoint, training.cell),
            )
            training_cell.train(
                training, self.folder.part(training.cell), self.folder.checkpoints(training.cell), execution
            )

    def note_checkpoint(self, cell: Cell) -> None:
        """Hear that what is done of a cell is kept."""

    def drop_checkpoints(self, training: TrainingTask) -> None:
        """Remove the states of a finished training that no attack needs any more, unless they are to stay."""
        if not self.options.keep_checkpoints:
            pending = training.observed_rounds(
                task for task in training.attack_tasks if self.is_pending(training, task)
            )
            self.folder.checkpoints(training.cell).keep(pending)

    def is_pending(self, source: Source, task: AttackTask) -> bool:
        """Return whether the attack is still to be run: not finished, nor of no more use."""
        if self.folder.finished(task.cell):
            return False
        if task.cell.id not in self.left_out and not self.options.needed(source, task):
            self.left_out.add(task.cell.id)
        return task.cell.id not in self.left_out

    def is_next(self, source: Source, task: AttackTask) -> bool:
        """Return whether the attack is to be run now: pending, not tried before in this run, and there is time left."""
        return not self.is_out_of_time and task.cell.id not in self.cut_short and self.is_pending(source, task)

    def run_capture(self, capture: CaptureTask) -> None:
        """Run the attacks on updates that are there already."""
        for task in capture.attack_tasks:
            if self.is_next(capture, task):
                self.attack(task, f"{capture.name}: {task.attack.label}", lambda: capture.observation)

    def _attacks(self, training: TrainingTask, tasks: list[AttackTask]) -> None:
        with training_cell.federation_of(training) as federation:
            for number in sorted({task.round for task in tasks}):
                observations: dict[ObservationSpec, Observation] = {}
                for task in (task for task in tasks if task.round == number):
                    if not self.is_next(training, task):  # by now: another label may stand for the same cell
                        continue
                    self.attack(
                        task,
                        attack_stage(training, task),
                        partial(self.observe, federation, training, task, observations),
                    )

    def attack(self, task: AttackTask, stage: str, observe: Callable[[], Observation]) -> None:
        """Run one attack on what is observed; it ends in a cell, or among the failures."""
        with self._cell(task.cell, stage):
            observation = observe()
            count = ProgressCounter(self.progress, stage, len(observation.updates))
            count.set(0)
            execution = self.attack_execution(task, count.advance, self.share_of_time(stage))
            with self.options.control.searching(task.attack.item.is_controllable):
                is_cut_short = attack_cell.run_attack_cell(
                    task,
                    observation,
                    self.plan.perceptual,
                    self.folder.part(task.cell),
                    execution,
                    self._settled(task),
                )
            # where one before it was cut short, there may be more to leave out
            if is_cut_short or any(before.cell.id in self.cut_short for before in task.after):
                self.cut_short.add(task.cell.id)
        if self.options.control.interrupted:
            raise KeyboardInterrupt

    def attack_execution(
        self, task: AttackTask, tick: Callable[[int], None], control: SearchControl
    ) -> AttackExecution:
        """Return tools and limits for one attack."""
        return AttackExecution(self.spread, tick, control)

    def _settled(self, task: AttackTask) -> dict[str | int, str]:
        """Return the updates where attacks before it leave nothing to find, and why."""
        found: dict[str | int, str] = {}
        for before in task.after:
            known = self.folder.latest(before.cell)
            if known is None:
                continue
            rows = jsonl.read_rows(self.folder.file(known, attack_cell.IMAGES))
            for key in self_verification.settled_updates(rows):
                found.setdefault(key, self_verification.not_needed_words([before.attack.label]))
        return found

    def observe(
        self,
        federation: Federation,
        training: TrainingTask,
        task: AttackTask,
        observations: dict[ObservationSpec, Observation],
    ) -> Observation:
        """Return what the server sees in the round of an attack task; several attacks share one observation."""
        spec = task.observation_spec
        if spec not in observations:
            earlier = []
            for number in task.history_rounds:
                self.train_to(federation, training, number)
                earlier.append(attack_cell.observe_targets(federation, training, spec).views)
            self.train_to(federation, training, task.round)
            observations[spec] = attack_cell.observe_targets(federation, training, spec, earlier)
        return observations[spec]

    def train_to(self, federation: Federation, training: TrainingTask, number: int) -> None:
        """Bring the federation to its state after `number` rounds."""
        if federation.server.round != number:
            count = ProgressCounter(self.progress, f"{training.name}: training again to round {number}", number)
            checkpoints = self.folder.checkpoints(training.cell)
            rows = jsonl.read_rows(self.folder.file(training.cell, training_cell.ROUNDS))
            training_cell.load(
                federation, training, checkpoints, number, rows, workers=self.options.workers, tick=count.set
            )

    @contextmanager
    def _cell(self, cell: Cell, name: str) -> Iterator[None]:
        """Finish a cell, or keep what went wrong and go on."""
        began = time.perf_counter()
        try:
            yield
            seconds = time.perf_counter() - began
            if cell.id in self.cut_short:
                self.folder.finish_cut_short(cell, seconds)
            else:
                self.folder.finish(cell, seconds)
                self.folder.forget_cut_short(cell)
        except OutOfTimeError:
            log.info("%s: out of time", name)
        except (UnguardedError, LostLockError):  # true of every other cell as well
            raise
        except RUN_ERRORS as error:
            self.folder.check_writable(cell)  # of a cell that another process has taken over this one has no say
            kept = self.folder.fail(cell, traceback.format_exc()).relative_to(self.folder.path)
            reason = f"{type(error).__name__}: {error}"
            self.note_failure(Failure(cell.id, name, reason, str(kept), describe_origin(error)))
            log.exception("%s failed", name)
        else:
            cut = ", cut short" if cell.id in self.cut_short else ""
            log.info("%s: %.1f s%s", name, time.perf_counter() - began, cut)
        self.write_progress()

    def note_failure(self, failure: Failure) -> None:
        """Take down a cell that could not be finished."""
        self.failures[failure.id] = failure


def attack_stage(training: TrainingTask, task: AttackTask) -> str:
    """Return what the progress calls an attack on a training."""
    several = len({other.round for other in training.attack_tasks}) > 1
    return f"{training.name}: {task.attack.label}" + (f" (round {task.round})" if several else "")


class ProgressCounter:
    """Reports how far a stage of the work is.

    Args:
        progress: who is told.
        stage: the stage.
        total: its parts.
    """

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self.progress, self.stage, self.total, self.done = progress, stage, total, 0

    def set(self, done: int) -> None:
        """Set how many parts are done."""
        self.done = done
        self.progress(self.stage, done, self.total)

    def advance(self, count: int) -> None:
        """Count more parts as done."""
        self.set(self.done + count)
