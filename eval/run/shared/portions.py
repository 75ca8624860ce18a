"""One attack on many updates, portion by portion, by several workers.

The worker that has claimed the cell begins alone. Once that has taken as long as a process takes to start, it says so,
and workers that have nothing else to do claim portions: the views that an attack says go best together, which depend on
the views and the attack alone. Each portion's results are written down before anything else is done; the worker that
has claimed the cell puts them together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attacks.base import Attack, Result, run_checked
from attacks.search_control import SearchControl
from eval.io import jsonl
from eval.run.attack_cell import AttackedUpdates, AttackExecution
from eval.run.attack_checkpoint import AttackCheckpoint
from eval.run.claims import MOST_DEATHS, Claims
from eval.run.members import SHARED
from fl.runtime.atomic_files import make_folder, remove_path
from fl.runtime.workers import START_SECONDS, use_worker_threads

OPENED = "opened"
"""Folder in that of the shared work with a file for every attack whose portions others may take."""
PATIENCE_SECONDS = START_SECONDS
"""Seconds of attacks by one worker before others are let in."""
POLL_SECONDS = 0.5
"""Seconds between two looks at what others have done."""


@dataclass(frozen=True, kw_only=True)
class PortionWork:
    """The portions of one attack cell.

    Attributes:
        cell: its name.
        attack: that is made.
        updates: on what.
        kept: where results are written down.
        claims: of this worker.
        control: of searches, which tells how far they are.
    """

    cell: str
    attack: Attack
    updates: AttackedUpdates
    kept: AttackCheckpoint
    claims: Claims
    control: SearchControl

    def claim_name(self, portion: Sequence[int]) -> str:
        """Return what a claim on a portion is called."""
        return f"{portion_prefix(self.cell)}{portion[0]}"

    def compute(self, portion: Sequence[int]) -> dict[int, Result]:
        """Attack a portion that this worker has claimed, and write down what came of it.

        Raises:
            LostClaimError: another worker has taken it over.
        """
        with use_worker_threads():
            found = self.attack_portion(portion)
        self.claims.check(self.claim_name(portion))
        self.kept.save(portion, list(found.values()))
        self.kept.flush()
        return found

    def attack_portion(self, portion: Sequence[int]) -> dict[int, Result]:
        """Attack a portion."""
        views, seeds = [self.updates.views[i] for i in portion], [self.updates.seeds[i] for i in portion]
        control = self.control.share(on_progress=self.control.on_progress)
        return dict(zip(portion, run_checked(self.attack, views, seeds, control), strict=True))

    def claimed(self, portions: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], dict[int, Result]]]:
        """Yield each portion that this worker can claim, with what is known of it by then."""
        for portion in portions:
            if self.claims.take(self.claim_name(portion)):
                known = self.kept.load(portion[0])
                yield portion, known if all(i in known for i in portion) else {}


def portion_prefix(cell: str) -> str:
    """Return what the names of claims on portions of a cell begin with."""
    return f"{cell}-"


@dataclass(frozen=True)
class SharedAttackExecution(AttackExecution):
    """How a worker attacks the updates of a cell that it has claimed.

    Attributes:
        cell: its name.
        claims: of the worker.
        folder: of the run.
        patience: seconds of attacks before others are let in.
    """

    cell: str = ""
    claims: Claims | None = None
    folder: Path = Path()
    patience: float = PATIENCE_SECONDS

    def attack(self, attack: Attack, updates: AttackedUpdates, kept: AttackCheckpoint) -> list[Result]:
        """Return what the attack makes of each update, by this worker and those that help it.

        Nobody helps on a GPU, as nothing is spread there by one process either: what is read back is on a CPU, where
        scores are rounded otherwise. Nor is there help before a time limit, which shares the time of one worker.
        """
        is_on_cpu = all(view.device.type == "cpu" for view in updates.views)
        if self.claims is not None:
            kept.on_write = partial(self.claims.progress, self.cell)
        if self.claims is None or not is_on_cpu or self.control.seconds_left < float("inf"):
            return super().attack(attack, updates, kept)
        work = PortionWork(
            cell=self.cell, attack=attack, updates=updates, kept=kept, claims=self.claims, control=self.control
        )
        portions = list(attack.view_batches(updates.views))
        known = kept.load()
        self.tick(len(known))
        try:
            if not opened_path(self.folder, self.cell).exists():  # else by one that has died, and others are at it
                self._begin_alone(work, portions, known)
            while left := _left(portions, known):
                self._open(work, left)
                self._take_portions(work, left, known)
        finally:
            remove_path(opened_path(self.folder, self.cell))
        self.claims.check(self.cell)
        self.claims.forget(portion_prefix(self.cell))
        return [known[i] for i in range(len(updates.views))]

    def _begin_alone(self, work: PortionWork, portions: Sequence[Sequence[int]], known: dict[int, Result]) -> None:
        """Attack portions until that has taken long."""
        began = time.monotonic()
        for portion in _left(portions, known):
            if time.monotonic() - began >= self.patience:
                return
            with use_worker_threads():
                found = work.attack_portion(portion)
            work.kept.save(portion, list(found.values()))
            self._add(known, found)

    def _open(self, work: PortionWork, left: Sequence[Sequence[int]]) -> None:
        """Let others take portions."""
        path = opened_path(self.folder, self.cell)
        if not path.exists():
            work.kept.flush()
            make_folder(path.parent)
            jsonl.write_text(path, json.dumps([portion[0] for portion in left]))

    def _take_portions(self, work: PortionWork, left: Sequence[Sequence[int]], known: dict[int, Result]) -> None:
        """Do all portions that nobody else does, and take in what others have done.

        Raises:
            RuntimeError: a portion has ended as many workers as may end.
        """
        before = len(known)
        for portion, found in work.claimed(left):
            self._add(known, found or work.compute(portion))
        for portion in _left(left, known):
            found = work.kept.load(portion[0])
            if all(i in found for i in portion):
                self._add(known, found)
            elif work.claims.is_exhausted(work.claim_name(portion)):
                raise RuntimeError(f"{MOST_DEATHS} workers died while they attacked update {portion[0]}")
        if len(known) == before:
            time.sleep(POLL_SECONDS)

    def _add(self, known: dict[int, Result], found: dict[int, Result]) -> None:
        before = len(known)
        known.update(found)
        self.tick(len(known) - before)


def has_free_portion(folder: Path, cell: str, claims: Claims) -> bool:
    """Return whether some portion of an attack is there to be taken."""
    try:
        firsts = jsonl.read_json(opened_path(folder, cell))
    except (OSError, ValueError):  # finished by now
        return False
    return any(claims.is_free(f"{portion_prefix(cell)}{first}") for first in firsts)


def help_along(work: PortionWork, is_open: Callable[[], bool]) -> int:
    """Do portions of an attack that another worker has claimed, as long as there are any; returns how many."""
    done, before = 0, work.kept.load()
    for portion, known in work.claimed(_left(list(work.attack.view_batches(work.updates.views)), before)):
        if not is_open():
            work.claims.release(work.claim_name(portion))
            break
        if not known:
            try:
                work.compute(portion)
            except BaseException:
                work.claims.release(work.claim_name(portion))
                raise
            done += 1
    return done


def opened_path(folder: Path, cell: str) -> Path:
    """Return the file that says whether others may take portions of a cell."""
    return folder / SHARED / OPENED / cell


def _left(portions: Sequence[Sequence[int]], known: dict[int, Result]) -> list[Sequence[int]]:
    return [portion for portion in portions if not all(i in known for i in portion)]
