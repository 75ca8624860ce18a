"""Attacks on many updates, spread over processes of one thread each; the process that asks works along."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType

from attacks.base import Attack, Result, run_checked
from attacks.search_control import SearchControl
from fl.runtime.interprocess_packing import Packed, pack, unpack, unportable
from fl.runtime.main_guard import leave_if_unguarded
from fl.runtime.workers import START, Workers, alike
from fl.view import ServerView

log = logging.getLogger(__name__)
POLL = 0.2
"""Seconds between two looks at what other threads have done."""


class AttackPool:
    """Runs attacks in several processes, which start once there is work for longer than that takes.

    The attack says what is computed together (`Attack.view_batches`), so two processes or twenty give the same bits,
    those of one at as many threads as a worker has (`fl.runtime.workers.threads`). Nothing is spread on a GPU.

    Args:
        workers: processes, this one among them.
        patience: seconds of attacks in this process alone before the others are started.

    Raises:
        ValueError: fewer than one.
    """

    def __init__(self, workers: int = 1, patience: float = START) -> None:
        if workers < 1:
            raise ValueError(f"expected workers >= 1, got {workers}")
        if workers > 1:
            leave_if_unguarded()
        self.workers, self.patience = workers, patience
        self._starting = threading.Lock()
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
        """What the attack makes of each view, in their order.

        Args:
            attack: any.
            views: what the server saw.
            seeds: one for each.
            tick: told how many more views are done.
            known: results by the view's number that are there already; batches of these alone are left out.
            keep: given every batch's numbers and results once it is done, by one of several threads.
            control: time limit of searches and progress of those in this process; None for neither.

        Raises:
            RuntimeError: a worker process died.
        """
        batches = attack.view_batches(views)
        done = [batch for batch in batches if all(i in known for i in batch)]
        left = deque(batch for batch in batches if not all(i in known for i in batch))
        job = _AttackJob(attack, views, seeds, left, tick, keep, control)
        job.results.update({i: known[i] for batch in done for i in batch})
        job.report_progress()
        on_cpu = all(view.device.type == "cpu" for view in views)
        helpers = min(self.workers, len(job.open)) - 1 if on_cpu else 0
        began = time.monotonic()
        with ThreadPoolExecutor(max(helpers, 1)) as hands:
            others = [hands.submit(self._run_worker_thread, job) for _ in range(helpers)]
            try:
                with alike() if self.workers > 1 and on_cpu else nullcontext():
                    job.work(_run_here, told=True)
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

    def _run_worker_thread(self, job: _AttackJob) -> None:
        """Have a worker take batches, once it is there, as long as there are any."""
        if job.over.wait(max(self.patience, 0.0)) or not job.can_be_sent():
            return
        ready = self._ready_pool()
        while not ready.done():
            if job.over.wait(POLL):
                return
        job.work(self._run_in_worker)

    def _ready_pool(self) -> Future[None]:
        """Done when a worker is there."""
        with self._starting:
            if self._pool is None or self._ready is None:
                self._pool = Workers(self.workers - 1)
                self._ready = self._pool.submit(_do_nothing)
            return self._ready

    def _run_in_worker(
        self, attack: Attack, views: list[ServerView], seeds: list[int], control: SearchControl | None
    ) -> list[Result]:
        """What a worker makes of the views."""
        pool = self._pool
        if pool is None:
            raise RuntimeError("the workers were told to end")
        left = None if control is None else control.seconds_left
        found: list[Result] = unpack(pool.result(pool.submit(_run_packed, pack((attack, views, seeds, left)))))
        return found


Run = Callable[[Attack, list[ServerView], list[int], SearchControl | None], list[Result]]
Keep = Callable[[Sequence[int], Sequence[Result]], None]


@dataclass
class _AttackJob:
    """What is still to be attacked, and what has come of the rest; several threads work on it."""

    attack: Attack
    views: Sequence[ServerView]
    seeds: Sequence[int]
    open: deque[Sequence[int]]
    tick: Callable[[int], None]
    keep: Keep
    control: SearchControl | None = None
    over: threading.Event = field(default_factory=threading.Event)
    results: dict[int, Result] = field(default_factory=dict)
    counted: int = 0

    def work(self, run: Run, *, told: bool = False) -> None:
        """Take one batch after the other until none is left; where one fails, nobody takes another."""
        while self.open:
            try:
                batch = self.open.popleft()
            except IndexError:  # another thread was first
                return
            try:
                found = run(self.attack, [self.views[i] for i in batch], [self.seeds[i] for i in batch], self.control)
                self.keep(batch, found)
            except BaseException:
                self.stop()
                raise
            self.results.update(zip(batch, found, strict=True))
            if told:
                self.report_progress()

    def can_be_sent(self) -> bool:
        """Whether another process can be given what is attacked: classes made in a function, say, it can't import."""
        reason = unportable((self.attack, [*self.views[:1]], [*self.seeds[:1]]))
        if reason:
            log.warning("attacks run in one process: the model can't be sent to another (%s)", reason)
        return not reason

    def stop(self) -> None:
        """No other batch is taken."""
        self.open.clear()
        self.over.set()

    def wait_for(self, others: Iterable[Future[None]]) -> None:
        """Until the other threads have done their work."""
        left = set(others)
        while left:
            done, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
            self.report_progress()

    def report_progress(self) -> None:
        """How many views were done since it was last told."""
        done = len(self.results)
        if done > self.counted:
            self.tick(done - self.counted)
        self.counted = done


def _run_here(attack: Attack, views: list[ServerView], seeds: list[int], control: SearchControl | None) -> list[Result]:
    """What this process makes of the views."""
    return run_checked(attack, views, seeds, control)


# ---- in a worker -----------------------------------------------------------------------------------------------------
def _do_nothing() -> None:
    """Be there."""


def _run_packed(packed: Packed) -> Packed:
    """What this process makes of an attack and what it is given."""
    attack, views, seeds, seconds_left = unpack(packed)
    control = None if seconds_left is None else SearchControl(time_limit=seconds_left)
    return pack(run_checked(attack, views, seeds, control))
