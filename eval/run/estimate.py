"""What the cells of a plan will cost, before anything of it is computed.

What is known best goes first: the seconds that a cell of the same kind took, in this run's folder or in one beside it,
else in a published run of this checkout, on whatever machine that was computed; else the gradients that it takes, times
the seconds of one, measured here on the network itself; else nothing. Whatever is measured takes about a second in all.
"""

from __future__ import annotations

import json
import logging
import math
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any

import torch

from eval.experiment.serialization import attack_spec
from eval.io import jsonl
from eval.io.errors import RUN_ERRORS
from eval.io.text import format_count
from eval.run.cache_keys import Cell
from eval.run.lpips_columns import with_finished_cells
from eval.run.plan import AttackTask, Plan, TrainingTask
from eval.run.run_directory import CELL, RunDir, about_cell
from fl.federation import n_sampled
from fl.method import Method
from fl.types import Batch, Phase, Task

MEASURED_SECONDS = 1.0
"""Seconds that all measurements may take, about."""
GRADIENT_OF_GRADIENT = 3
"""Gradients that one iteration of a search is taken to cost: it goes through the gradient of the client's."""
FORWARD = 1 / 3
"""Gradients that a pass through the network without one is taken to cost."""
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
    here, committed = KnownTimes(_cells_beside(folder.path)), KnownTimes(_committed_cells())
    steps = StepTimes(MEASURED_SECONDS)
    names = {cell.id: name for name, cell in reversed(list(plan.cells()))}
    found: dict[str, CellCost] = {}
    for one in plan.trainings:
        seen = [known.training(one.cell.settings) for known in (here, committed)]
        measure = partial(_training_seconds, one, steps)
        found.setdefault(one.cell.id, _cost(folder, one.cell, names[one.cell.id], seen, measure))
        for watch in one.attack_tasks:
            seen = [known.attack(watch.cell.settings, one.cell.settings) for known in (here, committed)]
            measure = partial(_attack_seconds, one, watch, steps)
            found.setdefault(watch.cell.id, _cost(folder, watch.cell, names[watch.cell.id], seen, measure))
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
    return CellCost(cell.id, name, kind, False, measured, "unknown" if measured is None else "one gradient, timed here")


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


def _committed_cells() -> dict[str, dict[str, Any]]:
    """Return what the cells of published runs state of themselves, where this is a checkout that has them."""
    found: dict[str, dict[str, Any]] = {}
    for archive in sorted(COMMITTED.glob("*.tar.xz")):
        try:
            with tarfile.open(archive) as file:
                for member in file:
                    path = PurePosixPath(member.name)
                    if path.name == CELL and member.isfile() and (content := file.extractfile(member)):
                        found.setdefault(path.parent.name, jsonl.parse(content.read()))
        except (OSError, ValueError, tarfile.TarError) as error:
            log.info("%s can't be read: %s", archive.name, error)
    return found


# ---- by the time of a gradient ---------------------------------------------------------------------------------------
class StepTimes:
    """Seconds of one gradient of a network, measured once for each size of batch.

    Args:
        seconds: that all measurements may take; what comes later is not measured.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._known: dict[str, float | None] = {}
        self._task: tuple[str, Task] | None = None

    def task(self, one: TrainingTask) -> Task:
        """Return the network of a training, from whatever seed; the last is kept, as it may take seconds to make."""
        key = json.dumps(one.cell.settings["task"], sort_keys=True)
        if self._task is None or self._task[0] != key:
            self._task = key, one.data.task(one.seed)
        return self._task[1]

    def gradient(self, one: TrainingTask, size: int) -> float | None:
        """Return the seconds of a gradient of so many images, or None."""
        key = json.dumps([one.cell.settings["task"], size], sort_keys=True)
        if key not in self._known:
            began = time.monotonic()
            self._known[key] = _measured(one, self.task(one), size) if self._left > 0 else None
            self._left -= time.monotonic() - began
        return self._known[key]


def _measured(one: TrainingTask, task: Task, size: int) -> float | None:
    try:
        batch = one.data.dataset.train.take(torch.arange(size) % len(one.data.dataset.train))
        _gradient(task, batch)  # loads what is loaded on first use
        began = time.perf_counter()
        _gradient(task, batch)
        return time.perf_counter() - began
    except RUN_ERRORS as error:  # no network to call by itself, say
        log.info("%s: no gradient can be timed: %s", one.name, error)
        return None


def _gradient(task: Task, batch: Batch) -> None:
    loss = task.loss(task.model(batch.inputs), batch.labels)
    torch.autograd.grad(loss, [value for value in task.model.parameters() if value.requires_grad], allow_unused=True)
    if loss.is_cuda:
        torch.cuda.synchronize()


def _training_seconds(one: TrainingTask, steps: StepTimes) -> float | None:
    """Return what a training takes: the gradients of all clients, and what they are scored by."""
    federation, partition = one.federation, one.data.partition
    clients = len(partition) - federation.held_out_clients
    if clients < 1:
        return None
    sizes = Counter(len(own) for own in partition.train[:clients])  # of thousands of clients most are alike
    each = [_times(count, _local_seconds(one, one.method.item, images, steps)) for images, count in sizes.items()]
    sizes = Counter(len(own) for own in partition.test[:clients])
    scored = [_times(count, _passes(one, images, steps)) for images, count in sizes.items()]
    if any(value is None for value in (*each, *scored)):
        return None
    share = n_sampled(federation.client_fraction, clients) / clients
    rounds, evaluated = federation.rounds, 1 + math.ceil(federation.rounds / federation.evaluate_every)
    return rounds * share * sum(filter(None, each)) + evaluated * sum(filter(None, scored))


def _times(count: int, seconds: float | None) -> float | None:
    return None if seconds is None else count * seconds


def _attack_seconds(one: TrainingTask, watch: AttackTask, steps: StepTimes) -> float | None:
    """Return what a search takes; nobody can tell of other attacks."""
    iterations = _iterations(attack_spec(watch.attack.item))
    if iterations is None:
        return None
    each = [
        _local_seconds(one, watch.observation_spec.method, len(member.data), steps)
        for target in watch.observation_spec.targets
        for member in target.group
    ]
    if any(value is None for value in each):
        return None
    return GRADIENT_OF_GRADIENT * iterations * sum(filter(None, each))


def _local_seconds(one: TrainingTask, method: Method, images: int, steps: StepTimes) -> float | None:
    """Return what one client's training in a round takes, from its gradients alone."""
    total = 0.0
    for phase in method.phases(steps.task(one), 0):
        size = min(phase.batch_size or images, images)
        seconds = steps.gradient(one, size) if size else 0.0
        if seconds is None:
            return None
        total += seconds * _gradients(phase, images, size)
    return total


def _gradients(phase: Phase, images: int, size: int) -> int:
    return phase.batches_per_step * (phase.steps or (phase.epochs or 0) * math.ceil(images / max(size, 1)))


def _passes(one: TrainingTask, images: int, steps: StepTimes) -> float | None:
    seconds = steps.gradient(one, images) if images else 0.0
    return None if seconds is None else FORWARD * seconds


def _iterations(settings: object) -> int | None:
    """Return the iterations of a search, of all its trials together; None where it is none."""
    if not isinstance(settings, dict):
        return None
    if isinstance(own := settings.get("iterations"), int):
        trials = [value for key in ("trials", "restarts") if isinstance(value := settings.get(key), int)]
        return own * math.prod(trials)
    inner: Iterable[int | None] = map(_iterations, settings.values())
    return max((count for count in inner if count is not None), default=None)
