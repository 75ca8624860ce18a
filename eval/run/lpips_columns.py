"""LPIPS for attacks that were finished before its weights were at hand: their cells stay, their pictures are scored."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from eval.metrics.baselines import baseline_images
from eval.metrics.perceptual import CHECKPOINTS, Lpips, Perceptual
from eval.metrics.score import NO_RECONSTRUCTION, Row
from eval.report.load import read_pictures
from eval.run.cache_keys import Cell
from eval.run.plan import AttackTask, CaptureTask, Plan, TrainingTask
from eval.run.run_directory import RunDir
from fl.seeds import derive_seed

log = logging.getLogger(__name__)


def with_finished_cells(plan: Plan, folder: RunDir) -> Plan:
    """Return the plan in which attacks that are finished but for LPIPS, or with another backbone's, need not be run.

    Where `score.lpips` names a backbone, a cell with another one's is not taken.

    Args:
        plan: of the run.
        folder: with its finished cells.
    """

    def trained(training: TrainingTask) -> TrainingTask:
        return replace(training, attack_tasks=_with_finished(training.attack_tasks, folder))

    def captured(capture: CaptureTask) -> CaptureTask:
        return replace(capture, attack_tasks=_with_finished(capture.attack_tasks, folder))

    return replace(plan, trainings=tuple(map(trained, plan.trainings)), captures=tuple(map(captured, plan.captures)))


def with_cells(plan: Plan, ids: Collection[str]) -> Plan:
    """Return the plan with the cells of another process's plan of the same, which may be other backbones'.

    Args:
        plan: as it was made here.
        ids: of the cells there.
    """

    def chosen(task: AttackTask) -> AttackTask:
        cells = (task.cell, *_others(task))
        return replace(task, cell=next((cell for cell in cells if cell.id in ids), task.cell))

    trainings = [replace(one, attack_tasks=tuple(map(chosen, one.attack_tasks))) for one in plan.trainings]
    return replace(plan, trainings=tuple(trainings))


def _with_finished(tasks: Sequence[AttackTask], folder: RunDir) -> tuple[AttackTask, ...]:
    changed: dict[int, AttackTask] = {}
    for task in tasks:
        cell = task.cell
        if not folder.finished(cell):
            cell = next((other for other in _others(task) if folder.finished(other)), cell)
        before = tuple(changed.get(id(other), other) for other in task.after)
        changed[id(task)] = replace(task, cell=cell, after=before)
    return tuple(changed.values())


def _others(task: AttackTask) -> Iterator[Cell]:
    """Yield the cells that differ from a task's in LPIPS alone: those that have none, then other backbones'."""
    asked, own = task.cell.settings["lpips"]
    for net in (None, *CHECKPOINTS) if asked == "auto" else (None,):
        if net != own:
            yield _with_backbone(task, net)


def _with_backbone(task: AttackTask, net: str | None) -> Cell:
    settings = {**task.cell.settings, "lpips": [task.cell.settings["lpips"][0], net]}
    if task.after:
        settings["after"] = [_with_backbone(other, net).id for other in task.after]
    return Cell(settings)


def add_lpips(rows: list[Row], pictures: Path, perceptual: Perceptual | None, seed: int) -> list[Row]:
    """Return an attack's rows with LPIPS of its pictures, where they lack it and the pictures are there.

    Baselines get it, too, but for the nearest image, which is not among the pictures.

    Args:
        rows: of `images.jsonl`, as the attack's cell has them.
        pictures: its `pictures.npz`; may be missing.
        perceptual: LPIPS of the plan.
        seed: of the training or the audit.
    """
    shown = [i for i, row in enumerate(rows) if row.get("psnr") is not None]
    if not isinstance(perceptual, Lpips) or not shown or not pictures.is_file():
        return rows
    try:
        original, found = read_pictures(pictures)
    except ValueError as error:
        log.warning("%s, so no LPIPS is taken of them", error)
        return rows
    if original is None or len(original) != len(shown) or original.shape[1] not in (1, 3):
        return rows
    name = perceptual.name(*original.shape[2:])
    if all(name in rows[i] for i in shown):
        return rows
    true, guess = torch.from_numpy(original), torch.from_numpy(found)
    scored, at = list(rows), 0
    for _, several in groupby(shown, key=lambda i: rows[i]["update"]):
        places = list(several)
        part = slice(at, at + len(places))
        at += len(places)
        own = [rows[i] for i in places]
        noise = derive_seed(seed, "floor", own[0]["update"])
        for i, row in zip(places, _scored(own, true[part], guess[part], perceptual, noise), strict=True):
            scored[i] = row
    return scored


def _scored(rows: Sequence[Row], true: Tensor, guess: Tensor, perceptual: Lpips, noise: int) -> list[Row]:
    """Return the rows of one update with its LPIPS, in the place of what they say of it."""
    name = perceptual.name(*true.shape[2:])
    values = perceptual(guess, true).tolist()
    floors = {key: perceptual(images, true).tolist() for key, images in baseline_images(true, seed=noise).items()}
    scored = []
    for i, row in enumerate(rows):
        kept = {key: value for key, value in row.items() if "lpips_" not in key}
        missing = {key: value for key, value in row.get("missing", {}).items() if "lpips_" not in key}
        value = values[i] if row["matched"] is not None and math.isfinite(values[i]) else None
        if value is None:
            missing[name] = NO_RECONSTRUCTION
        kept |= {name: value, **{f"floor_{key}_{name}": column[i] for key, column in floors.items()}}
        scored.append({**kept, "missing": missing})
    return scored
