"""What tables and figures came to, kept in the user's cache: reading the configs of all takes a minute.

A file holds for one state of source, configs and committed cells; in any other it counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eval.experiment import config_catalog
from eval.io import jsonl
from eval.io.errors import RUN_ERRORS
from eval.reproduce.items import CELLS
from eval.run.cache_keys import source_digest
from fl.runtime.atomic_files import make_folder

NAME = "reproduce-list.json"


class ListingCache:
    """The figures of items by name, in a file; nothing is kept where there is no place for it.

    Args:
        path: of the file; None is in the user's cache (`$XDG_CACHE_HOME`, `~/.cache`).
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = _default_path() if path is None else path

    def read(self) -> dict[str, Any]:
        """Return what is kept of this state, by the items' names."""
        try:
            found = jsonl.read_json(self.path) if self.path is not None else {}
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(found, dict) and found.get("state") == _state() and isinstance(found.get("items"), dict)
        return dict(found["items"]) if is_ours else {}

    def write(self, items: Mapping[str, Any]) -> None:
        """Keep figures of this state, in the place of all that was kept."""
        if self.path is None:
            return
        try:
            make_folder(self.path.parent)
            jsonl.write_text(self.path, json.dumps({"state": _state(), "items": items}))
        except RUN_ERRORS:  # a home that is read-only, say: then it takes as long the next time
            return


def _default_path() -> Path | None:
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "hyperleak" / NAME
    except RuntimeError:  # neither HOME nor the user is known
        return None


def _state() -> str:
    """Return a hash of all that a listing is of: the code, PyTorch, the configs and the committed cells."""
    digest = hashlib.sha256(f"{source_digest()} {torch.__version__}".encode())
    configs = [path for path in config_catalog.CONFIGS.rglob("*") if path.is_file()]
    for path in [*sorted(configs), *sorted(CELLS.glob("*.tar.xz"))]:
        digest.update(f"\0{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
