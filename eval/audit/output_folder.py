"""The folder of an audit of one's own model: what tells that audit from others, so that none writes over another's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.base import Reconstruction, Result
from eval.audit.user_model import Subject
from eval.io import jsonl
from eval.run.results import write_image_grid
from eval.run.run_directory import LOCK, RUN
from fl.runtime.atomic_files import make, replacing
from fl.runtime.safe_paths import inside, regular

FILE = "audit.json"
"""Says in the folder which audit it is of."""


def check(path: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Whether an audit may be written to a folder: a new one, an empty one, or one of the same audit.

    Args:
        path: of the folder.
        name: of what is audited.
        settings: of the audit, in plain data.

    Raises:
        ValueError: it holds something else; says what.
    """
    if not path.is_dir():
        return
    entries = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if not entries:
        return
    what = _other(path, entries, name, settings)
    if what:
        raise ValueError(f"{path} holds {what}, not this audit; choose another --out, or empty it")


def mark(path: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Say in a folder, before anything else is written there, which audit it is of."""
    jsonl.write_text(path / FILE, json.dumps({"title": _title(name), "settings": _digest(settings)}, indent=2) + "\n")


def _other(path: Path, entries: list[str], name: str, settings: Mapping[str, Any]) -> str:
    """What a folder is of if it is not of this audit, in words, or nothing."""
    if RUN in entries:
        return "a run"
    if FILE not in entries:
        return f"files of something else ({entries[0]})"
    try:
        found = jsonl.parse(regular(inside(path, FILE)).read_bytes())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"title", "settings"} <= set(found):
        return f"a file {FILE} that can't be read"
    if found["title"] != _title(name):
        return f"another audit ({found['title']})"
    return "" if found["settings"] == _digest(settings) else "an audit of the same with other settings"


def _title(name: str) -> str:
    """As the run of an audit of a method is called."""
    return f"Audit of {name}"


def _digest(settings: Mapping[str, Any]) -> str:
    """Of settings: what they say of the machine (paths of files) stays out of the folder."""
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def pictures(path: Path, subjects: Mapping[int, Subject], results: Mapping[int, Result]) -> None:
    """Pictures of all updates: reconstructions, below the originals where they are known."""
    answers = {number: result for number, result in results.items() if isinstance(result, Reconstruction)}
    found = [result.inputs.detach().cpu() for result in answers.values() if result.inputs is not None]
    truths = [subjects[number].truth for number in answers]
    originals = [truth.inputs.cpu() for truth in truths if truth is not None]
    if not found:
        return
    make(path.parent)
    arrays = {"reconstruction": _stored(torch.cat(found))}
    if originals:
        arrays["original"] = _stored(torch.cat(originals))
    with replacing(path.with_name(f"{path.name}.npz")) as file:
        np.savez_compressed(file, **{name: value.numpy() for name, value in arrays.items()})  # type: ignore[arg-type]
    shown = [arrays[name] for name in ("original", "reconstruction") if name in arrays]
    write_image_grid(torch.cat(shown), path.with_name(f"{path.name}.png"), columns=len(arrays["reconstruction"]))


def _stored(images: Tensor) -> Tensor:
    """Images in a type that NumPy has, too."""
    return images.float() if images.dtype is torch.bfloat16 else images
