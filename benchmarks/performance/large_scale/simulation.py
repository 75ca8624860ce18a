"""Workers that share a run's folder, in simulated time: `eval.run.shared.worker` itself decides who takes which cell.

Every worker is a thread that runs `SharedRun.run`. One of them runs at a time: it computes nothing and sleeps for as
long as its cell would take, by a clock that goes on to whoever wakes next. Claims are the real ones
(`eval.run.claims`), in files; finished cells are a set. A worker that is killed leaves its claims behind, and one that
takes its place, some seconds later, takes them over as it would on a cluster.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from attacks.parallel import AttackPool
from eval.run.cache_keys import Cell
from eval.run.claims import Claims
from eval.run.observation import Observation
from eval.run.plan import AttackTask, Plan, TrainingTask
from eval.run.run_options import Options, silent
from eval.run.shared.worker import SharedRun
from fl.federation import Federation
from fl.seeds import stream


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a simulated run is computed on.

    Attributes:
        workers: how many there are at a time; each has one GPU.
        start: seconds from the start of a worker until it looks for its first cell.
        late: seconds in place of these of the workers that are there at first.
        claim: seconds that taking a cell takes.
        finish: seconds that finishing one takes.
        checkpoint: seconds of work between two checkpoints of a cell, after which that work is safe; by kind of cell.
        mean_life: seconds that a worker lives on average (exponentially distributed); infinity where none dies.
        seed: of their lives.
        deaths: when the workers that are there at first are killed, in place of chance.
    """

    workers: int
    start: float = 0.0
    late: Sequence[float] = ()
    claim: float = 0.0
    finish: float = 0.0
    checkpoint: Mapping[str, float] = field(default_factory=dict)
    mean_life: float = float("inf")
    seed: int = 0
    deaths: Sequence[float] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a simulated run.

    Attributes:
        makespan: seconds until the last cell is finished, or given up.
        work: seconds that the cells need.
        lost: seconds of work that was done and had to be done again.
        deaths: workers that were killed.
        given_up: cells that are not finished: too many workers have died with them, or with their training.
        idle: share of the workers' time in which none of them was at a cell, in [0, 1].
        order: cells in the order in which they were finished, with the seconds at which.
    """

    makespan: float
    work: float
    lost: float
    deaths: int
    given_up: int
    idle: float
    order: Sequence[tuple[str, float]]

    def plain(self) -> dict[str, float]:
        """Return the figures alone."""
        names = ("makespan", "work", "lost", "deaths", "given_up", "idle")
        return {name: float(getattr(self, name)) for name in names}


class KilledError(BaseException):
    """A simulated worker is killed."""


class VirtualClock:
    """Time for threads that run one at a time; it goes on to the moment at which the next one wakes."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waking: list[tuple[float, int, _Turn]] = []
        self._waiting: list[tuple[float, _Turn]] = []
        self._numbers = itertools.count()
        self._given_back = threading.Event()
        self._errors: list[BaseException] = []

    def begin(self, work: Callable[[], None]) -> None:
        """Have a thread do something, from now on."""
        turn = _Turn()

        def run() -> None:
            turn.event.wait()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (raised where the simulation was asked for)
                self._errors.append(error)
            self._given_back.set()

        self._wake(self.now, turn)
        threading.Thread(target=run, daemon=True).start()

    def sleep(self, seconds: float) -> None:
        """Let the others go on for so many seconds; called by the thread that runs."""
        turn = _Turn()
        self._wake(self.now + seconds, turn)
        self._give_back(turn)

    def wait(self, seconds: float, end: float) -> None:
        """Let the others go on until so many seconds after the next change, or to the end, whichever is first.

        Who looks every few seconds whether something has changed finds nothing before.
        """
        turn = _Turn()
        self._waiting.append((seconds, turn))
        if end < float("inf"):
            self._wake(end, turn)
        self._give_back(turn)

    def change(self, most: int | None = None) -> None:
        """Say that something has changed that others may wait for.

        Args:
            most: how many of them can make use of it; None is all.
        """
        waiting = [(seconds, turn) for seconds, turn in self._waiting if not turn.event.is_set()]
        for seconds, turn in waiting[:most]:
            self._wake(self.now + seconds, turn)
        self._waiting = [] if most is None else waiting[most:]

    def run(self) -> None:
        """Let all threads go on until none is left that wakes."""
        while self._waking:
            at, _, turn = heapq.heappop(self._waking)
            if turn.event.is_set():  # it had two reasons to wake, and this one comes too late
                continue
            self.now = at
            self._given_back.clear()
            turn.event.set()
            self._given_back.wait()
            if self._errors:
                raise self._errors[0]

    def _wake(self, at: float, turn: _Turn) -> None:
        heapq.heappush(self._waking, (at, next(self._numbers), turn))

    def _give_back(self, turn: _Turn) -> None:
        self._given_back.set()
        turn.event.wait()


@dataclass(frozen=True, eq=False)
class _Turn:
    """When a thread goes on."""

    event: threading.Event = field(default_factory=threading.Event)


@dataclass
class Cluster:
    """What simulated workers share.

    Attributes:
        plan: whose cells they compute.
        seconds: that each cell takes, by id.
        conditions: under which.
        path: a folder for claims.
    """

    plan: Plan
    seconds: Mapping[str, float]
    conditions: Conditions
    path: Path
    clock: VirtualClock = field(default_factory=VirtualClock)
    finished_at: dict[str, float] = field(default_factory=dict)
    safe: dict[str, float] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    lost: float = 0.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        self.cells = len({cell.id for _, cell in self.plan.cells()})
        self._lives = stream(self.conditions.seed, "lives of workers")
        self._names = itertools.count(1)

    def folder(self) -> Any:
        """Return what a worker asks of the run's folder."""
        return SimpleNamespace(path=self.path, finished=lambda cell: cell.id in self.finished_at)

    def start_worker(self, life: float | None = None, start: float | None = None) -> None:
        """Start a worker now: one whose life and start are given, or as the conditions say."""
        name = f"worker-{next(self._names)}"
        drawn = _life(self.conditions.mean_life, self._lives)
        end = self.clock.now + (drawn if life is None else life)
        begins = self.conditions.start if start is None else start
        self.clock.begin(lambda: self._live(name, begins, end))

    def _live(self, name: str, begins: float, end: float) -> None:
        try:
            spend(self.clock, begins, end)
            with closing(AttackPool(1)) as pool:
                SimulatedRun(
                    self.plan,
                    self.folder(),
                    Options(),
                    silent,
                    pool,
                    claims=SimulatedClaims(self, name, end),
                    workers=self.conditions.workers,
                    pause=lambda seconds: self._wait(seconds, end),
                    cluster=self,
                    end=end,
                ).run()
        except KilledError:
            self.dead.add(name)
            self.start_worker()

    def _wait(self, seconds: float, end: float) -> None:
        self.clock.wait(seconds, end)
        if self.clock.now >= end:
            raise KilledError

    def outcome(self) -> Outcome:
        """Return what became of the run."""
        cells = {cell.id for _, cell in self.plan.cells()}
        left = cells - set(self.finished_at)
        makespan = self.clock.now if left else max(self.finished_at.values())
        order = sorted(self.finished_at.items(), key=lambda item: item[1])
        return Outcome(
            makespan=makespan,
            work=sum(self.seconds[cell] for cell in cells),
            lost=self.lost,
            deaths=len(self.dead),
            given_up=len(left),
            idle=1 - self.busy / (self.conditions.workers * makespan),
            order=order,
        )


def spend(clock: VirtualClock, seconds: float, end: float) -> None:
    """Let time pass for a worker.

    Raises:
        KilledError: its end comes before.
    """
    left = max(end - clock.now, 0.0)
    clock.sleep(min(seconds, left))
    if seconds > left:
        raise KilledError


class SimulatedClaims(Claims):
    """Real claims of a simulated worker; one that is dead gives none up."""

    def __init__(self, cluster: Cluster, name: str, end: float) -> None:
        members = SimpleNamespace(
            is_alive=lambda other: other not in cluster.dead,
            is_gone=lambda other: other in cluster.dead,
            now=lambda: cluster.clock.now,
        )
        super().__init__(cluster.path, cast("Any", SimpleNamespace(name=name, members=members, check=lambda: None)))
        self._clock, self._end = cluster.clock, end

    def release(self, name: str) -> None:
        """Give up a claim, if this worker still can."""
        if self._clock.now < self._end:
            super().release(name)


@dataclass
class SimulatedRun(SharedRun):
    """A worker that computes nothing.

    Attributes:
        cluster: that it is part of.
        end: when it is killed.
    """

    cluster: Cluster = field(kw_only=True)
    end: float = field(kw_only=True)

    def train(self, training: TrainingTask, tasks: Sequence[AttackTask]) -> None:
        """Let the time of a training pass."""
        self._compute(training.cell)

    def attack(self, task: AttackTask, stage: str, observe: Callable[[], Observation]) -> None:
        """Let the time of an attack pass."""
        self._compute(task.cell)

    def federation_of(self, training: TrainingTask) -> AbstractContextManager[Federation]:
        """Make no federation."""
        return nullcontext(cast("Federation", None))

    def missing_rounds(self, training: TrainingTask, task: AttackTask) -> list[int]:
        """Return none: states are kept as long as an attack needs them."""
        return []

    def drop_checkpoints(self, training: TrainingTask) -> None:
        """Do nothing."""

    def _compute(self, cell: Cell) -> None:
        clock, given = self.cluster.clock, self.cluster.conditions
        began, known = clock.now, self.cluster.safe.get(cell.id, 0.0)
        every = given.checkpoint.get(str(cell.settings["kind"]), float("inf"))
        try:
            spend(clock, given.claim, self.end)
            worked = clock.now
            spend(clock, self.cluster.seconds[cell.id] - known, self.end)
        except KilledError:
            done = max(clock.now - worked, 0.0) if clock.now > began + given.claim else 0.0
            kept = done // every * every if every < float("inf") else 0.0
            self.cluster.safe[cell.id] = known + kept
            self.cluster.lost += done - kept
            self.cluster.busy += clock.now - began
            if kept:
                self.claims.progress(cell.id)
            self.cluster.dead.add(self.claims.member.name)
            clock.change(most=1)  # one cell is free again
            raise
        spend(clock, given.finish, self.end)
        self.cluster.busy += clock.now - began
        self.cluster.finished_at[cell.id] = clock.now
        if cell.settings["kind"] == "training" or len(self.cluster.finished_at) == self.cluster.cells:
            clock.change()  # after an attack there is nothing new to do


def simulate(plan: Plan, seconds: Mapping[str, float], conditions: Conditions) -> Outcome:
    """Return what becomes of a run of cells of known length.

    Args:
        plan: of the run.
        seconds: that each cell takes a worker, by id.
        conditions: under which.
    """
    with tempfile.TemporaryDirectory() as place:
        cluster = Cluster(plan, seconds, conditions, Path(place))
        first = itertools.zip_longest(conditions.deaths, conditions.late, range(conditions.workers))
        for life, start, _ in first:
            cluster.start_worker(life, start)
        cluster.clock.run()
        return cluster.outcome()


def _life(mean: float, generator: torch.Generator) -> float:
    """Return the seconds that a worker lives; always one number of the generator's, so that runs are comparable."""
    return mean * float(torch.empty((), dtype=torch.float64).exponential_(generator=generator))
