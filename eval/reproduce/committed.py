"""Which rows of a table are measured, as read from committed cells: nothing is written down by hand.

A row counts at a scale where every cell that it takes is committed, for all seeds and under all defenses: same network,
data set, partition, method, rounds, attack, threat model and observation. Not compared are the device, the version of
this package and the images themselves, as no data set is loaded for it: one that is at hand in part counts as itself.
"""

from __future__ import annotations

import json
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from eval.experiment import sweep
from eval.experiment.spec import Entry, Experiment
from eval.reproduce.items import PaperRow, matching, rows_of
from eval.run.cache_keys import TrainedUpdates, attack_cell, short_hash, training_cell
from eval.run.federation_data import FederationData
from eval.run.plan import watched_rounds
from fl.method import Method

CELLS = Path(__file__).parents[2] / "docs" / "results" / "cells"
"""Archives of cells; an installation without the documents has none."""
TRAINING_KEYS = ("task", "federation", "method", "defense", "seed")
ATTACK_KEYS = ("round", "method", "attack", "threat", "observe")
LARGEST = 2**26
"""Bytes of a file in an archive that is read."""


@dataclass(frozen=True)
class CommittedRun:
    """A committed run of a config, as its `run.json` tells of it.

    Attributes:
        config: name of the config as it was given.
        changes: words of the command that changed settings, such as `task.dataset=handwritten62`.
        rows: what is finished, by label.
    """

    config: str
    changes: tuple[str, ...]
    rows: frozenset[PaperRow]


@dataclass(frozen=True)
class Committed:
    """All committed cells.

    Attributes:
        keys: hashes of what cells are of.
        runs: the runs they were computed in, as far as that is on file.
    """

    keys: frozenset[str] = frozenset()
    runs: tuple[CommittedRun, ...] = ()


@dataclass
class _Archive:
    """What is read of one archive."""

    trainings: dict[str, str] = field(default_factory=dict)
    attacks: list[dict[str, Any]] = field(default_factory=list)
    runs: list[CommittedRun] = field(default_factory=list)

    def keys(self) -> Iterator[str]:
        yield from self.trainings.values()
        for settings in self.attacks:
            if settings.get("training") in self.trainings:
                yield _attack_key(settings, self.trainings[settings["training"]])


def read_committed(folder: Path = CELLS) -> Committed:
    """Read the archives of cells in a folder; nothing where there is no folder.

    Raises:
        ValueError: an archive is damaged; says which.
    """
    keys, runs = set[str](), list[CommittedRun]()
    for path in sorted(folder.glob("*.tar.xz")):
        try:
            archive = _read_archive(path)
        except (tarfile.TarError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} can't be read as an archive of cells: {error}") from error
        keys.update(archive.keys())
        runs += archive.runs
    return Committed(frozenset(keys), tuple(runs))


def cells_by_row(experiment: Experiment) -> dict[PaperRow, set[str]]:
    """Return hashes of the cells that each method, and each attack on it, comes to; loads no data.

    The cells of an attack's training are among those of the attack.
    """
    found: dict[PaperRow, set[str]] = {}
    for seed in experiment.seeds:
        for method in experiment.method:
            for defense in experiment.defense:
                own = sweep.experiment_of(experiment, method, None)
                # all that a cell takes of data but for their digest, which is not compared
                data = cast("FederationData", SimpleNamespace(task_spec=own.task, digest="", device_kind="cpu"))
                training = training_cell(data, own.federation, method.item, defense.item, seed)
                key = _training_key(training.settings)
                found.setdefault(PaperRow(method.label), set()).add(key)
                for attack in experiment.attack:
                    if not attack.against or method.label in attack.against:
                        part = sweep.experiment_of(experiment, method, attack)
                        row = PaperRow(method.label, attack.label)
                        found.setdefault(row, set()).update({key, *_attack_keys(part, method, attack, training, key)})
    return found


def count_measured(experiment: Experiment, committed: Committed) -> int:
    """Return how many of an experiment's rows have all of their cells committed."""
    cells = cells_by_row(experiment)
    count = 0
    for row in rows_of(experiment):
        parts = matching(experiment, row)
        wanted = set[str]().union(*(cells.get(part, set()) for part in parts))
        count += bool(wanted) and wanted <= committed.keys
    return count


def runs_of(config: str, committed: Committed) -> list[CommittedRun]:
    """Return the committed runs of a config, whatever settings were changed.

    Args:
        config: its name below `reproduce`.
        committed: all cells.
    """
    return [run for run in committed.runs if f"/{config}".endswith(f"/{_short(run.config)}")]


def _short(config: str) -> str:
    return config.removesuffix(".yaml").removeprefix("configs/").removeprefix("reproduce/")


def _attack_keys(part: Experiment, method: Entry[Method], attack: Entry[Any], training: Any, key: str) -> Iterator[str]:
    observed = part.observed_methods()[method.label]
    for number in watched_rounds(part, method):
        updates = TrainedUpdates(training, number, observed, part.threat, part.observe)
        yield _attack_key(attack_cell(updates, attack.item, part.score, None).settings, key)


def _training_key(settings: Mapping[str, Any]) -> str:
    return short_hash({key: settings[key] for key in TRAINING_KEYS})


def _attack_key(settings: Mapping[str, Any], training: str) -> str:
    return short_hash({**{key: settings[key] for key in ATTACK_KEYS}, "training": training})


def _read_archive(path: Path) -> _Archive:
    found = _Archive()
    with tarfile.open(path, "r:xz") as archive:
        for member in archive:
            name = Path(member.name)
            if name.name not in {"cell.json", "run.json"} or not member.isfile() or member.size > LARGEST:
                continue
            file = archive.extractfile(member)
            assert file is not None  # of a regular file
            data = json.loads(file.read())
            if name.name == "run.json":
                found.runs += _read_run(data)
            elif (settings := data["settings"])["kind"] == "training":
                found.trainings[name.parent.name] = _training_key(settings)
            elif not settings.get("cut_short"):
                found.attacks.append(settings)
    return found


def _read_run(data: Mapping[str, Any]) -> Iterator[CommittedRun]:
    """Yield what a `run.json` tells of its run; nothing of a command that is none of ours."""
    _, _, config, *words = [*shlex.split(str(data.get("command", ""))), "", "", ""][: -3 or None]
    rows = [_row(str(cell["name"])) for cell in data["cells"] if cell.get("status") == "finished"]
    changes = tuple(words[i + 1] for i, word in enumerate(words[:-1]) if word == "--set")
    if config:
        yield CommittedRun(config, changes, frozenset(rows))


def _row(name: str) -> PaperRow:
    """Return what a cell is of by the name it has in `run.json`: `fedavg + prune (seed 1): ig after round 0`."""
    training, _, attack = name.partition(": ")
    method = training.partition(" (seed ")[0].partition(" + ")[0]
    return PaperRow(method, attack.partition(" after round ")[0] or None)
