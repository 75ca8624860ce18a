"""Which rows of a table are measured, as read from committed cells: nothing is written down by hand.

A row counts at a scale where every cell that it takes is committed, for all seeds and under all defenses: same network,
data set, partition, method, rounds, attack, threat model and observation. Not compared are the device, the version of
this package and the images themselves, as no data set is loaded for it: one that is at hand in part counts as itself.
"""

from __future__ import annotations

import json
import shlex
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.experiment.spec import Experiment
from eval.reproduce.cells import PlannedCell, planned_cells
from eval.reproduce.items import CELLS, PaperRow, matching, rows_of
from eval.run.cache_keys import short_hash
from eval.run.estimate import KnownTimes

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
        times: how long cells took.
    """

    keys: frozenset[str] = frozenset()
    runs: tuple[CommittedRun, ...] = ()
    times: KnownTimes = field(default_factory=lambda: KnownTimes({}))


@dataclass
class _Archive:
    """What is read of one archive."""

    trainings: dict[str, str] = field(default_factory=dict)
    attacks: list[dict[str, Any]] = field(default_factory=list)
    runs: list[CommittedRun] = field(default_factory=list)
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

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
    keys, runs, cells = set[str](), list[CommittedRun](), dict[str, dict[str, Any]]()
    for path in sorted(folder.glob("*.tar.xz")):
        try:
            archive = _read_archive(path)
        except (tarfile.TarError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} can't be read as an archive of cells: {error}") from error
        keys.update(archive.keys())
        runs += archive.runs
        cells |= archive.cells
    return Committed(frozenset(keys), tuple(runs), KnownTimes(cells))


def cells_by_row(cells: Iterable[PlannedCell]) -> dict[PaperRow, set[str]]:
    """Return hashes of the cells that each row takes, those of an attack's training among the attack's."""
    found: dict[PaperRow, set[str]] = {}
    keys: dict[int, str] = {}
    for one in cells:
        key = keys.setdefault(id(one.training), _training_key(one.training.settings))
        own = {key} if one.attack is None else {key, _attack_key(one.cell.settings, key)}
        found.setdefault(one.row, set()).update(own)
    return found


def count_measured(experiment: Experiment, committed: Committed, cells: Iterable[PlannedCell] | None = None) -> int:
    """Return how many of an experiment's rows have all of their cells committed.

    Args:
        experiment: at some scale.
        committed: all cells.
        cells: of the experiment, if they are known.
    """
    by_row = cells_by_row(planned_cells(experiment) if cells is None else cells)
    count = 0
    for row in rows_of(experiment):
        wanted = set[str]().union(*(by_row.get(part, set()) for part in matching(experiment, row)))
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
                continue
            found.cells[name.parent.name] = data
            if (settings := data["settings"])["kind"] == "training":
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
