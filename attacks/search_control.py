"""What a caller may ask of a search while it runs: to end in time, to say how far it is, to keep its best so far.

    control = SearchControl(time_limit=600, on_progress=show, keep_best_on_interrupt=True)
    results = run_checked(attack, views, seeds, control)

Attacks that search in iterations (`Attack.run_controlled`) end at the time limit with the best iterate that they have,
and note in the result that they were cut short. Attacks that solve call `check_time_limit` wherever they have done a
piece of work: it ends them, with what they have proved by then.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from fl.runtime.interruption import asked_in_passes

T = TypeVar("T")
U = TypeVar("U")
TIME_LIMIT = "the time limit"
INTERRUPT = "an interrupt"
"""What cut a search short, in its note."""
PACE_REPORTS = 20
"""Reports that the present speed is taken from."""
GRACE_SHARE, MOST_GRACE = 0.1, 10.0
"""Share of the whole time, and seconds at most, beyond the limit in which what was found is held to its update."""


@dataclass(frozen=True)
class SearchProgress:
    """How far a search is.

    Attributes:
        iteration: iterations done, of all batches of trials together.
        iterations: iterations there are at most; a search that succeeds early takes fewer.
        seconds_left: what the rest takes at the present speed, within the time limit; None until two reports are due.
        is_limited: whether the time limit comes before the last iteration, at the present speed.
    """

    iteration: int
    iterations: int
    seconds_left: float | None = None
    is_limited: bool = False


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
        parent: the control that this one is a share of: what interrupts one of them interrupts the other.
        grace: seconds beyond the time limit that `overtime` has; None takes a share of the time that there is now.

    Attributes:
        is_searching: whether something runs now that `interrupt` ends (`searching`).
        cut_short_by: what has stopped a search under this control before its end, in words; empty where nothing has.
    """

    def __init__(
        self,
        *,
        time_limit: float = math.inf,
        on_progress: Callable[[SearchProgress], None] = ignore_progress,
        keep_best_on_interrupt: bool = False,
        interval: float = 0.5,
        parent: SearchControl | None = None,
        grace: float | None = None,
    ) -> None:
        self.time_limit = time_limit
        self.grace = min(GRACE_SHARE * time_limit, MOST_GRACE) if grace is None else grace
        self.deadline = time.monotonic() + time_limit
        self.on_progress = on_progress
        self.keep_best_on_interrupt = keep_best_on_interrupt
        self.interval = interval
        self.parent = parent
        self.cut_short_by = ""
        self.is_searching = False
        self._interrupted = False
        self._interrupted_at: float | None = None

    def share(self, parts: int = 1, on_progress: Callable[[SearchProgress], None] = ignore_progress) -> SearchControl:
        """Return the control of one of `parts` works that have the time left in equal shares, one after the other."""
        return SearchControl(
            time_limit=self.seconds_left / max(parts, 1),
            on_progress=on_progress,
            keep_best_on_interrupt=self.keep_best_on_interrupt,
            interval=self.interval,
            parent=self,
            grace=self.grace,
        )

    def overtime(self) -> SearchControl:
        """Return the control of what is done with what was found, which ends a little behind the limit or interrupt."""
        return _Overtime(self)

    @property
    def interrupted(self) -> bool:
        """Whether there was an interrupt: searches end with what they have, and those that begin later end at once."""
        return self._interrupted or (self.parent is not None and self.parent.interrupted)

    @property
    def seconds_since_interrupt(self) -> float:
        """Seconds since an interrupt was first seen here; 0 while there is none."""
        if not self.interrupted:
            return 0.0
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
        return time.monotonic() - self._interrupted_at

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit, 0 or more; infinity without one."""
        return max(self.deadline - time.monotonic(), 0.0)

    def progress(self, iteration: int, iterations: int, seconds: float | None) -> SearchProgress:
        """Return the progress of a search whose rest takes so many seconds, if there is no time limit."""
        if seconds is None:
            return SearchProgress(iteration, iterations)
        left = self.seconds_left
        return SearchProgress(iteration, iterations, min(seconds, left), is_limited=left < seconds)

    def interrupt(self) -> None:
        """End all searches under this control, and under that which it is a share of; for handlers of signals, too."""
        self._interrupted = True
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
        if self.parent is not None:
            self.parent.interrupt()

    @contextmanager
    def searching(self, active: bool = True) -> Iterator[None]:
        """While the block runs `is_searching` says whether an interrupt ends only a search, which then returns."""
        self.is_searching = active
        try:
            yield
        finally:
            self.is_searching = False

    def stop_reason(self) -> str:
        """Return what stops every search now, in words; empty while they may go on. Whoever asks has to heed it."""
        reason = INTERRUPT if self.interrupted else TIME_LIMIT if self.seconds_left == 0 else ""
        self.cut_short_by = self.cut_short_by or reason
        return reason

    def take_interrupt(self) -> bool:
        """Return whether a KeyboardInterrupt is to end the search with what it has; else it has to be raised again."""
        if self.keep_best_on_interrupt:
            self.interrupt()
            self.cut_short_by = self.cut_short_by or INTERRUPT
        return self.keep_best_on_interrupt


class _Overtime(SearchControl):
    """The control of what is done with what was found under another one, which ends a little behind it.

    Args:
        behind: the other one; an interrupt of it may come before this one begins, or later.
    """

    def __init__(self, behind: SearchControl) -> None:
        super().__init__(time_limit=behind.deadline + behind.grace - time.monotonic(), grace=0.0)
        self._behind = behind

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt was that long ago, or there was one of this control itself."""
        return self._interrupted or self._behind.seconds_since_interrupt > self._behind.grace


OPERATIONS_A_SECOND = 2e10
"""Floating-point operations that a thread can do in a second in double precision, at most."""


class StoppedError(BaseException):
    """An attack that solves has to end now; its text says what stops it.

    It is no `Exception`: a network or a loss of the user's own, in the midst of which it may be raised, and what names
    their errors, let it through.
    """


_CONTROL: ContextVar[SearchControl | None] = ContextVar("control", default=None)
"""Of the attack that solves now in this thread."""


@contextmanager
def limited_by(control: SearchControl) -> Iterator[None]:
    """While the block runs `check_time_limit` asks this control, and so does every pass through a network."""

    def ask() -> None:
        if not control.seconds_left or control.interrupted:
            raise_if_stopped(control)

    token = _CONTROL.set(control)
    try:
        with asked_in_passes(ask):
            yield
    finally:
        _CONTROL.reset(token)


@contextmanager
def in_overtime() -> Iterator[None]:
    """While the block runs, the attack that solves now may go a little beyond its limit, to name what it has found.

    Raises:
        StoppedError: that is over, too.
    """
    control = _CONTROL.get()
    if control is None:
        yield
        return
    with limited_by(control.overtime()):
        yield


def named_in_time(name: Callable[[], T], otherwise: U) -> T | U:
    """Return what is said of something found, also a little beyond the limit: it is not to be lost for its labels.

    Args:
        name: says it.
        otherwise: stands for it where that takes longer.
    """
    try:
        with in_overtime():
            return name()
    except StoppedError as stopped:
        control = _CONTROL.get()
        if control is not None:
            control.cut_short_by = control.cut_short_by or str(stopped)
        return otherwise


def raise_if_stopped(control: SearchControl) -> None:
    """End the work that a control bounds, if it says so.

    Raises:
        StoppedError: it has to end.
    """
    if reason := control.stop_reason():
        raise StoppedError(reason)


def check_time_limit() -> None:
    """End the attack that solves now, if its control says so.

    Raises:
        StoppedError: it has to end.
    """
    control = _CONTROL.get()
    if control is not None:
        raise_if_stopped(control)


def check_time_for(operations: float) -> None:
    """End the attack that solves now, if a step of so many operations can't be done in the time left.

    Args:
        operations: of floating-point numbers, in a call that nothing can end, for each of its threads.

    Raises:
        StoppedError: it has to end.
    """
    check_time_limit()
    control = _CONTROL.get()
    if control is not None and operations > OPERATIONS_A_SECOND * control.seconds_left:
        control.cut_short_by = control.cut_short_by or TIME_LIMIT
        raise StoppedError(TIME_LIMIT)


class Pace:
    """How fast iterations go, by the last reports of how many are done."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, float]] = deque(maxlen=PACE_REPORTS)

    def seconds_left(self, now: float, done: float, total: float) -> float | None:
        """Take a report, and return what the rest takes at the present speed; None until that can be told."""
        self._reports.append((now, done))
        begun, first = self._reports[0]
        return (now - begun) / (done - first) * (total - done) if done > first else None


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
    _pace: Pace = field(default_factory=Pace)

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
        reason = self.control.stop_reason() or (TIME_LIMIT if now >= self._batch_deadline else "")
        self.control.cut_short_by = self.control.cut_short_by or reason
        return reason

    def _report(self, done: int, now: float) -> None:
        total = self.batches * self.iterations
        left = self._pace.seconds_left(now, done, total)
        self._reported = now
        self.control.on_progress(self.control.progress(min(done, total), total, left))
