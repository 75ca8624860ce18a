"""What a caller may ask of a search while it runs: to end in time, to say how far it is, to keep its best so far.

    control = SearchControl(time_limit=600, on_progress=show, keep_best_on_interrupt=True)
    results = run_checked(attack, views, seeds, control)

Attacks that search in iterations (`Attack.run_controlled`) end at the time limit with the best iterate that they have,
and note in the result that they were cut short. Other attacks run to their end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TIME_LIMIT = "the time limit"
INTERRUPT = "an interrupt"
"""What cut a search short, in its note."""


@dataclass(frozen=True)
class SearchProgress:
    """How far a search is.

    Attributes:
        iteration: iterations done, of all batches of trials together.
        iterations: iterations there are at most; a search that succeeds early takes fewer.
        seconds_left: what the rest takes at the present speed, within the time limit; None until two reports are due.
    """

    iteration: int
    iterations: int
    seconds_left: float | None = None


def ignore_progress(progress: SearchProgress) -> None:
    """Report to nobody."""


class SearchControl:
    """Limits of one or several searches, and who hears of their progress. One object may serve many attacks in turn.

    Args:
        time_limit: seconds from now on after which searches end; infinity is no limit.
        on_progress: called with a `SearchProgress` about every `interval` seconds, in the thread that searches.
        keep_best_on_interrupt: whether a KeyboardInterrupt during a search ends it with its best iterate so far and
            sets `interrupted`; else it is raised and the search is lost.
        interval: seconds between two reports, at least.

    Attributes:
        interrupted: whether an interrupt was taken; searches that begin afterwards end at once.
    """

    def __init__(
        self,
        *,
        time_limit: float = math.inf,
        on_progress: Callable[[SearchProgress], None] = ignore_progress,
        keep_best_on_interrupt: bool = False,
        interval: float = 0.5,
    ) -> None:
        self.deadline = time.monotonic() + time_limit
        self.on_progress = on_progress
        self.keep_best_on_interrupt = keep_best_on_interrupt
        self.interval = interval
        self.interrupted = False

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit, 0 or more; infinity without one."""
        return max(self.deadline - time.monotonic(), 0.0)

    def stop_reason(self) -> str:
        """What stops every search now, in words; empty while they may go on."""
        if self.interrupted:
            return INTERRUPT
        return TIME_LIMIT if self.seconds_left == 0 else ""

    def take_interrupt(self) -> bool:
        """Return whether a KeyboardInterrupt is to end the search with what it has; else it has to be raised again."""
        self.interrupted = self.keep_best_on_interrupt
        return self.interrupted


@dataclass
class SearchMonitor:
    """Follows the batches of one search for its `control`.

    The time that is left is shared out evenly among the batches that are left, so that none goes without.

    Attributes:
        control: the caller's.
        batches: batches of trials that the search will run, at most.
        iterations: iterations of each batch.
        levels_left: searches in a row that share the time left equally, this one among them.
    """

    control: SearchControl = field(default_factory=SearchControl)
    batches: int = 1
    iterations: int = 0
    levels_left: int = 1
    begun: int = 0
    _batch_deadline: float = math.inf
    _reported: float = field(default_factory=lambda: time.monotonic())
    _reported_iteration: int | None = None

    def begin_batch(self) -> str:
        """Begin another batch; returns what forbids it, in words, or nothing."""
        reason = self.control.stop_reason()
        if not reason:
            batches_left = max(self.batches - self.begun, 1)
            share = self.control.seconds_left / (batches_left + (self.levels_left - 1) * self.batches)
            self._batch_deadline = time.monotonic() + share
            self.begun += 1
        return reason

    def after(self, iteration: int) -> str:
        """Report that a batch has done so many iterations; returns what stops it now, in words, or nothing."""
        now = time.monotonic()
        if now - self._reported >= self.control.interval:
            self._report(max(self.begun - 1, 0) * self.iterations + iteration, now)
        return self.control.stop_reason() or (TIME_LIMIT if now >= self._batch_deadline else "")

    def _report(self, done: int, now: float) -> None:
        total = self.batches * self.iterations
        left = None
        if self._reported_iteration is not None and done > self._reported_iteration:
            pace = (now - self._reported) / (done - self._reported_iteration)
            left = min(pace * (total - done), self.control.seconds_left)
        self._reported, self._reported_iteration = now, done
        self.control.on_progress(SearchProgress(min(done, total), total, left))
