"""Files of tensors as frameworks write them, told apart by what is in them; nothing in them is executed."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.audit.checkpoint_folders import find_model_file, read_parts
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
ARRAYS_HINT = "numpy.savez('update.npz', *arrays), the arrays as torch's model has them"
KERAS_HINT = "numpy.savez('after.npz', *model.get_weights())"
FLAX_HINT = "numpy.savez('after.npz', **flax.traverse_util.flatten_dict(variables, sep='/'))"
FOREIGN = {
    b"\x89HDF\r\n\x1a\n": f"HDF5, as Keras writes it: {KERAS_HINT}",
    b"\x1f\x8b": "gzip: unpack it first",
    b"BZh": "bzip2: unpack it first",
    b"\xfd7zXZ\x00": "xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "Zstandard: unpack it first",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
    b"GGUF": "GGUF, whose numbers are quantized for running a model alone: take the file that came from training",
    b"MATLAB 5.0 MAT": "a file of MATLAB: numpy.savez('update.npz', **scipy.io.loadmat(file))",
    b"PAR1": f"Parquet: {ARRAYS_HINT}",
    b"ARROW1": f"Arrow: {ARRAYS_HINT}",
}
"""What files that are not read begin with, and how to come to one that is."""
FOREIGN_ENDINGS = {
    ".onnx": (
        "ONNX, a network for running it: its weights are no update; give those of training before and after, "
        "torch.save(model.state_dict(), 'after.pt')"
    ),
    ".tflite": f"TensorFlow Lite, a network for running it: {ARRAYS_HINT}",
    ".pb": f"a graph of TensorFlow: {ARRAYS_HINT}",
    ".msgpack": f"MessagePack, as Flax writes it: {FLAX_HINT}",
    ".csv": "text: numpy.savez('update.npz', *arrays)",
    ".txt": "text: numpy.savez('update.npz', *arrays)",
    ".tar": "a tar archive: unpack it first",
}
"""Endings of files that are not read, where their bytes say nothing."""
FOREIGN_ZIPS = {
    re.compile(r"(^|/)model\.weights\.h5$"): f"a model of Keras: {KERAS_HINT}",
    re.compile(r"/code/"): (
        "TorchScript, which holds code: where you trust it, torch.save(torch.jit.load(file).state_dict(), 'after.pt')"
    ),
    re.compile(r"/(archive_format|models/model\.json)$"): (
        "a program of torch.export: torch.save(torch.export.load(file).state_dict, 'after.pt')"
    ),
}
"""Names in zip archives that are not read, and how to come to a file that is."""
JSON_HINT = (
    "JSON: numpy.savez('update.npz', **{name: numpy.array(value) for name, value in json.load(open('{file}')).items()})"
)


MAX_DEPTH = 5
"""Dictionaries inside each other that tensors are looked for in; a file may hold one that holds itself."""


def read_tensor_file(path: Path, wanted: str) -> object:
    """Return what a file holds: arrays by name, one vector, or whatever `torch.save` was given.

    Its bytes say what it is, and its name only where they do not. Of a folder it is the model in it, of a list of a
    model's parts all of these.

    Args:
        path: of the file, or of a folder of a trainer.
        wanted: what is expected in it, the beginning of an error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder without a known model, of another kind, damaged, or holds objects that reading could
            run.
    """
    try:
        return _read_tensors(path, wanted)
    except PermissionError as error:
        what = Path(error.filename).name if isinstance(error.filename, str) else path.name
        raise ValueError(f"{wanted}, got {what} that must not be read: {error.strerror}") from error


def _read_tensors(path: Path, wanted: str) -> object:
    """Return what `read_tensor_file` does."""
    if path.is_dir():
        path = find_model_file(path, wanted, KINDS)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected the update as .npz, .pt or .safetensors")
    try:
        parts = (
            read_parts(path, wanted, lambda part: read_tensor_file(part, wanted)) if path.suffix == ".json" else None
        )
        if parts is not None:
            return parts
        kind = _kind_of_file(path, wanted)
        if kind == ".npy":
            return _read_vector(path, wanted)
        if kind == ".npz":
            return {name: _array(value, name, wanted) for name, value in tensor_archives.read_arrays(path).items()}
        return tensor_archives.read_tensors(path) if kind == ".safetensors" else tensor_archives.read_state(path)
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
    if not head:
        raise ValueError(f"{wanted}, got an empty file: it was cut off; get it again")
    if foreign := next((hint for first, hint in FOREIGN.items() if head.startswith(first)), ""):
        raise ValueError(f"{wanted}, got {foreign}")
    if head.startswith(b"\x93NUMPY"):
        return ".npy"
    if head.startswith(b"PK"):
        return _kind_of_zip(path, wanted)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < MAX_UNPACKED_BYTES:  # whatever its first byte is
        return ".safetensors"
    if head.startswith(b"\x80"):  # a pickle
        return path.suffix if path.suffix in KINDS[1:-1] else ".pt"
    if re.match(rb"\s*[\[{]\s*[\[{\"\d\]}-]", head):
        raise ValueError(f"{wanted}, got {JSON_HINT.replace('{file}', path.name)}")
    pickled = path.suffix.lower() in {".pkl", ".pickle"}  # whose oldest form is text as well
    if len(head) == 16 and not pickled and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        raise ValueError(f"{wanted}, got {FOREIGN_ENDINGS['.txt']}")
    if foreign := FOREIGN_ENDINGS.get(path.suffix.lower(), ""):
        raise ValueError(f"{wanted}, got {foreign}")
    return path.suffix if path.suffix in {*KINDS, ".npy"} else ".pt"


def _kind_of_zip(path: Path, wanted: str) -> str:
    """Return whether a zip archive was written by NumPy or by torch, by what is in it.

    Raises:
        ValueError: it holds something else; says what, and how to come to a file that is read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, LookupError, NotImplementedError, zipfile.BadZipFile):
        names = []  # what is wrong with it is said by what reads it
    if foreign := next((hint for word, hint in FOREIGN_ZIPS.items() if any(map(word.search, names))), ""):
        raise ValueError(f"{wanted}, got {foreign}")
    if any(name.endswith("/data.pkl") for name in names):
        return ".pt"
    numpy = path.suffix == ".npz" or any(name.endswith(".npy") for name in names)
    if names and not numpy:
        raise ValueError(f"{wanted}, got a zip archive of {', '.join(names[:3])}: unpack it first")
    return ".npz" if numpy else path.suffix if path.suffix in KINDS else ".pt"


def _read_vector(path: Path, wanted: str) -> Tensor:
    """Return the one array of an .npy file, which holds all numbers one after the other."""
    try:
        value = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{wanted}, got an .npy file that holds no plain array: {error}; {PICKLE_HINT}") from error
    if not isinstance(value, np.ndarray) or not is_vector(value) or value.dtype.kind not in "biuf":
        got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "several (.npz)"
        raise ValueError(
            f"{wanted}, or one vector of all numbers, got one array (.npy), {got}: write all arrays, "
            "numpy.savez('update.npz', *arrays)"
        )
    return to_tensor(value)


def is_vector(value: Tensor | NDArray[Any]) -> bool:
    """Return whether all numbers are in one row: in one dimension, with or without others of length 1."""
    return value.ndim > 0 and math.prod(value.shape) == max(value.shape)


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
            parts = {key: _quantized_parts(part, f"{key}", value) for key, part in value.items()}
            kinds.update("quantized" for one in parts.values() if len(one) > 1)
            pairs = [pair for one in parts.values() for pair in one.items()]
            return {key: plain(part, f"{key}", depth - 1) for key, part in pairs}
        if isinstance(value, list | tuple) and depth:
            return [plain(part, f"{place}", depth - 1) for place, part in enumerate(value)]
        if isinstance(value, np.ndarray | np.generic):
            return _array(np.array(value), name, wanted)
        return _plain_tensor(value, name, wanted, kinds) if isinstance(value, Tensor) else value

    changed = plain(found, "", MAX_DEPTH)
    return changed, [f"{' and '.join(sorted(kinds))} tensors were written out as plain numbers"] if kinds else []


def _quantized_parts(value: object, name: str, beside: Mapping[object, object]) -> dict[object, object]:
    """Return a quantized tensor as integers with scale and zero point beside, which tell its rounding; else the value.

    Args:
        value: of whatever kind.
        name: of it.
        beside: all that stands there; where it has such names of its own, nothing is changed.
    """
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    if not isinstance(value, Tensor) or not value.is_quantized or {scale, zero} & set(map(str, beside)):
        return {name: value}
    if value.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        return {name: value.int_repr(), scale: torch.tensor(value.q_scale()), zero: torch.tensor(value.q_zero_point())}
    scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    if not torch.equal(zeros, zeros.round()):
        return {name: value}
    shape = [-1 if dim == value.q_per_channel_axis() else 1 for dim in range(value.ndim)]
    return {name: value.int_repr(), scale: scales.view(shape), zero: zeros.view(shape)}


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
