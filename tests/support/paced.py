"""A search whose iterations take a second each of a clock that nothing else moves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.gradient_matching.engine.minimization import describe_cut
from attacks.search_control import SearchControl, SearchMonitor
from fl.view import ServerView


class Clock:
    """The time of `time.monotonic`, in seconds; and at which of them a key is pressed."""

    now = 0.0
    pressed_at: float | None = None
    control: SearchControl | None = None

    def tick(self) -> None:
        """Let a second pass."""
        self.now += 1
        if self.now == self.pressed_at and self.control is not None:
            self.control.interrupt()


CLOCK = Clock()


@dataclass(frozen=True, kw_only=True)
class Paced(Attack):
    """A picture that gets lighter with every iteration, one a second."""

    iterations: int = 10

    def view_batches(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        return [[i] for i in range(len(views))]

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        return self.run_controlled(views, seeds, SearchControl())

    def run_controlled(self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl) -> list[Result]:
        monitor = SearchMonitor(control, len(views), self.iterations)
        return [self._search(view, monitor) for view in views]

    def _search(self, view: ServerView, monitor: SearchMonitor) -> Result:
        if stopped := monitor.begin_batch():
            return NotApplicable("not begun", limit=True, cut_short=stopped)
        done = 0
        while done < self.iterations and not (stopped := monitor.after(done)):
            CLOCK.tick()
            done += 1
        cut = describe_cut(done, self.iterations, stopped) if stopped else ""
        shape = (view.batch_size or 1, *view.task.input_shape)
        return Reconstruction(torch.full(shape, done / self.iterations), note=cut, cut_short=cut)


@contextmanager
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The attack `paced` and its clock."""
    attacks.names()
    attacks.register("paced")(Paced)
    CLOCK.now, CLOCK.pressed_at, CLOCK.control = 0.0, None, None
    monkeypatch.setattr(time, "monotonic", lambda: CLOCK.now)
    try:
        yield CLOCK
    finally:
        del attacks._entries["paced"]
