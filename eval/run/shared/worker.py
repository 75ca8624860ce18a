"""A worker: takes cells of a run that nobody else has, until none is left. `python -m` it with a job on stdin.

It plans the experiment as its caller did, and refuses if that comes to other cells. Then it looks for a training to
do, goes on with the attacks on it, takes attacks on what others have trained, and helps with attacks on many updates.
What it finishes takes its place by one renaming, as in a run by a single process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from attacks.parallel import AttackPool
from attacks.search_control import SearchControl
from eval.experiment import yaml_config
from eval.io import yaml12
from eval.io.errors import RUN_ERRORS
from eval.run import training_cell
from eval.run.attack_cell import AttackedUpdates, AttackExecution
from eval.run.attack_checkpoint import AttackCheckpoint
from eval.run.cache_keys import Cell, source_digest
from eval.run.claims import MOST_DEATHS, Claims, LostClaimError
from eval.run.lpips_columns import with_cells
from eval.run.members import HEARTBEAT_SECONDS, WORKER, GoneError, Member, Members
from eval.run.observation import Observation
from eval.run.plan import AttackTask, ObservationSpec, Plan, TrainingTask, prepare
from eval.run.resources import choose_workers
from eval.run.run_directory import CHECKPOINT, LOG, LostLockError, RunDir, log_to
from eval.run.run_options import Failure, Options
from eval.run.runner import Run, attack_stage
from eval.run.shared import notes, portions
from eval.run.shared.job import AT_PARENTS_END, DONE, ENDS, REFUSAL, STOPPED, WorkerJob, leave_with_parent
from eval.run.shared.portions import PortionWork, SharedAttackExecution
from eval.run.shared.progress import ToldProgress
from fl.federation import Federation

log = logging.getLogger(__name__)
CODES = {end: code for code, end in ENDS.items()}
WAIT_SECONDS, MOST_WAIT_SECONDS = 0.25, 2.0
"""Seconds before a worker that found nothing to do looks again, at first and at most."""
LOOK_SECONDS = 1.0
"""Seconds between two looks whether this worker is to leave."""


class RefusedError(Exception):
    """This worker can't compute the cells of its caller."""


@dataclass
class SharedRun(Run):
    """What one worker does of a run.

    Attributes:
        claims: of this worker.
        workers: how many there are.
        unfit: attacks that it can't help with.
        pause: waits for so many seconds.
        seen_finished: ids of cells that were finished when it looked: not looked at again before it leaves.
    """

    claims: Claims = field(kw_only=True)
    workers: int = field(kw_only=True)
    unfit: set[str] = field(default_factory=set, kw_only=True)
    pause: Callable[[float], None] = field(default=time.sleep, kw_only=True)
    seen_finished: set[str] = field(default_factory=set, init=False)

    def run(self) -> list[Failure]:
        """Compute what nobody else does until nothing is left, or the time is over; returns all that failed."""
        wait = WAIT_SECONDS
        while not self.is_out_of_time and self._has_open():
            if self._take_one() or self._help():
                wait = WAIT_SECONDS
            else:
                self.pause(wait)
                wait = min(2 * wait, MOST_WAIT_SECONDS)
        return [*self.failures.values()]

    def write_status(self, status: str) -> None:
        """Leave what is known of the run to its caller."""

    def note_failure(self, failure: Failure) -> None:
        """Take down a cell that could not be finished, for all workers."""
        super().note_failure(failure)
        notes.note_failure(self.folder.path, failure)

    def note_checkpoint(self, cell: Cell) -> None:
        """Have the deaths of workers that had this cell before count no more."""
        self.claims.progress(cell.id)

    def share_of_time(self, stage: str) -> SearchControl:
        """Return the control of the next search: as many works go on at a time as there are workers."""
        parts = -(-len(self.open_searches()) // self.workers)
        return self.options.control.share(parts, partial(self.options.on_search, stage))

    def attack_execution(
        self, task: AttackTask, tick: Callable[[int], None], control: SearchControl
    ) -> AttackExecution:
        """Return tools and limits for one attack, which others may help with."""
        return SharedAttackExecution(
            self.spread,
            tick,
            control,
            cell=task.cell.id,
            claims=self.claims,
            folder=self.folder.path,
            patience=portions.PATIENCE_SECONDS,
        )

    def is_open(self, cell: Cell) -> bool:
        """Return whether there is something to be done for a cell, as far as is known by now."""
        return not (cell.id in self.failures or cell.id in self.cut_short or self._is_finished(cell))

    def federation_of(self, training: TrainingTask) -> AbstractContextManager[Federation]:
        """Yield the federation of a training before its first round."""
        return training_cell.federation_of(training)

    def _is_finished(self, cell: Cell) -> bool:
        """Return whether a cell is finished, or was when this worker last looked.

        A look takes a few calls of the file system; one at every cell before each that is computed would come to
        seconds, of thousands of cells.
        """
        if cell.id not in self.seen_finished and self.folder.finished(cell):
            self.seen_finished.add(cell.id)
        return cell.id in self.seen_finished

    def _has_open(self) -> bool:
        """Return whether something is not finished, whoever may be at it."""
        if self._finds_open():
            return True
        self.seen_finished.clear()  # one may have been damaged since
        return self._finds_open()

    def _finds_open(self) -> bool:
        self._hear()
        for training in self.plan.trainings:
            if self._is_to_do(training.cell, f"{training.name}: training"):
                return True
            attacks = training.attack_tasks if self._is_finished(training.cell) else ()
            if any(self._is_to_do(task.cell, attack_stage(training, task)) for task in attacks):
                return True
        return False

    def _hear(self) -> None:
        """Take in what other workers have noted."""
        self.failures |= notes.failures(self.folder.path)
        self.cut_short |= notes.ids_cut_short(self.folder.path)

    def _is_to_do(self, cell: Cell, name: str) -> bool:
        """Return whether a cell is open; one at which too many workers have died is noted as failed."""
        if self.is_open(cell) and self.claims.is_exhausted(cell.id):
            self._give_up(cell, name, "it")
        return self.is_open(cell)

    def _give_up(self, cell: Cell, name: str, what: str) -> None:
        """Note a cell as failed for which too many workers have died."""
        reason = f"{MOST_DEATHS} workers died while they computed {what}, perhaps for want of memory"
        self.note_failure(Failure(cell.id, name, reason, LOG))

    def _take_one(self) -> bool:
        """Compute something that nobody else does; returns whether there was something."""
        for training in self.plan.trainings:
            if self._take_training(training):
                self._take_attacks(training)
                return True
        return any(
            self._is_finished(training.cell) and self._take_attacks(training) for training in self.plan.trainings
        )

    def _take_training(self, training: TrainingTask) -> bool:
        with self._claimed(training.cell) as is_mine:
            if is_mine:
                self.train(training, [task for task in training.attack_tasks if self.is_open(task.cell)])
        return is_mine

    def _take_attacks(self, training: TrainingTask) -> bool:
        """Run the attacks on a finished training that nobody else runs; returns whether there were any."""
        did, observations, number = False, dict[ObservationSpec, Observation](), -1
        if not self._is_finished(training.cell):
            return False
        with ExitStack() as stack:
            federation: Federation | None = None
            for task in training.attack_tasks:
                if self.is_out_of_time or not self._has_states(training, task):
                    continue
                with self._claimed(task.cell) as is_mine:
                    if not is_mine:
                        continue
                    if federation is None:
                        federation = stack.enter_context(self.federation_of(training))
                    if task.round != number:
                        number, observations = task.round, {}
                    self.attack(
                        task,
                        attack_stage(training, task),
                        partial(self.observe, federation, training, task, observations),
                    )
                    did = True
                if task.cell.id in self.cut_short:
                    notes.note_cut_short(self.folder.path, task.cell.id)
        if did:
            with suppress(FileNotFoundError):  # another worker removes the same ones
                self.drop_checkpoints(training)
        return did

    @contextmanager
    def _claimed(self, cell: Cell) -> Iterator[bool]:
        """Claim a cell while the block runs; yields whether it is this worker's to compute."""
        is_mine = is_claimed = self.is_open(cell) and self.claims.take(cell.id)
        if is_mine:  # it may have ended since this worker last looked
            self._hear()
            is_mine = self.is_open(cell)
        try:
            yield is_mine
        except LostClaimError as error:
            log.warning("%s", error)
            self.claims.member.check()
        finally:
            if is_claimed:
                (self.claims.finish if self.folder.finished(cell) else self.claims.release)(cell.id)

    def _has_states(self, training: TrainingTask, task: AttackTask) -> bool:
        """Return whether the states that an attack looks at are there; makes them again where nobody else does."""
        if not self.is_open(task.cell) or not self.missing_rounds(training, task):
            return True
        name = f"{training.cell.id}+states"
        if not self.claims.take(name):
            if self.claims.is_exhausted(name):  # nobody will, and whoever waits for it would wait for ever
                self._give_up(task.cell, attack_stage(training, task), "the state that it looks at")
            return False
        try:
            with self.federation_of(training) as federation:
                for number in self.missing_rounds(training, task):
                    self.train_to(federation, training, number)
        except RUN_ERRORS:
            log.exception("%s: its state can't be made again", training.name)  # the attack meets the same, and says so
        finally:
            self.claims.release(name)
        return True

    def missing_rounds(self, training: TrainingTask, task: AttackTask) -> list[int]:
        """Return the rounds that an attack looks at whose state is not stored; that before the first needs none."""
        known = self.folder.checkpoints(training.cell).rounds()
        return [number for number in (*task.history_rounds, task.round) if number and number not in known]

    def _help(self) -> bool:
        """Help with an attack on many updates that another worker has claimed; returns whether there was one."""
        for training in self.plan.trainings:
            for task in training.attack_tasks:
                free = portions.has_free_portion(self.folder.path, task.cell.id, self.claims)
                if (
                    free
                    and task.cell.id not in self.unfit | {*self.failures}
                    and not self.missing_rounds(training, task)
                ):
                    try:
                        return self._help_with(training, task) > 0
                    except LostClaimError as error:
                        log.warning("%s", error)
                        self.claims.member.check()
                        return True
        return False

    def _help_with(self, training: TrainingTask, task: AttackTask) -> int:
        stage = attack_stage(training, task)
        path = portions.opened_path(self.folder.path, task.cell.id)
        try:
            with self.federation_of(training) as federation:
                observation = self.observe(federation, training, task, {})
            updates = AttackedUpdates.of(observation)
            kept = AttackCheckpoint(self.folder.part_path(task.cell) / CHECKPOINT, updates.views)
            work = PortionWork(
                cell=task.cell.id,
                attack=task.attack.item,
                updates=updates,
                kept=kept,
                claims=self.claims,
                control=self.options.control.share(on_progress=partial(self.options.on_search, stage)),
            )
            return portions.help_along(work, path.exists)
        except LostLockError:
            raise
        except RUN_ERRORS:
            # whoever has claimed the attack meets the same, and notes it as a failure
            log.exception("%s: this worker can't help", stage)
            self.unfit.add(task.cell.id)
            return 0


# ---- the process -----------------------------------------------------------------------------------------------------
def plan_of(job: WorkerJob) -> Plan:
    """Return the plan of a job.

    Raises:
        RefusedError: it is not the caller's plan, or can't be made here.
    """
    sys.path.extend(place for place in job.module_folders if place not in sys.path)
    try:
        experiment = yaml_config.read(yaml12.parse(job.experiment), imports=job.imports)
        plan = with_cells(prepare(experiment, device=job.device), set(job.cells))
    except RUN_ERRORS as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
    if source_digest() != job.code:
        raise RefusedError("it runs other source code than the caller; install the same version, and the same modules")
    if [cell.id for _, cell in plan.cells()] != list(job.cells):
        raise RefusedError(
            "the experiment comes to other cells than at the caller: there are other data, other weights for LPIPS, or "
            "another version"
        )
    return plan


def work(job: WorkerJob) -> str:
    """Do what a job asks for; returns how it has ended.

    Raises:
        RefusedError: this worker can't.
    """
    folder = RunDir(Path(job.folder))
    if is_dismissed(job):
        return STOPPED
    plan = plan_of(job)
    choose_workers(1, plan.device)
    for other in Members(folder.path).states():  # an engine may begin the work of one that has died again by itself
        if other.about.get("worker") == job.worker:
            Members(folder.path).declare_gone(other.name)
    with folder.shared(WORKER, job.worker, {"worker": job.worker, "caller": job.caller}) as member:
        claims = Claims(folder.path, member)
        AT_PARENTS_END.append(claims.release_all)
        folder.claim_check = lambda cell: claims.check(cell.id)
        left = math.inf if job.deadline is None else job.deadline - member.members.now()
        told = ToldProgress(member)
        options = Options(
            checkpoint_seconds=job.checkpoint_seconds,
            keep_checkpoints=job.keep_checkpoints,
            control=SearchControl(time_limit=left),
            on_search=told.search,
        )
        with log_to(notes.NoteHandler(folder.path, member.name)), kept_alive(member), closing(AttackPool(1)) as spread:
            try:
                SharedRun(plan, folder, options, told.stage, spread, claims=claims, workers=job.workers).run()
            except GoneError:
                return STOPPED
            finally:
                claims.release_all()
    return DONE


def is_dismissed(job: WorkerJob) -> bool:
    """Return whether the caller needs this worker no more: it was told to leave, or its caller has left in order.

    Where the caller has died its word stays, so that jobs that wait in a queue go on with its run.
    """
    members = Members(Path(job.folder))
    caller = members.state(job.caller)
    return members.is_gone(job.worker) or caller is None or bool(caller.about.get("left"))


@contextmanager
def kept_alive(member: Member) -> Iterator[None]:
    """Give signs of life while the block runs; end the process once the member counts as dead."""
    over = threading.Event()

    def beat() -> None:
        since = 0.0
        while not over.wait(LOOK_SECONDS):
            since += LOOK_SECONDS
            try:
                member.check()
                if since >= HEARTBEAT_SECONDS:
                    member.beat()
                    since = 0.0
            except GoneError:
                os._exit(CODES[STOPPED])  # what it holds counts no more, so that nothing is to be given up
            except OSError as error:
                log.warning("no sign of life can be given: %s", error)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def leave(number: int, _frame: FrameType | None) -> NoReturn:
    """End in order, with all claims given up: a handler of signals."""
    sys.exit(CODES[STOPPED])


def main() -> int:
    """Read a job, do it, and say on stdout what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller says what a key pressed at it means
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):  # Slurm announces the end of a job by the last
        signal.signal(number, leave)
    job = WorkerJob(**json.loads(sys.stdin.readline()))
    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        with redirect_stdout(sys.stderr):  # stdout is for what there is to say
            return CODES[work(job)]
    except RefusedError as error:
        sys.stdout.write(" ".join(str(error).split()))
        return CODES[REFUSAL]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread waits for stdin
