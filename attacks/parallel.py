"""Attacks on many updates, spread over processes of one thread each; the process that asks works along."""

from __future__ import annotations

import logging
import math
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from attacks.base import Attack, NotApplicable, Result, run_checked
from attacks.search_control import Pace, SearchControl, SearchProgress
from fl.runtime.interprocess_packing import Packed, pack, unpack, unportable_reason
from fl.runtime.main_guard import leave_if_unguarded
from fl.runtime.workers import START_SECONDS, Workers, use_worker_threads
from fl.view import ServerView

log = logging.getLogger(__name__)
POLL = 0.2
"""Seconds between two looks at what other threads have done."""


class AttackPool:
    """Runs attacks in several processes, which start once there is work for longer than that takes.

    The attack says what is computed together (`Attack.view_batches`), so two processes or twenty give the same bits,
    those of one at as many threads as a worker has (`fl.runtime.workers.worker_thread_count`). Nothing is spread on a
    GPU.

    Args:
        workers: processes, this one among them.
        patience: seconds of attacks in this process alone before the others are started.

    Raises:
        ValueError: fewer than one.
    """

    def __init__(self, workers: int = 1, patience: float = START_SECONDS) -> None:
        if workers < 1:
            raise ValueError(f"expected workers >= 1, got {workers}")
        if workers > 1:
            leave_if_unguarded()
        self.workers, self.patience = workers, patience
        self._starting = threading.Lock()
        self._board = ProgressBoard(workers - 1)
        self._pool: Workers | None = None
        self._ready: Future[None] | None = None

    def run(
        self,
        attack: Attack,
        views: Sequence[ServerView],
        seeds: Sequence[int],
        tick: Callable[[int], None] = lambda _count: None,
        known: Mapping[int, Result] = MappingProxyType({}),
        keep: Keep = lambda _numbers, _results: None,
        control: SearchControl | None = None,
    ) -> list[Result]:
        """Return what the attack makes of each view, in their order.

        Args:
            attack: any.
            views: what the server saw.
            seeds: one for each.
            tick: told how many more views are done.
            known: results by the view's number that are there already; batches of these alone are left out.
            keep: given every batch's numbers and results once it is done, by one of several threads; but for those that
                `control` cut short.
            control: time limit, interruption and progress, for all batches together, in whichever process they are
                computed; batches that are left share the time left. None for neither.

        Returns:
            A result for each view; with `cut_short` where `control` kept it from its end.

        Raises:
            RuntimeError: a worker process died.
        """
        batches = attack.view_batches(views)
        done = [batch for batch in batches if all(i in known for i in batch)]
        left = deque(batch for batch in batches if not all(i in known for i in batch))
        job = _AttackJob(attack, views, seeds, left, tick, keep, control, self._board)
        job.results.update({i: known[i] for batch in done for i in batch})
        job.report_progress()
        self._board.clear()
        on_cpu = all(view.device.type == "cpu" for view in views)
        helpers = min(self.workers, len(job.open)) - 1 if on_cpu else 0
        began = time.monotonic()
        with ThreadPoolExecutor(max(helpers, 1)) as hands:
            others = [hands.submit(self._run_worker_thread, job, slot) for slot in range(helpers)]
            try:
                with use_worker_threads() if self.workers > 1 and on_cpu else nullcontext():
                    job.work(_run_here)
                job.over.set()
                job.wait_for(others)
            except BaseException:  # a key pressed at this process among them
                job.stop()
                self.close()
                raise
        self.patience -= time.monotonic() - began
        return [job.results[i] for i in range(len(views))]

    def close(self) -> None:
        """End the processes, whatever they do."""
        with self._starting:
            if self._pool is not None:
                self._pool.close()
            self._pool = self._ready = None

    def _run_worker_thread(self, job: _AttackJob, slot: int) -> None:
        """Have a worker take batches, once it is there, as long as there are any; it tells how far it is in `slot`."""
        if job.over.wait(max(self.patience, 0.0)) or not job.can_be_sent():
            return
        ready = self._ready_pool()
        while not ready.done():
            if job.over.wait(POLL):
                return
        job.work(partial(self._run_in_worker, slot), slot)

    def _ready_pool(self) -> Future[None]:
        """Done when a worker is there."""
        with self._starting:
            if self._pool is None or self._ready is None:
                self._pool = Workers(self.workers - 1, _share_board, self._board)
                self._ready = self._pool.submit(_do_nothing)
            return self._ready

    def _run_in_worker(
        self, slot: int, attack: Attack, views: list[ServerView], seeds: list[int], control: SearchControl | None
    ) -> list[Result]:
        """Return what a worker makes of the views."""
        pool = self._pool
        if pool is None:
            raise RuntimeError("the workers were told to end")
        left = None if control is None else (control.seconds_left, control.grace)
        found: list[Result] = unpack(pool.result(pool.submit(_run_packed, pack((attack, views, seeds, left, slot)))))
        return found


Run = Callable[[Attack, list[ServerView], list[int], SearchControl | None], list[Result]]
Keep = Callable[[Sequence[int], Sequence[Result]], None]


class ProgressBoard:
    """How far the searches of worker processes are, and whether they are to end: numbers in shared memory.

    A slot has one writer, its worker, so nothing is locked; a glance at two numbers of different moments does no harm.

    Args:
        slots: workers.
    """

    def __init__(self, slots: int) -> None:
        size = 1 + 2 * slots
        self._numbers: Any = multiprocessing.get_context("spawn").RawArray("d", size) if slots else [0.0] * size

    def clear(self) -> None:
        """Reset all numbers: no search runs, and none has to end."""
        self._numbers[:] = [0.0] * len(self._numbers)

    @property
    def interrupted(self) -> bool:
        """Whether searches are to end with the best they have."""
        return bool(self._numbers[0])

    def interrupt(self) -> None:
        """Have all searches end."""
        self._numbers[0] = 1.0

    def write(self, slot: int, iteration: int, iterations: int) -> None:
        """Say how far the search of a worker is; two zeros where it has not begun."""
        self._numbers[1 + 2 * slot : 3 + 2 * slot] = [float(iteration), float(iterations)]

    def read(self, slot: int) -> SearchProgress:
        """Return how far the search of a worker is."""
        iteration, iterations = self._numbers[1 + 2 * slot : 3 + 2 * slot]
        return SearchProgress(int(iteration), int(iterations))


@dataclass
class _AttackJob:
    """What is still to be attacked, and what has come of the rest; several threads work on it."""

    attack: Attack
    views: Sequence[ServerView]
    seeds: Sequence[int]
    open: deque[Sequence[int]]
    tick: Callable[[int], None]
    keep: Keep
    control: SearchControl | None
    board: ProgressBoard
    over: threading.Event = field(default_factory=threading.Event)
    results: dict[int, Result] = field(default_factory=dict)
    counted: int = 0
    hands: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.progress = _JobProgress(len(self.open), self.board)

    def work(self, run: Run, slot: int | None = None) -> None:
        """Take one batch after the other until none is left; where one fails, nobody takes another.

        Args:
            run: attacks a batch.
            slot: of the worker that it runs in; None for this process, which also reports progress.
        """
        with self.lock:
            self.hands += 1
        try:
            while self.open:
                try:
                    batch = self.open.popleft()
                except IndexError:  # another thread was first
                    return
                try:
                    found = self.attack_batch(run, batch, slot)
                except BaseException:
                    self.stop()
                    raise
                self.results.update(zip(batch, found, strict=True))
                if slot is None:
                    self.report_progress()
        finally:
            with self.lock:
                self.hands -= 1

    def attack_batch(self, run: Run, batch: Sequence[int], slot: int | None) -> list[Result]:
        """Return what the attack makes of one batch, in its share of the time left."""
        views, seeds = [self.views[i] for i in batch], [self.seeds[i] for i in batch]
        if self.control is None:
            found = run(self.attack, views, seeds, None)
        elif reason := self.control.stop_reason():
            words = f"not attacked before {reason}"
            return [NotApplicable(words, limit=True, cut_short=words) for _ in batch]
        else:
            turns = -(-(len(self.open) + 1) // self.hands)
            self.progress.begin(slot)
            found = run(self.attack, views, seeds, self.control.share(turns, self.note_progress))
            self.progress.end(slot)
        if not any(result.cut_short for result in found):
            self.keep(batch, found)
        return found

    def note_progress(self, progress: SearchProgress) -> None:
        """Take the progress of the search in this process, and report that of all."""
        self.progress.here = progress
        self.report_search()

    def report_search(self) -> None:
        """Say how far the searches of all processes are together, and tell workers of an interrupt."""
        if self.control is None:
            return
        if self.control.interrupted:
            self.board.interrupt()
        whole = self.progress.of_all(time.monotonic(), self.control)
        if whole is not None:
            self.control.on_progress(whole)

    def can_be_sent(self) -> bool:
        """Return whether what is attacked can go to another process, which can't import classes made in a function."""
        reason = unportable_reason((self.attack, [*self.views[:1]], [*self.seeds[:1]]))
        if reason:
            log.warning("attacks run in one process: the model can't be sent to another (%s)", reason)
        return not reason

    def stop(self) -> None:
        """Let no further batch be started."""
        self.open.clear()
        self.over.set()

    def wait_for(self, others: Iterable[Future[None]]) -> None:
        """Wait until the other threads have done their work."""
        left = set(others)
        while left:
            try:
                done, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                if self.control is None or not self.control.take_interrupt():
                    raise
                continue
            finally:
                self.report_search()
            for one in done:
                one.result()
            self.report_progress()

    def report_progress(self) -> None:
        """How many views were done since it was last told."""
        done = len(self.results)
        if done > self.counted:
            self.tick(done - self.counted)
        self.counted = done


class _JobProgress:
    """How far the searches of a job are, of all processes together.

    Args:
        batches: that there are.
        board: where workers write.
    """

    def __init__(self, batches: int, board: ProgressBoard) -> None:
        self.batches, self.board = batches, board
        self.here = SearchProgress(0, 0)
        self._slots = set[int]()
        self._done: list[int] = []
        self._pace, self._reported = Pace(), -math.inf

    def begin(self, slot: int | None) -> None:
        """A batch begins, in this process or in that of a slot."""
        if slot is None:
            self.here = SearchProgress(0, 0)
        else:
            self.board.write(slot, 0, 0)
            self._slots.add(slot)

    def end(self, slot: int | None) -> None:
        """Count a batch that has ended in full, however early it succeeded, unless it never reported."""
        last = self.here if slot is None else self.board.read(slot)
        if last.iterations:
            self._done.append(last.iterations)
        else:
            self.batches -= 1
        self.begin(slot)
        self._slots.discard(-1 if slot is None else slot)

    def of_all(self, now: float, control: SearchControl) -> SearchProgress | None:
        """Return how far all are now; None where the last report was just now, or nothing has been heard of any search.

        Batches that have not begun are taken to be as long as the others are in the mean.
        """
        running = [self.here, *(self.board.read(slot) for slot in tuple(self._slots))]
        totals = [total for total in (*self._done, *(one.iterations for one in running)) if total]
        if not totals or now - self._reported < control.interval:
            return None
        self._reported = now
        each = sum(totals) / len(totals)
        total = round(each * self.batches)
        done = sum(self._done) + sum(one.iteration for one in running)
        left = self._pace.seconds_left(now, done, total)
        return control.progress(min(int(done), total), total, left)


def _run_here(attack: Attack, views: list[ServerView], seeds: list[int], control: SearchControl | None) -> list[Result]:
    """Return what this process makes of the views; each marked where the control kept it from its end."""
    found = run_checked(attack, views, seeds, control)
    if control is None or not control.cut_short_by or any(result.cut_short for result in found):
        return found
    words = f"the search was cut short by {control.cut_short_by}"  # of an attack that does not say so itself
    return [replace(result, cut_short=words) for result in found]


# ---- in a worker -----------------------------------------------------------------------------------------------------
class _WorkerControl(SearchControl):
    """The control of a search in a worker, whose board tells it of an interrupt.

    Args:
        seconds: that it has, and grace beyond them.
        slot: in which it tells how far it is.
    """

    def __init__(self, seconds: tuple[float, float], slot: int) -> None:
        super().__init__(time_limit=seconds[0], grace=seconds[1], on_progress=self._write)
        self._slot = slot

    @property
    def interrupted(self) -> bool:
        """Whether the process that asked was interrupted."""
        return _BOARD is not None and _BOARD.interrupted

    def _write(self, progress: SearchProgress) -> None:
        if _BOARD is not None:
            _BOARD.write(self._slot, progress.iteration, progress.iterations)


_BOARD: ProgressBoard | None = None
"""Of this process, if it is a worker."""


def _share_board(board: ProgressBoard) -> None:
    """Use this board."""
    global _BOARD
    _BOARD = board


def _do_nothing() -> None:
    """Be there."""


def _run_packed(packed: Packed) -> Packed:
    """Return what this process makes of an attack and what it is given."""
    attack, views, seeds, seconds, slot = unpack(packed)
    return pack(_run_here(attack, views, seeds, None if seconds is None else _WorkerControl(seconds, slot)))
