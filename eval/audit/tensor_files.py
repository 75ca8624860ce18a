"""Files of tensors as frameworks write them, told apart by what is in them; nothing in them is executed."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl.runtime import tensor_archives
from fl.runtime.native_arrays import to_tensor
from fl.runtime.tensor_archives import MAX_UNPACKED_BYTES

KINDS = (".npz", ".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""Endings of files that are read; those between the first and the last as `torch.save` writes them."""
PICKLE_HINT = (
    "pickle can run code, so only tensors are read. Where you trust the file, write it again: "
    "numpy.savez('update.npz', *arrays) for a list of arrays, numpy.savez('update.npz', **arrays) for a dictionary, "
    "torch.save(tensors, 'update.pt') for tensors by name, torch.save(model.state_dict(), 'after.pt') for a model"
)
FOREIGN = {
    b"\x89HDF\r\n\x1a\n": "HDF5, as Keras writes it: numpy.savez('update.npz', *arrays), the arrays as torch's model "
    "has them",
    b"\x1f\x8b": "gzip: unpack it first",
    b"GGUF": "GGUF, whose numbers are quantized for running a model alone: take the file that came from training",
}
"""What files that are not read begin with, and how to come to one that is."""
JSON_HINT = (
    "JSON: numpy.savez('update.npz', **{name: numpy.array(value) for name, value in json.load(open('{file}')).items()})"
)


MAX_DEPTH = 5
"""Dictionaries inside each other that tensors are looked for in; a file may hold one that holds itself."""


def read_tensor_file(path: Path, wanted: str) -> object:
    """Return what a file holds: arrays by name, one vector, or whatever `torch.save` was given.

    Its bytes say what it is, and its name only where they do not.

    Args:
        path: of the file.
        wanted: what is expected in it, the beginning of an error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, of another kind, damaged, or holds objects that reading could run.
    """
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.iterdir() if file.suffix in KINDS)[:4])
        raise ValueError(f"{wanted}, got a folder; give {f'a file in it: {inside}' if inside else 'a file'}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected the update as .npz, .pt or .safetensors")
    try:
        kind = _kind_of_file(path, wanted)
        if kind == ".npy":
            return _read_vector(path, wanted)
        if kind == ".npz":
            return {name: _array(value, name, wanted) for name, value in tensor_archives.read_arrays(path).items()}
        return tensor_archives.read_tensors(path) if kind == ".safetensors" else tensor_archives.read_state(path)
    except PermissionError as error:
        raise ValueError(f"{wanted}, got a file that must not be read") from error
    except tensor_archives.ObjectsError as error:
        raise ValueError(f"{wanted}, got other objects; {PICKLE_HINT}") from error
    except tensor_archives.DamagedError as error:
        why = str(error).rstrip(".")
        raise ValueError(
            f"{wanted}, got a file that can't be read as {kind}: {why}. If it was cut off, get it again"
        ) from error


def _kind_of_file(path: Path, wanted: str) -> str:
    """Return the ending that a file of these bytes should have, or the one it has where they tell none.

    Raises:
        ValueError: it is of a kind that is not read; says which, and how to come to one that is.
    """
    with path.open("rb") as opened:
        head = opened.read(16)
    if foreign := next((hint for first, hint in FOREIGN.items() if head.startswith(first)), ""):
        raise ValueError(f"{wanted}, got {foreign}")
    if head.startswith(b"\x93NUMPY"):
        return ".npy"
    if head.startswith(b"PK"):
        return _kind_of_zip(path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < MAX_UNPACKED_BYTES:  # whatever its first byte is
        return ".safetensors"
    if head.startswith(b"\x80"):  # a pickle
        return path.suffix if path.suffix in KINDS[1:-1] else ".pt"
    if re.match(rb"\s*[\[{]\s*[\[{\"\d\]}-]", head):
        raise ValueError(f"{wanted}, got {JSON_HINT.replace('{file}', path.name)}")
    return path.suffix if path.suffix in {*KINDS, ".npy"} else ".pt"


def _kind_of_zip(path: Path) -> str:
    """Return whether a zip archive was written by NumPy or by torch, by what is in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, LookupError, zipfile.BadZipFile):
        names = []  # what is wrong with it is said by what reads it
    if any(name.endswith("/data.pkl") for name in names):
        return ".pt"
    numpy = path.suffix == ".npz" or any(name.endswith(".npy") for name in names)
    return ".npz" if numpy else path.suffix if path.suffix in KINDS else ".pt"


def _read_vector(path: Path, wanted: str) -> Tensor:
    """Return the one array of an .npy file, which holds all numbers one after the other."""
    try:
        value = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{wanted}, got an .npy file that holds no plain array: {error}; {PICKLE_HINT}") from error
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "biuf":
        got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "several (.npz)"
        raise ValueError(
            f"{wanted}, or one vector of all numbers, got one array (.npy), {got}: write all arrays, "
            "numpy.savez('update.npz', *arrays)"
        )
    return to_tensor(value)


def _array(value: NDArray[Any], name: str, wanted: str) -> Tensor | str:
    """Return an array of numbers as a tensor, one of text as that; an error names it."""
    if value.dtype.kind in "US":
        return str(value.tolist())
    try:
        return to_tensor(value)
    except ValueError as error:
        raise ValueError(f"{wanted}, got under {name!r} something else: {error}") from error


def packed_hint(words: Collection[str]) -> str:
    """Return how to write out a tensor of which a file has such parts in its place; empty where they are others."""
    plain = {word.lower() for word in words}
    if plain & {"indices", "index", "idx"} and plain & {"values", "value", "vals"}:
        return (
            "numbers and their places are no tensor yet: write each out, t = torch.zeros(number of its entries), "
            "t[indices] = values, t.view(its shape)"
        )
    if any(word.startswith("scale") for word in plain):
        return "scaled integers are no update yet: write each out, (values - zero_point) * scale"
    return ""


def with_plain_tensors(found: object, wanted: str) -> tuple[object, list[str]]:
    """Return the same with dense tensors in place of NumPy's arrays, sparse and quantized ones, and what was done.

    Args:
        found: what a file holds, or a caller gave.
        wanted: the beginning of an error.

    Raises:
        ValueError: a tensor has no numbers of its own (one of the device meta), or would take too much memory.
    """
    kinds: set[str] = set()

    def plain(value: object, name: str, depth: int) -> object:
        if isinstance(value, Mapping) and depth:
            return {key: plain(part, f"{key}", depth - 1) for key, part in value.items()}
        if isinstance(value, list | tuple) and depth:
            return [plain(part, f"{place}", depth - 1) for place, part in enumerate(value)]
        if isinstance(value, np.ndarray | np.generic):
            return _array(np.array(value), name, wanted)
        return _plain_tensor(value, name, wanted, kinds) if isinstance(value, Tensor) else value

    changed = plain(found, "", MAX_DEPTH)
    return changed, [f"{' and '.join(sorted(kinds))} tensors were written out as plain numbers"] if kinds else []


def _is_computable(kind: torch.dtype) -> bool:
    try:
        torch.zeros(kind.itemsize, dtype=torch.uint8).view(kind).to(torch.complex128)
    except (RuntimeError, TypeError):  # NotImplementedError is one of the former
        return False
    return True


def _plain_tensor(value: Tensor, name: str, wanted: str, kinds: set[str]) -> Tensor:
    """Return a dense tensor of the same numbers; adds what it was before."""
    value, where = value.detach(), f" under {name!r}" if name else ""
    if value.is_meta:
        raise ValueError(
            f"{wanted}, got a tensor{where} on the device meta, which has a shape and no numbers: save it from the "
            "device where the training ran, tensor.cpu()"
        )
    if value.is_nested:
        raise ValueError(f"{wanted}, got a nested tensor{where}: save its parts by themselves, tensor.unbind()")
    if value.is_quantized:
        kinds.add("quantized")
        return value.dequantize()
    if not _is_computable(value.dtype):
        kind = str(value.dtype).removeprefix("torch.")
        raise ValueError(
            f"{wanted}, got a tensor{where} of {kind}, which packs numbers and of which nothing can be computed: write "
            "it out as float32"
        )
    if value.layout is torch.strided:
        return value
    size = value.numel() * value.element_size()
    if size > MAX_UNPACKED_BYTES:
        raise ValueError(
            f"{wanted}, got a sparse tensor{where} that takes {size / 2**30:.1f} GiB as plain numbers, above "
            f"{MAX_UNPACKED_BYTES >> 30} GiB"
        )
    kinds.add("sparse")
    return value.to_dense()
