"""What is damaged in a run's folder, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eval.io import file_digests, jsonl, manifest
from eval.run.run_directory import CELL, FILES, RUN, about_cell, check_cell
from fl.runtime.safe_paths import join_inside
from fl.simulation import checkpoint

REPORTS = ("report.html", "report.md")
"""What is made of the other files, and can be made again by `hyperleak report`."""
ROWS = ("images.jsonl", "rounds.jsonl", "privacy.jsonl")


@dataclass
class FolderReport:
    """What a look at a folder found.

    Attributes:
        damaged: for each damaged thing what is wrong and what to do, in a line.
        unchecked: things that state nothing to check them by, by kind.
        whole: how many things are as they were written.
    """

    damaged: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    whole: int = 0


def check_folder(folder: Path) -> FolderReport:
    """Check all that a run's folder holds: cells, checkpoints, what readers get, and what the run says of itself.

    Raises:
        FileNotFoundError: it is no folder of a run.
    """
    if not any((folder / name).exists() for name in (RUN, "cells", manifest.MANIFEST, ROWS[0])):
        raise FileNotFoundError(f"{folder} is no folder that `hyperleak run` has written: it has no {RUN} and no cells")
    found = FolderReport()
    for place, wrong in _problems(folder, found):
        found.damaged.append(f"{place} {wrong}")
    return found


def _problems(folder: Path, found: FolderReport) -> Iterator[tuple[str, str]]:
    yield from _cells(folder, found)
    yield from _checkpoints(folder, found)
    yield from _readers(folder, found)
    if not (folder / RUN).exists():
        yield RUN, f"is missing; {manifest.HOW_TO_REWRITE}"
    else:
        try:
            about = jsonl.read_json(join_inside(folder, RUN))
            if not isinstance(about, dict):
                raise ValueError("expected a JSON object")
            file_digests.check_digest(about)
        except (OSError, ValueError) as error:
            yield RUN, f"is damaged ({error}); {manifest.HOW_TO_REWRITE}"
        else:
            found.whole += file_digests.DIGEST_KEY in about
            found.unchecked += [] if file_digests.DIGEST_KEY in about else [RUN]
            if (
                file_digests.DIGEST_KEY in about
                and (folder / ROWS[0]).exists()
                and not (folder / manifest.MANIFEST).exists()
            ):
                yield manifest.MANIFEST, f"is missing; {manifest.HOW_TO_REWRITE}"


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _cells(folder: Path, found: FolderReport) -> Iterator[tuple[str, str]]:
    for path in _folders(folder / "cells"):
        if path.suffix == ".part" or path.name.startswith("."):
            continue
        place = f"cells/{path.name}"
        try:
            checked = check_cell(path, path.name)
            files = about_cell(path).get(FILES, {})
        except (OSError, ValueError, LookupError, TypeError) as error:
            what = f"{CELL} is missing" if not (path / CELL).exists() else str(error)
            yield place, f"is damaged ({what}); the same command computes it again"
            continue
        if lost := [name for name in files if not (path / name).exists()]:
            yield place, f"has lost {', '.join(lost)}; remove that folder, and the same command makes it again"
        elif checked:
            found.whole += 1
        else:
            found.unchecked.append(place)


def _checkpoints(folder: Path, found: FolderReport) -> Iterator[tuple[str, str]]:
    for own in _folders(folder / "checkpoints"):
        for path in sorted(own.glob("round-*.npz")):
            try:
                checkpoint.check_intact(path)
            except (OSError, ValueError) as error:
                place = f"checkpoints/{own.name}/{path.name}"
                yield place, f"is damaged ({error}); the same command goes on from an earlier one"
            else:
                found.whole += 1


def _readers(folder: Path, found: FolderReport) -> Iterator[tuple[str, str]]:
    try:
        changed = dict(manifest.changed_files(folder))
        stated = manifest.read(folder).get("files", {})
    except ValueError as error:
        yield "readers' files", f"can't be checked: {error}"
        return
    for name, wrong in changed.items():
        yield name, f"{wrong}; {manifest.HOW_TO_REWRITE}"
    found.whole += len(stated.keys() - changed.keys())
    found.unchecked += [name for name in REPORTS if (folder / name).exists()]
    if stated:
        return
    for name in ("config.yaml", *ROWS):
        if not (folder / name).exists():
            continue
        try:
            if name in ROWS:
                jsonl.read_rows(join_inside(folder, name))
        except (OSError, ValueError) as error:
            yield name, f"is damaged ({error}); {manifest.HOW_TO_REWRITE}"
        else:
            found.unchecked.append(name)
