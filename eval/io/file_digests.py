"""What files are said to hold: digests beside them, by which readers know what has changed since it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl.runtime.safe_paths import join_inside, require_regular_file

DIGEST_KEY = "sha256"
"""Key of a JSON object that has the digest of all its other members."""

CHUNK = 2**20
"""Bytes that are read at a time."""


def file_digest(path: Path) -> dict[str, Any]:
    """Return the SHA-256 of a file, and the number of its rows if it is a JSON-lines file."""
    digest, lines = hashlib.sha256(), 0
    with require_regular_file(path).open("rb") as file:
        while content := file.read(CHUNK):
            digest.update(content)
            lines += content.count(b"\n")
    return {"sha256": digest.hexdigest(), **({"rows": lines} if path.suffix == ".jsonl" else {})}


def changed_files(folder: Path, files: object) -> Iterator[tuple[str, str]]:
    """Yield the files that are not as `stated` said, each with what is wrong.

    Args:
        folder: where they are.
        files: what was said of each, by its path in the folder.
    """
    if not isinstance(files, Mapping):
        yield "files", "are not stated"
        return
    for name, said in files.items():
        try:
            path = join_inside(folder, *str(name).split("/"))
            found = file_digest(path) if path.exists() else None
        except (OSError, ValueError) as error:
            yield name, f"can't be read ({error})"
            continue
        if found is None:
            yield name, "is missing"
        elif found != said:
            yield name, _difference(said, found)


def with_digest(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return `about` with the digest of all it says."""
    return {**about, DIGEST_KEY: _digest(about)}


def check_digest(about: Mapping[str, Any]) -> None:
    """Check that a JSON object says what it said when it was written; one without a digest passes.

    Raises:
        ValueError: it says something else.
    """
    if DIGEST_KEY in about and about[DIGEST_KEY] != _digest(
        {key: value for key, value in about.items() if key != DIGEST_KEY}
    ):
        raise ValueError("its content has changed since it was written")


def _difference(said: object, found: Mapping[str, Any]) -> str:
    rows = said.get("rows") if isinstance(said, Mapping) else None
    if "rows" in found and rows != found["rows"]:
        return f"has {found['rows']} rows, not {rows}"
    return "has changed since it was written"


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
