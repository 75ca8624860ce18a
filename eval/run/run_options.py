"""How a run is done, who hears how far it is, and what is said of a cell that could not be finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from attacks.search_control import SearchControl, SearchProgress
from eval.run.executors.choice import ExecutorChoice
from eval.run.plan import AttackTask, Source


class Progress(Protocol):
    """Told what is going on."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Hear that `done` of `total` parts of `stage` are done; called with 0 when it starts."""


def silent(stage: str, done: int, total: int) -> None:
    """Tell no one how far a run is: a `Progress`."""


class AttackFilter(Protocol):
    """Asked before an attack is run."""

    def __call__(self, source: Source, task: AttackTask) -> bool:
        """Return whether an attack is still of use after those before it."""


def keep_all(source: Source, task: AttackTask) -> bool:
    """Return true: an `AttackFilter` that leaves nothing out."""
    return True


class SearchListener(Protocol):
    """Told how far searches are."""

    def __call__(self, stage: str, progress: SearchProgress) -> None:
        """Hear how far the search of `stage` has come, in all processes together."""


def ignore_search(stage: str, progress: SearchProgress) -> None:
    """Tell no one how far a search is: a `SearchListener`."""


@dataclass(frozen=True)
class RunProgress:
    """How far a run is that several workers compute.

    Attributes:
        done: cells that are finished.
        total: cells of the run.
        workers: that are at work.
        seconds_left: what the rest takes them, by cells of the same kind that are finished; None where none is.
    """

    done: int
    total: int
    workers: int
    seconds_left: float | None


class RunListener(Protocol):
    """Told how far a whole run is."""

    def __call__(self, progress: RunProgress) -> None:
        """Hear how far all workers have come together."""


def ignore_run(progress: RunProgress) -> None:
    """Tell no one how far a whole run is: a `RunListener`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is done; none of it changes a number of a cell that is finished.

    Attributes:
        workers: processes to spread clients and attacked updates over.
        checkpoint_seconds: between checkpoints of a training.
        keep_checkpoints: whether they stay when no unfinished cell needs them.
        name: what the run is called.
        command: what it was started by.
        unlike_defaults: defaults in which its methods differ (`eval.experiment.default_differences`), in a line for
            readers; None keeps what the folder says of the same experiment.
        module_folder: where the module of `task.model` lies, relative to the current folder; empty where nothing is to
            be said of it.
        needed: which attacks are of use; others are left out, and no part of the run.
        control: ends searches and trainings after a time, or at an interrupt, and with them the run. What is left of
            the time is shared equally among the searches and trainings that are left.
        on_search: told how far a search is, with the name of its stage.
        on_run: told how far the whole is, where an executor's workers compute it.
        executor: what starts workers that compute the cells; None has this process do so.
    """

    workers: int = 1
    checkpoint_seconds: float = 60.0
    keep_checkpoints: bool = False
    name: str = ""
    command: str = ""
    unlike_defaults: str | None = None
    module_folder: str = ""
    needed: AttackFilter = keep_all
    control: SearchControl = field(default_factory=SearchControl)
    on_search: SearchListener = ignore_search
    on_run: RunListener = ignore_run
    executor: ExecutorChoice | None = None


@dataclass(frozen=True)
class Failure:
    """A cell that could not be finished.

    Attributes:
        id: of the cell.
        name: for people.
        reason: the error, in a line.
        traceback: where it is kept, inside the run's folder.
        origin: the file and the line that raised it, the last of the user's own code or ours.
    """

    id: str
    name: str
    reason: str
    traceback: str
    origin: str = ""
