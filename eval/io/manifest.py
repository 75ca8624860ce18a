"""Which files for readers belong together: they are put in place together, and readers check that they are.

`DIR/manifest.json` has the run's id, what `run.json` said, and the digest of every file that was written with it. It is
marked as unfinished before the first of them is put in place, and written anew behind the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.io import file_digests, jsonl
from fl.runtime.atomic_files import remove_path, replace_path
from fl.runtime.safe_paths import join_inside

MANIFEST, RUN = "manifest.json", "run.json"
OPTIONAL_FILES = ("privacy.jsonl",)
"""Files that only some runs have."""
HOW_TO_REWRITE = "the command that began the run writes it anew from its finished cells"
_WHOLE = "whole"


def publish(new: Path, folder: Path, about: Mapping[str, Any]) -> None:
    """Put all files of `new` into a run's folder, in place of those before.

    Args:
        new: a folder on the same disk, with all that readers get.
        folder: of the run.
        about: what `run.json` says.
    """
    plain = {key: value for key, value in about.items() if key != file_digests.DIGEST_KEY}
    paths = sorted(path for path in new.rglob("*") if path.is_file())
    files = {path.relative_to(new).as_posix(): file_digests.file_digest(path) for path in paths}
    _write(folder, {"run": plain.get("id"), _WHOLE: False})
    for name in OPTIONAL_FILES:
        if name not in files:
            remove_path(folder / name)
    for path in sorted(new.iterdir()):
        replace_path(path, folder / path.name)
    _write(folder, {"run": plain.get("id"), _WHOLE: True, "about": plain, "files": files})


def add_files(folder: Path, *names: str) -> None:
    """State files that came later, and belong to the others."""
    about = read(folder)
    if about.get(_WHOLE):
        files = {**about["files"], **{name: file_digests.file_digest(folder / name) for name in names}}
        _write(
            folder, {**{key: value for key, value in about.items() if key != file_digests.DIGEST_KEY}, "files": files}
        )


def read(folder: Path) -> dict[str, Any]:
    """Return what a run's manifest says; nothing where there is none, as in folders of older versions.

    Raises:
        ValueError: it can't be read, or has changed since it was written.
    """
    path = join_inside(folder, MANIFEST)
    if not path.exists():
        return {}
    try:
        found = jsonl.read_json(path)
        if not isinstance(found, dict) or _WHOLE not in found or file_digests.DIGEST_KEY not in found:
            raise ValueError("expected what a run writes")
        file_digests.check_digest(found)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; {HOW_TO_REWRITE}") from error
    return found


def check(folder: Path) -> dict[str, Any]:
    """Return the manifest, if the files that it states are as they were; pictures are checked when they are read.

    Raises:
        ValueError: they are not, or not of one run; says which file.
    """
    about = read(folder)
    if about and not about[_WHOLE]:
        raise ValueError(
            f"the files in {folder} are of two states: a run was stopped as it wrote them; {HOW_TO_REWRITE}"
        )
    files = {name: said for name, said in about.get("files", {}).items() if not name.startswith("images/")}
    for name, wrong in file_digests.changed_files(folder, files):
        raise ValueError(f"{folder / name} {wrong}; {HOW_TO_REWRITE}")
    return about


def changed_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield all files that are not as the manifest states, pictures among them, each with what is wrong.

    Raises:
        ValueError: as `read_batch`.
    """
    about = read(folder)
    if about and not about[_WHOLE]:
        yield MANIFEST, "says that a run was stopped as it wrote its files"
    yield from file_digests.changed_files(folder, about.get("files", {}))


def _write(folder: Path, about: Mapping[str, Any]) -> None:
    jsonl.write_text(folder / MANIFEST, json.dumps(file_digests.with_digest(about), indent=1) + "\n")
