"""What the cells of a plan will cost, before anything of it is computed.

What is known best goes first: the seconds that a cell of the same kind took, in this run's folder or in one beside it,
else in a published run of this checkout, on whatever machine that was computed; else what `eval.run.unit_costs` counts,
at the pace of one gradient of the network that is timed here; else nothing. Timing takes about a second in all.
"""

from __future__ import annotations

import json
import logging
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any

import torch

from eval.io import jsonl
from eval.io.errors import RUN_ERRORS
from eval.io.text import format_count
from eval.run.cache_keys import Cell
from eval.run.lpips_columns import with_finished_cells
from eval.run.plan import AttackTask, Plan, TrainingTask
from eval.run.run_directory import CELL, RunDir, about_cell
from eval.run.unit_costs import (
    ClientImages,
    NetworkWork,
    TrainingWork,
    attack_seconds,
    gradient_seconds,
    training_seconds,
    work_of,
)
from fl.types import Batch, Task

MEASURED_SECONDS = 1.0
"""Seconds that all measurements may take, about."""
PACE_IMAGES = 32
"""Images of the gradient that is timed."""
COMMITTED = Path(__file__).parents[2] / "docs" / "results" / "cells"
"""Where a checkout keeps the cells of published runs."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CellCost:
    """What is known of a cell's cost.

    Attributes:
        id: of the cell.
        name: for people.
        kind: `training` or `attack`.
        is_finished: whether it is there already.
        seconds: that it took, or will take on one worker; None where nobody can tell.
        basis: what that is known from, in words.
    """

    id: str
    name: str
    kind: str
    is_finished: bool
    seconds: float | None
    basis: str


@dataclass(frozen=True)
class PlanCost:
    """What is known of a plan's cost.

    Attributes:
        cells: each of its cells, once.
    """

    cells: tuple[CellCost, ...]

    @property
    def open(self) -> list[CellCost]:
        """Cells that are to be computed."""
        return [cell for cell in self.cells if not cell.is_finished]

    @property
    def unknown(self) -> int:
        """How many open cells nobody can tell the cost of."""
        return sum(cell.seconds is None for cell in self.open)

    def seconds(self, workers: int = 1) -> float:
        """Return what the open cells of known cost take, shared out evenly."""
        return sum(cell.seconds or 0.0 for cell in self.open) / workers


def estimate(plan: Plan, folder: RunDir) -> PlanCost:
    """Return what each cell of an experiment costs."""
    plan = with_finished_cells(plan, folder)
    here, committed = KnownTimes(_cells_beside(folder.path)), KnownTimes(committed_cells())
    counted = _CountedCosts()
    names = {cell.id: name for name, cell in reversed(list(plan.cells()))}
    found: dict[str, CellCost] = {}
    for training in plan.trainings:
        seen = [known.training(training.cell.settings) for known in (here, committed)]
        measure = partial(counted.training, training)
        found.setdefault(training.cell.id, _cost(folder, training.cell, names[training.cell.id], seen, measure))
        for task in training.attack_tasks:
            seen = [known.attack(task.cell.settings, training.cell.settings) for known in (here, committed)]
            measure = partial(counted.attack, training, task)
            found.setdefault(task.cell.id, _cost(folder, task.cell, names[task.cell.id], seen, measure))
    return PlanCost(tuple(found.values()))


def _cost(
    folder: RunDir, cell: Cell, name: str, seen: Sequence[tuple[float | None, int]], measure: Callable[[], float | None]
) -> CellCost:
    """Return the cost of one cell by the best known: `seen` of others of its kind, here and committed."""
    kind = str(cell.settings["kind"])
    if folder.finished(cell):
        return CellCost(cell.id, name, kind, True, float(folder.about(cell)["seconds"]), "finished")
    for (seconds, count), what in zip(seen, ("finished cell", "committed cell"), strict=True):
        if seconds is not None:
            return CellCost(cell.id, name, kind, False, seconds, f"{format_count(count, what)} of its kind")
    measured = measure()
    return CellCost(cell.id, name, kind, False, measured, "unknown" if measured is None else "counts, timed here")


# ---- by finished cells -----------------------------------------------------------------------------------------------
class KnownTimes:
    """Seconds of finished cells, by their kind: all settings but those that change no cost.

    Args:
        cells: what finished cells state of themselves, by id.
    """

    def __init__(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        self._trainings: dict[str, list[float]] = {}
        self._attacks: dict[str, list[float]] = {}
        for about in cells.values():
            with suppress(LookupError, TypeError, ValueError):  # of another version's
                self._add(about["settings"], float(about["seconds"]), cells)

    def _add(self, settings: Mapping[str, Any], seconds: float, cells: Mapping[str, Mapping[str, Any]]) -> None:
        if settings["kind"] == "training":
            each = seconds / max(settings["federation"]["rounds"], 1)
            self._trainings.setdefault(_training_kind(settings), []).append(each)
        elif "cut_short" not in settings and (training := cells.get(settings["training"])):
            self._attacks.setdefault(_attack_kind(settings, training["settings"]), []).append(seconds)

    def training(self, settings: Mapping[str, Any]) -> tuple[float | None, int]:
        """Return the seconds of a training by those of its kind, and of how many; None where there is none."""
        each = self._trainings.get(_training_kind(settings), [])
        return (fmean(each) * max(settings["federation"]["rounds"], 1) if each else None), len(each)

    def attack(self, settings: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[float | None, int]:
        """Return the seconds of an attack on a training, likewise."""
        each = self._attacks.get(_attack_kind(settings, training), [])
        return (fmean(each) if each else None), len(each)


def _training_kind(settings: Mapping[str, Any]) -> str:
    federation = {key: value for key, value in settings["federation"].items() if key != "rounds"}
    kept = {key: settings[key] for key in ("task", "method", "defense", "device")}
    return json.dumps([federation, kept], sort_keys=True)


def _attack_kind(settings: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    observe = {key: value for key, value in settings["observe"].items() if key not in ("seed", "clients", "classes")}
    kept = {key: settings[key] for key in ("attack", "method", "threat", "lpips")}
    of = {key: training[key] for key in ("task", "defense", "device")}
    return json.dumps([observe, kept, of, settings["round"] > 0], sort_keys=True)


def _cells_beside(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the finished cells of a run, and of runs in folders beside it, state of themselves."""
    runs = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
    found: dict[str, dict[str, Any]] = {}
    for run in dict.fromkeys([folder, *runs]):
        for path in sorted((run / "cells").glob(f"*/{CELL}")):
            try:
                about = about_cell(path.parent)
            except (OSError, ValueError):  # damaged, or of another program
                continue
            if isinstance(about.get("settings"), dict):
                found.setdefault(path.parent.name, about)
    return found


def committed_cells() -> dict[str, dict[str, Any]]:
    """Return what the cells of published runs state of themselves, where this is a checkout that has them."""
    return dict(_stated_in(tuple((path, path.stat().st_mtime_ns) for path in sorted(COMMITTED.glob("*.tar.xz")))))


@lru_cache(maxsize=1)
def _stated_in(archives: tuple[tuple[Path, int], ...]) -> dict[str, dict[str, Any]]:
    """Return what cells state of themselves in archives as they were at a time: unpacking takes half a second."""
    found: dict[str, dict[str, Any]] = {}
    for archive, _ in archives:
        try:
            with tarfile.open(archive) as file:
                for member in file:
                    path = PurePosixPath(member.name)
                    if path.name == CELL and member.isfile() and (content := file.extractfile(member)):
                        found.setdefault(path.parent.name, jsonl.parse(content.read()))
        except (OSError, ValueError, tarfile.TarError) as error:
            log.info("%s can't be read: %s", archive.name, error)
    return found


# ---- by counts, at the pace of this machine --------------------------------------------------------------------------
class Pace:
    """Seconds here for each that is counted, by the time of one gradient of a network.

    Args:
        seconds: that all measurements may take; for networks that come later the pace of the one before is taken.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._latest = 1.0
        self._known: dict[str, float] = {}

    def of(self, training: TrainingTask, task: Task, network: NetworkWork) -> float:
        """Return the pace of a training's network."""
        key = json.dumps(training.cell.settings["task"], sort_keys=True)
        if key not in self._known:
            began = time.monotonic()
            size = min(PACE_IMAGES, len(training.data.dataset.train))
            seconds = _measured(training, task, size) if self._left > 0 else None
            if seconds is not None:
                self._latest = seconds / gradient_seconds(network, size)
            self._known[key] = self._latest
            self._left -= time.monotonic() - began
        return self._known[key]


def _measured(training: TrainingTask, task: Task, size: int) -> float | None:
    """Return the seconds of one gradient of so many images, the less of two; None where it can't be timed."""
    try:
        batch = training.data.dataset.train.take(torch.arange(size))
        found = []
        for _ in range(3):  # the first loads what is loaded on first use
            began = time.perf_counter()
            _gradient(task, batch)
            found.append(time.perf_counter() - began)
        return min(found)
    except RUN_ERRORS as error:  # no network to call by itself, say
        log.info("%s: no gradient can be timed: %s", training.name, error)
        return None


def _gradient(task: Task, batch: Batch) -> None:
    loss = task.loss(task.model(batch.inputs), batch.labels)
    torch.autograd.grad(loss, [value for value in task.model.parameters() if value.requires_grad], allow_unused=True)
    if loss.is_cuda:
        torch.cuda.synchronize()


class _CountedCosts:
    """What the trainings of a plan and attacks on them cost by counts; what several of them share is counted once."""

    def __init__(self) -> None:
        self._pace = Pace(MEASURED_SECONDS)
        self._latest: tuple[str, Task, NetworkWork | None] | None = None

    def training(self, training: TrainingTask) -> float | None:
        """Return what a training takes."""
        work = self._work(training)
        return None if work is None else self._pace.of(training, work.task, work.network) * training_seconds(work)

    def attack(self, training: TrainingTask, task: AttackTask) -> float | None:
        """Return what an attack on a training takes; None where nobody can tell."""
        work, spec = self._work(training), task.observation_spec
        if work is None or not spec.targets:
            return None
        images = fmean(len(member.data) for target in spec.targets for member in target.group)
        found = attack_seconds(work, task.attack.item, spec.method, len(spec.targets), images)
        return None if found is None else self._pace.of(training, work.task, work.network) * found

    def _work(self, training: TrainingTask) -> TrainingWork | None:
        key = json.dumps(training.cell.settings["task"], sort_keys=True)
        if self._latest is None or self._latest[0] != key:  # the last is kept, as it may take seconds to make
            task = training.data.task(training.seed)
            self._latest = key, task, work_of(task)
        _, task, network = self._latest
        images = _images(training)
        if network is None or images is None:
            return None
        return TrainingWork(
            task=task,
            network=network,
            federation=training.federation,
            method=training.method.item,
            defense=training.defense.item,
            images=images,
        )


def _images(training: TrainingTask) -> ClientImages | None:
    """Return how many images the clients of a training have; None where none takes part."""
    held_out, parts = training.federation.held_out_clients, training.data.partition
    count = len(parts) - held_out
    if count < 1:
        return None
    return ClientImages(
        clients=count,
        train=fmean(map(len, parts.train[:count])),
        test=fmean(map(len, parts.test[:count])),
        held_out=held_out,
        global_test=len(training.data.dataset.test) if training.federation.global_test else 0,
    )
