"""A run directory, read: nothing in a report comes from anywhere else."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.experiment.serialization import LABEL, LABEL_WORDS
from eval.io import file_digests, jsonl, manifest, yaml12
from eval.io.run_layout import PARTITIONS
from eval.io.sanitize import shorten
from eval.metrics.score import Row
from eval.report.result_groups import NOT_ATTACKED, ResultGroup, group_rows
from eval.report.settings import RunSettings
from fl.runtime import tensor_archives
from fl.runtime.safe_paths import join_inside

CONFIG, ROWS, ROUNDS, RUN, ENVIRONMENT = "config.yaml", "images.jsonl", "rounds.jsonl", "run.json", "env.json"
PRIVACY = "privacy.jsonl"
KEY_COLUMNS, INTEGER_COLUMNS = ("method", "defense", "attack", "round", "seed"), ("round", "seed")
SEEDS = -(2**63), 2**64
"""Between which seeds lie, the upper end excluded (`fl.ranges.Seed`)."""
MAX_READS, WAIT_SECONDS = 20, 0.1
"""How often, and after how many seconds, files are read again that a run puts in place in the meantime."""
MAX_NAME_LENGTH = 200
"""Characters of a file's name without its ending."""
Pixels = NDArray[np.float32]
PictureKey = tuple[str, str, str, int, int]
"""What an attack's pictures go by: the values of `KEYS`."""


@dataclass(frozen=True)
class Run:
    """What a run left behind.

    Attributes:
        folder: where it is.
        config: `config.yaml` as it stands.
        setting: the same, read.
        rows: of `images.jsonl`.
        rounds: of `rounds.jsonl`; empty without one.
        about: `run.json`; empty without one.
        environment: `env.json`; empty without one.
        privacy: rows of `privacy.jsonl`; empty without one.
        partitions: what the files in `partitions/` say beside their lists; empty without any.
        stated: digests of its files, from `manifest.json`; empty without one.
    """

    folder: Path
    config_text: str
    settings: RunSettings
    rows: list[Row]
    rounds: list[Row]
    metadata: Mapping[str, Any]
    environment: Mapping[str, Any]
    privacy: list[Row] = field(default_factory=list)
    partitions: list[dict[str, Any]] = field(default_factory=list)
    digests: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def groups(self) -> list[ResultGroup]:
        """Return the rows by setting."""
        return group_rows(self.rows)

    @cached_property
    def rounds_of(self) -> dict[tuple[Any, Any, Any], list[Row]]:
        """Return the rows of `rounds.jsonl` by method, defense and seed."""
        found: dict[tuple[Any, Any, Any], list[Row]] = {}
        for row in self.rounds:
            found.setdefault((row["method"], row["defense"], row["seed"]), []).append(row)
        return found

    @cached_property
    def _names(self) -> dict[PictureKey, str]:
        """Return names of the files with pictures."""
        return picture_file_names(tuple(row[key] for key in KEY_COLUMNS) for row in self.rows)

    @property
    def attacked(self) -> bool:
        """Return whether any attack was asked for."""
        return any(group.attack != NOT_ATTACKED for group in self.groups)

    @property
    def title(self) -> str:
        """Return what the run calls itself."""
        return self.settings.title or str(self.metadata.get("title") or self.metadata.get("name") or "What leaked")

    @property
    def captured(self) -> bool:
        """Whether the updates came without a training: of a model of the user's own, or captured."""
        return "audit" in self.settings.values

    def load_pictures(self, group: ResultGroup, seed: int) -> tuple[Pixels | None, Pixels]:
        """Read originals and reconstructions (N, C, H, W) in [0, 1], in the order of the pictured rows of a seed.

        There are no originals where nobody knows the true images.

        Raises:
            ValueError: there is no such file, or it is none of ours; says which.
        """
        name = f"{self._names[(group.method, group.defense, group.attack, group.round, seed)]}.npz"
        path = join_inside(self.folder, "images", name)
        if not path.is_file():
            raise ValueError(f"there is no images/{name}")
        said = {f"images/{name}": self.digests[f"images/{name}"]} if f"images/{name}" in self.digests else {}
        for damaged, wrong in file_digests.changed_files(self.folder, said):
            raise ValueError(f"{damaged} {wrong}")
        return read_pictures(path)


@contextmanager
def explain_damage(folder: str | Path) -> Iterator[None]:
    """Say in a line that a run's files hold something that no figure can be made of.

    Raises:
        ValueError: says where it came up.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}, line {last.lineno}"
        raise ValueError(
            f"a file of {folder} holds something else than `hyperleak run` writes; started again with it the run "
            f"writes its files anew ({type(error).__name__}: {error}; {place})"
        ) from error


def picture_file_names(attacks: Iterable[PictureKey]) -> dict[PictureKey, str]:
    """Return names of the files with attacks' pictures, without ending; equal ones get a number.

    Args:
        attacks: in the order of `images.jsonl`, each as often as may be.
    """
    names, met = dict[PictureKey, str](), Counter[str]()
    for key in dict.fromkeys(attacks):
        method, defense, attack, number, seed = key
        name = f"{method}-{defense}-{attack}-round{number}-seed{seed}"  # labels may hold "-"
        if len(name) > MAX_NAME_LENGTH:  # than file systems take
            name = f"{name[:MAX_NAME_LENGTH]}-{sha256(name.encode()).hexdigest()[:16]}"
        met[name] += 1
        names[key] = name if met[name] == 1 else f"{name}-{met[name]}"
    return names


def read_pictures(path: Path) -> tuple[Pixels | None, Pixels]:
    """Read originals, None where unknown, and reconstructions (N, C, H, W) in [0, 1] of an attack.

    Raises:
        ValueError: the file is damaged; says which.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        arrays = tensor_archives.read_arrays(path)
        original, found = arrays.get("original"), arrays["reconstruction"]
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{name} can't be read") from error
    parts = [found] if original is None else [original, found]
    if any(part.ndim != 4 or part.dtype.kind != "f" or part.shape != found.shape for part in parts):
        raise ValueError(f"{name} holds no pictures, but {', '.join(f'{part.dtype} {part.shape}' for part in parts)}")
    return original, found


def load(folder: str | Path) -> Run:
    """Read a run directory.

    Raises:
        FileNotFoundError: it is no run directory; says what is missing.
        ValueError: a file is damaged; says which.
    """
    folder, said = Path(folder), b""
    for _ in range(MAX_READS):
        try:
            said = _manifest_bytes(folder)
            run = _load(folder)
        except ValueError:
            if _manifest_bytes(folder) == said:
                raise
        else:
            if _manifest_bytes(folder) == said:
                return run
        time.sleep(WAIT_SECONDS)  # a run is putting its files in place
    raise ValueError(f"the files in {folder} change while they are read; try again when the run there has ended")


def _manifest_bytes(folder: Path) -> bytes:
    """Return a run's manifest as it stands."""
    path = join_inside(folder, manifest.MANIFEST)
    return path.read_bytes() if path.is_file() and path.stat().st_size <= jsonl.LARGEST else b""


def _load(folder: Path) -> Run:
    for name in (CONFIG, ROWS):
        if not join_inside(folder, name).is_file():
            raise FileNotFoundError(f"no {name} in {folder}; expected a folder that `hyperleak run` has written")
    stated = manifest.check(folder)
    try:
        config = yaml12.read(folder / CONFIG)
        setting = RunSettings.from_plain(yaml12.parse(config))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    rows = jsonl.read_rows(folder / ROWS)
    if not rows:
        raise ValueError(f"{folder / ROWS}: expected at least one row, got none")
    for number, row in enumerate(rows, 1):
        if absent := [key for key in KEY_COLUMNS if key not in row]:
            raise ValueError(f"{folder / ROWS}, line {number}: expected a value for {', '.join(absent)}, got none")
        _check(row, KEY_COLUMNS, f"{folder / ROWS}, line {number}")
    rounds, privacy = (_rows(folder, name) for name in (ROUNDS, PRIVACY))
    about, environment = (_json(join_inside(folder, name)) for name in (RUN, ENVIRONMENT))
    try:
        file_digests.check_digest(about)
    except ValueError as error:
        raise ValueError(f"{folder / RUN} is damaged: {error}; {manifest.HOW_TO_REWRITE}") from error
    if file_digests.DIGEST_KEY in about and not stated:  # older versions had neither
        raise ValueError(f"{folder / manifest.MANIFEST} is missing; {manifest.HOW_TO_REWRITE}")
    # what the run is at now need not be what it was when it wrote these
    about = stated.get("about") or {key: value for key, value in about.items() if key != file_digests.DIGEST_KEY}
    parts, digests = _partitions(folder / PARTITIONS), stated.get("files", {})
    return Run(folder, config, setting, rows, rounds, about, environment, privacy, parts, digests)


def _rows(folder: Path, name: str) -> list[Row]:
    """Return the rows of a file about trainings; none without one."""
    rows = jsonl.read_rows(path) if (path := join_inside(folder, name)).is_file() else []
    for number, row in enumerate(rows, 1):
        _check(row, [key for key in KEY_COLUMNS if key in row], f"{path}, line {number}")
    return rows


def _check(row: Row, keys: Iterable[str], where: str) -> None:
    """Return whether labels are labels, since files are named by them, and numbers numbers."""
    for key in keys:
        value = row[key]
        if key in INTEGER_COLUMNS:
            low, high = SEEDS if key == "seed" else (0, 2**63)
            if type(value) is not int or not low <= value < high:
                raise ValueError(f"{where}: expected {key} as a whole number, got {shorten(repr(value), 100)}")
        elif not isinstance(value, str) or not (value == NOT_ATTACKED or LABEL.fullmatch(value)):
            raise ValueError(f"{where}: expected {key} of {LABEL_WORDS}, got {shorten(repr(value), 100)}")


def _partitions(folder: Path) -> list[dict[str, Any]]:
    """Return what the files of a run's partitions say, in their order, without the lists."""
    paths = [join_inside(folder.parent, PARTITIONS, path.name) for path in folder.glob("*.json")]
    paths.sort(key=lambda path: (len(path.name), path.name))
    found = [{key: value for key, value in _json(path).items() if key not in {"train", "test"}} for path in paths]
    for path, about in zip(paths, found, strict=True):
        if not {"methods", "images", "shared"} <= set(about):
            raise ValueError(f"{path}: expected a partition that `hyperleak run` has written")
    return found


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = jsonl.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
