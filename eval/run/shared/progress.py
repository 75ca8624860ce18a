"""How far workers are: each tells it in its member file, and whoever wants to know reads them all.

A stage that has ended is told as well, so that one that is short is not missed between two looks.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from attacks.search_control import SearchProgress
from eval.run.members import WORKER, Member, MemberState
from eval.run.run_options import Progress, RunListener, RunProgress, SearchListener

TELL_SECONDS = 1.0
"""Seconds between two reports of a worker, at least."""
STAGES, SEARCHES = "stages", "searches"
_SEED = re.compile(r" \(seed \d+\)")


class ToldProgress:
    """Writes a worker's progress into its member file.

    Args:
        member: of the worker.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._stages: dict[str, tuple[int, int]] = {}
        self._search: dict[str, list[float | int | None]] = {}
        self._told = 0.0
        self._one_by_one = threading.Lock()

    def stage(self, stage: str, done: int, total: int) -> None:
        """Hear how far a stage is: a `Progress`."""
        self._stages[stage] = (done, total)
        if done == total:
            self._search.pop(stage, None)
        self._tell(at_once=done in (0, total))

    def search(self, stage: str, progress: SearchProgress) -> None:
        """Hear how far a search is: a `SearchListener`."""
        self._search[stage] = [progress.iteration, progress.iterations, progress.seconds_left]
        self._tell()

    def _tell(self, *, at_once: bool = False) -> None:
        with self._one_by_one:
            if at_once or time.monotonic() - self._told >= TELL_SECONDS:
                self._told = time.monotonic()
                self._member.tell({STAGES: dict(self._stages), SEARCHES: dict(self._search)})


@dataclass
class ProgressReader:
    """Repeats what workers tell to who shows it here; each stage by the furthest that any of them has said.

    Attributes:
        progress: told how far stages are.
        on_search: told how far searches are.
    """

    progress: Progress
    on_search: SearchListener
    _shown: dict[str, tuple[int, int]] = field(default_factory=dict)
    _searched: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def parts_done(self) -> int:
        """Parts of all stages that are known to be done; grows whenever any worker gets further than any did before."""
        return sum(done for done, _ in self._shown.values())

    def read(self, states: Sequence[MemberState]) -> None:
        """Show what is new."""
        for state in states:
            if state.kind == WORKER:
                self._read_stages(_mapping(state.about.get(STAGES)))
                self._read_searches(_mapping(state.about.get(SEARCHES)))

    def _read_stages(self, stages: Mapping[str, Any]) -> None:
        for stage, (done, total) in stages.items():
            if stage not in self._shown:
                self._shown[stage] = 0, total
                self.progress(stage, 0, total)
            if done > self._shown[stage][0]:
                self._shown[stage] = done, total
                self.progress(stage, done, total)

    def _read_searches(self, searches: Mapping[str, Any]) -> None:
        for stage, (iteration, iterations, left) in searches.items():
            if self._searched.get(stage) != (iteration, iterations):
                self._searched[stage] = iteration, iterations
                self.on_search(stage, SearchProgress(iteration, iterations, left))


@dataclass
class RunPace:
    """How far a whole run is, and how long the rest takes, by what its finished cells took.

    Attributes:
        listener: told about once in `TELL_SECONDS`.
    """

    listener: RunListener
    _told: float = 0.0
    _done: int = -1
    _changed: float = 0.0

    def tell(self, about_run: Callable[[], Mapping[str, Any]], workers: int) -> None:
        """Say how far the run is.

        Args:
            about_run: returns what `run.json` says: name, kind and status of each cell, and seconds of finished ones.
            workers: that are at work.
        """
        now = time.monotonic()
        if now - self._told < TELL_SECONDS:
            return
        cells = [cell for cell in about_run().get("cells", []) if isinstance(cell, dict)]
        done = sum(cell.get("status") == "finished" for cell in cells)
        if done != self._done:
            self._done, self._changed = done, now
        work = seconds_of_work(cells)
        left = None if work is None or not workers else max(work / workers - (now - self._changed), 0.0)
        self._told = now
        self.listener(RunProgress(done, len(cells), workers, left))


def seconds_of_work(cells: Sequence[Mapping[str, Any]]) -> float | None:
    """Return what the cells that wait take one worker; None where none of the same kind of work is finished.

    A cell is taken to be as long as those of other seeds in the mean, or as all trainings or attacks.
    """
    took: dict[str, list[float]] = {}
    waiting = []
    for cell in cells:
        keys = [_SEED.sub("", str(cell.get("name"))), str(cell.get("kind"))]
        if cell.get("status") == "finished":
            for key in keys:
                took.setdefault(key, []).append(float(cell["seconds"]))
        elif cell.get("status") == "waiting":
            waiting.append(keys)
    each = [next((fmean(took[key]) for key in keys if key in took), None) for keys in waiting]
    return None if None in each else sum(value for value in each if value is not None)


def _mapping(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
