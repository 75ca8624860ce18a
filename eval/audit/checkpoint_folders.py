"""Folders of trainers and checkpoints in several files: which file holds the model, and how its parts are joined."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

MODEL_FILES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
"""What Transformers and PEFT call the model, or the list of its parts, beside an optimizer's state and settings."""
INDEX, INDEX_ENDING = "weight_map", ".index.json"
"""Under which such a list has the file of each tensor, and the end of its name."""
SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.\w+)$")
"""What parts of a model in several files are called."""
FOREIGN_FOLDERS = {
    ".metadata": (
        "a checkpoint of torch.distributed.checkpoint: torch.distributed.checkpoint.format_utils."
        "dcp_to_torch_save(folder, 'after.pt') joins it"
    ),
    "saved_model.pb": (
        "a SavedModel of TensorFlow: numpy.savez('update.npz', *arrays), the arrays as torch's model has them"
    ),
    "zero_to_fp32.py": "a checkpoint of DeepSpeed: the script zero_to_fp32.py in it joins it",
}
"""Files by which folders are known that are not read, and how to come to one that is."""


def find_model_file(folder: Path, wanted: str, kinds: tuple[str, ...]) -> Path:
    """Return the file of a folder that holds a model, or lists the files of its parts.

    Args:
        folder: where it is looked for.
        wanted: the beginning of an error.
        kinds: endings of files that are read.

    Raises:
        ValueError: no file in it is known to be the one; says which may be.
    """
    if (found := next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)) is not None:
        return found
    if foreign := next((hint for name, hint in FOREIGN_FOLDERS.items() if (folder / name).exists()), ""):
        raise ValueError(f"{wanted}, got {foreign}")
    inside = ", ".join(sorted(file.name for file in folder.iterdir() if file.suffix in kinds)[:4])
    raise ValueError(f"{wanted}, got a folder; give {f'a file in it: {inside}' if inside else 'a file'}")


def read_parts(path: Path, wanted: str, read: Callable[[Path], object]) -> dict[str, object] | None:
    """Return the tensors of a checkpoint in several files; None where a file is no list of its parts.

    Args:
        path: of a file of JSON.
        wanted: the beginning of an error.
        read: returns what one part holds.

    Raises:
        PermissionError: the list must not be read.
        ValueError: the list is damaged or empty, or a part is missing, is elsewhere than beside it, or lacks a tensor
            that the list says is in it.
    """
    held_bytes = path.read_bytes()
    try:
        listed = json.loads(held_bytes)
    except (ValueError, RecursionError) as error:
        if not held_bytes.lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith((b"{", b"[")):
            return None
        raise ValueError(
            f"{wanted}, got {path.name} that can't be read as JSON: {error}. If it was cut off, get it again"
        ) from error
    places = listed.get(INDEX) if isinstance(listed, dict) else None
    if not isinstance(places, dict) or not places:
        if path.name.endswith(INDEX_ENDING):
            raise ValueError(f"{wanted}, got {path.name}, a list of a model's parts that names none under {INDEX!r}")
        return None
    found: dict[str, object] = {}
    for part in dict.fromkeys(map(str, places.values())):
        names = [name for name, place in places.items() if place == part]
        file = path.with_name(Path(part).name)
        if Path(part).name != part or file.suffix == path.suffix or not file.is_file():
            raise ValueError(f"{wanted}, got a list of parts of which {part!r} is not beside it")
        held = read(file)
        if not isinstance(held, Mapping) or not held.keys() >= set(names):
            raise ValueError(f"{wanted}, got a list of parts of which {part!r} lacks a tensor that is listed")
        found |= {name: held[name] for name in names}
    return found


def describe_part(path: Path) -> list[str]:
    """Return which file of a folder is read, or that a file is one part of a model, as its name says; else nothing."""
    if path.is_dir():
        return [f"read out of the folder {path.name}: {name}" for name in MODEL_FILES if (path / name).is_file()][:1]
    named = SHARD.match(path.name)
    if named is None or int(named["count"]) < 2:
        return []
    return [
        f"{path.name} is part {int(named['number'])} of {int(named['count'])} of a model by its name; of all of them "
        f"give {named['stem']}{named['ending']}.index.json"
    ]
