"""What a run leaves for readers, put together from its finished cells in canonical order.

`config.yaml` (every setting), `env.json` (versions and machine), `rounds.jsonl` (a line per round), `images.jsonl` (a
line per attacked image), `privacy.jsonl` (a line per training that claims differential privacy), `table.md`, under
`partitions/` who holds which images, and under `images/` a PNG (originals above, reconstructions below) and an `.npz`
for every attack. The same cells give the same bytes, however often the run was stopped on the way.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from eval.experiment import yaml_config
from eval.experiment.spec import ACCURACIES
from eval.io import jsonl, manifest
from eval.io.run_layout import UNLIKE_DEFAULTS
from eval.io.text import to_sentence
from eval.metrics.perceptual import Perceptual
from eval.metrics.score import Row
from eval.report import results_table
from eval.report.load import PRIVACY, load, picture_file_names, read_pictures
from eval.report.result_groups import NOT_ATTACKED
from eval.report.results_table import Table
from eval.report.sections import partition_notes, privacy
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.sections.overview import mixed_code_warning
from eval.report.writer import write_report
from eval.run import partition_files, privacy_claims
from eval.run.attack_cell import IMAGES, PICTURES
from eval.run.lpips_columns import add_lpips
from eval.run.plan import AttackTask, CaptureTask, Plan, Source, TrainingTask
from eval.run.run_directory import RunDir
from eval.run.runner import Failure, unfinished_attacks
from eval.run.training_cell import ROUNDS
from fl.runtime.atomic_files import atomic_write, scratch_folder

CONFIG, ENVIRONMENT, TABLE, PICTURED = "config.yaml", "env.json", "table.md", "images"
log = logging.getLogger(__name__)
NO_ATTACK = "no attack was asked for"
GAP = 2
"""Pixels between the images of a grid, and around them."""
_PACKAGES = ("hyperleak", "torch", "torchvision", "numpy", "scipy", "scikit-image", "lpips", "opacus")


def assemble(plan: Plan, folder: RunDir) -> list[Row]:
    """Write the files for readers, but for the table; returns the rows of `images.jsonl`."""
    with jsonl.locked(folder.path), scratch_folder(folder.path / "readers") as new:
        rows = _assemble(plan, folder, new)
        manifest.publish(new, folder.path, folder.about_run())
    return rows


def _assemble(plan: Plan, folder: RunDir, path: Path) -> list[Row]:
    """Write all files for readers, but for the table, into the folder `path`."""
    jsonl.write_text(path / CONFIG, yaml_config.dump(plan.experiment))
    jsonl.write_text(path / ENVIRONMENT, json.dumps(environment(plan.computed_on or str(plan.device)), indent=2) + "\n")
    done = [training for training in plan.trainings if folder.finished(training.cell)]
    rounds = {training: _rounds(training, folder) for training in done}
    jsonl.replace_rows(path / ROUNDS, [row for rows in rounds.values() for row in rows])
    kept = _FinishedRows(folder, plan.perceptual)
    images = [row for training in done for row in _images(training, kept, rounds[training])]
    images += [row for capture in plan.captures for row in _captured_attack_rows(capture, kept)]
    jsonl.replace_rows(path / IMAGES, images)
    _write_claims([(training, rounds[training]) for training in done], folder, path)
    (path / PICTURED).mkdir()
    _write_pictures([*done, *plan.captures], folder, path / PICTURED)
    partition_files.write_partitions(plan, path)
    return images


def write_table_and_report(rows: Sequence[Row], failures: Sequence[Failure], plan: Plan, folder: RunDir) -> Table:
    """Write table and report beside what `assemble` wrote; returns the table.

    Args:
        rows: of `images.jsonl`, at least one.
        failures: cells that could not be finished.
        plan: of the run.
        folder: likewise.
    """
    found = results_table.build_table(rows, plan.experiment)
    found = replace(found, legend=[*table_notes(failures, plan, folder), *found.legend])
    jsonl.write_text(folder.path / TABLE, results_table.to_markdown(found))
    manifest.add_files(folder.path, TABLE)
    write_report(folder.path)
    return found


def table_notes(failures: Sequence[Failure], plan: Plan, folder: RunDir) -> list[str]:
    """Return what to know of the whole table: failures, cut-short attacks, other code, unlike defaults, claims."""
    said = (incomplete_note(failures, plan), cut_short(failures, plan, folder), mixed_code_warning(folder.about_run()))
    found = [note for note in said if note]
    if unlike := folder.about_run().get(UNLIKE_DEFAULTS):
        found.append(f"{to_sentence(str(unlike))}.")
    found += partition_notes.shared_images([about for _, about in partition_files.distinct_partitions(plan)])
    return [
        *found,
        *(
            privacy.legend_notes(NumberedGroups.from_run(load(folder.path)))
            if (folder.path / PRIVACY).is_file()
            else []
        ),
    ]


def incomplete_note(failures: Sequence[Failure], plan: Plan) -> str | None:
    """Return a sentence for the table about cells that failed, or None."""
    if not failures:
        return None
    names = "; ".join(f"{failure.name} ({failure.reason.splitlines()[0]})" for failure in failures)
    return f"Incomplete: {len(failures)} of {sum(1 for _ in plan.cells())} parts of this run failed: {names}."


def cut_short(failures: Sequence[Failure], plan: Plan, folder: RunDir) -> str | None:
    """Return a note on attacks that a time limit or an interrupt cut short or left out, or None."""
    left = unfinished_attacks(plan, folder, failures)
    if not any(left.values()) and folder.about_run().get("status") != "cut short":
        return None
    cut, never = ([name for name, begun in left.items() if begun is some] for some in (True, False))
    said = [f"Cut short by a time limit or an interrupt, with the best found by then: {'; '.join(cut)}."] if cut else []
    said += [f"Not begun: {'; '.join(never)}."] if never else []
    return " ".join([*said, "The same command without a limit computes the rest."])


def environment(device: str) -> dict[str, Any]:
    """Return what a number may depend on beside settings: versions, device, threads, commit; no paths or host name."""
    cuda = device.startswith("cuda")
    return {
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if cuda and torch.cuda.is_available() else device,
        "threads": torch.get_num_threads(),
        "commit": _commit(Path(__file__).parents[2]),
    }


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _write_claims(trainings: Sequence[tuple[TrainingTask, list[Row]]], folder: RunDir, path: Path) -> None:
    """Write what every training may claim; no file where none claims anything."""
    found = []
    for training, rounds in trainings:
        row = privacy_claims.read_claim(folder.file(training.cell, "."), training, rounds)
        if row is not None:
            found.append({**_head(training), **row})
    if found:
        jsonl.replace_rows(path / PRIVACY, found)


def _head(training: Source) -> Row:
    return {"method": training.method.label, "defense": training.defense.label, "seed": training.seed}


def _rounds(training: TrainingTask, folder: RunDir) -> list[Row]:
    return [{**_head(training), **row} for row in jsonl.read_rows(folder.file(training.cell, ROUNDS))]


@dataclass(frozen=True)
class _FinishedRows:
    """Rows of finished attacks, with LPIPS where it can be taken by now."""

    folder: RunDir
    perceptual: Perceptual | None

    def of(self, task: AttackTask, seed: int) -> list[Row] | None:
        """Return an attack's rows; None where there is nothing of it."""
        cell = self.folder.latest(task.cell)
        if cell is None:
            return None
        rows = jsonl.read_rows(self.folder.file(cell, IMAGES))
        return add_lpips(rows, self.folder.file(cell, PICTURES), self.perceptual, seed)


def _images(training: TrainingTask, kept: _FinishedRows, rounds: Sequence[Row]) -> list[Row]:
    """Return the rows of all attacks on a training, with the accuracies of their rounds and the whole training."""
    whole, by_round = _accuracies(rounds), {row["round"]: row for row in rounds}

    def accuracies(number: int) -> Row:
        own = by_round[number]
        return {"accuracy": own["accuracy"], "accuracy_local": own["accuracy_local"], **whole}

    ceilings = privacy_claims.IdentificationBounds(training, rounds)
    head = {"seed": training.seed, "method": training.method.label, "defense": training.defense.label}
    rows = [
        {**head, "attack": task.attack.label, **row, **accuracies(task.round)}
        for task in training.attack_tasks
        if (found := kept.of(task, training.seed)) is not None
        for row in ceilings.of(task, found)
    ]
    if training.attack_tasks:
        return rows
    # an accuracy to compare with, without an attack
    last = training.federation.rounds
    return [{**head, "attack": NOT_ATTACKED, "round": last, "not_applicable": NO_ATTACK, **accuracies(last)}]


def _captured_attack_rows(capture: CaptureTask, kept: _FinishedRows) -> list[Row]:
    """Return the rows of all attacks on updates that came without a training."""
    return [
        {**_head(capture), "attack": task.attack.label, **row}
        for task in capture.attack_tasks
        for row in kept.of(task, capture.seed) or ()
    ]


def _accuracies(rounds: Sequence[Row]) -> Row:
    """Return every accuracy that was taken, after the last round and in its own best round, and which that is."""
    found: Row = {"accuracy_local_last": None}
    for name in ACCURACIES:
        scored = [row for row in rounds if row.get(name) is not None]
        if not scored:
            continue
        best = max(scored, key=lambda row: row[name])  # the first of equals
        found |= {f"{name}_last": rounds[-1].get(name), f"{name}_best": best[name], f"{name}_best_round": best["round"]}
    return found


def _write_pictures(sources: Sequence[Source], folder: RunDir, new: Path) -> None:
    finished = {
        (source.method.label, source.defense.label, task.attack.label, task.round, source.seed): cell
        for source in sources
        for task in source.attack_tasks
        if (cell := folder.latest(task.cell)) is not None
    }
    for key, name in picture_file_names(finished).items():
        source = folder.file(finished[key], PICTURES)
        if not source.is_file():
            if folder.damaged_files(finished[key]):
                log.warning(
                    "the pictures of %s are gone from cells/%s, so none are shown; remove it to make them again",
                    *(name, finished[key].id),
                )
            continue
        try:
            shown = [torch.from_numpy(images) for images in read_pictures(source) if images is not None]
        except ValueError as error:
            log.warning("%s; they are left out; remove cells/%s to make them again", error, finished[key].id)
            continue
        with atomic_write(new / f"{name}.npz", into_new_folder=True) as file:
            file.write(source.read_bytes())
        write_image_grid(torch.cat(shown), new / f"{name}.png", columns=len(shown[0]))


def write_image_grid(images: Tensor, path: Path, columns: int) -> None:
    """Write a grid of images (N, C, H, W) in [0, 1], enlarged by whole pixels so that nothing is smoothed away.

    Nothing is drawn of images that have neither 1 nor 3 channels. `path` is in a folder that this process has made.
    """
    if images.shape[1] not in (1, 3):
        return
    enlarged = max(1, 96 // images.shape[-1])
    shown = images.nan_to_num(0).clamp(0, 1).repeat_interleave(enlarged, -1).repeat_interleave(enlarged, -2)
    with atomic_write(path, into_new_folder=True) as file:
        Image.fromarray(_arrange(shown, columns)).save(file, format="png")


def _arrange(images: Tensor, columns: int) -> NDArray[np.uint8]:
    """Return images in rows, on white, as bytes (height, width, 3).

    As torchvision does it, whose import would take longer than all others of a run together.
    """
    rows = math.ceil(len(images) / columns)
    columns = min(columns, len(images))
    height, width = (side + GAP for side in images.shape[-2:])
    grid = images.new_ones(3, rows * height + GAP, columns * width + GAP)
    for place, image in enumerate(images):
        top, left = (place // columns) * height + GAP, (place % columns) * width + GAP
        grid[:, top : top + height - GAP, left : left + width - GAP] = image
    return (255 * grid + 0.5).permute(1, 2, 0).to("cpu", torch.uint8).numpy()


def _commit(checkout: Path) -> str | None:
    """Return the checkout's commit, with `+changes` where files differ from it; None outside a checkout."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit, changes = (_git(checkout, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def _git(checkout: Path, *words: str) -> str:
    # without optional locks: a process that is ended on its way leaves none behind in the checkout
    command = ["git", "--no-optional-locks", "-C", str(checkout), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
