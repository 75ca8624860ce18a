"""Files of tensors, read so that damage is an error that names the file, and nothing in them is executed.

`.npz`, and `.pt` and `.pth` as torch writes them since 1.6, are zip archives: the checksum (CRC-32) of every member is
compared, which neither `numpy.load` nor `torch.load` does for all. `.safetensors` and torch's older files have none: of
these only sizes are checked. For files of any kind, a file `NAME.sha256` beside `NAME` (as `sha256sum` writes it) is.
"""

from __future__ import annotations

import hashlib
import warnings
import zipfile
import zlib
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fl.runtime import atomic_files
from fl.runtime.safe_paths import require_regular_file

MAX_UNPACKED_BYTES = 2**30
"""Bytes that an archive may unpack to, whatever its size."""
MAX_EXPANSION = 100
"""How many times its size a larger one may."""
CHUNK_BYTES = 2**24
"""Bytes that are unpacked at a time."""
READ_ERRORS = (
    OSError, ValueError, LookupError, AttributeError, TypeError, EOFError, RuntimeError, ArithmeticError,
    zipfile.BadZipFile, zlib.error, MemoryError,
)  # fmt: skip
"""What reading a damaged file may raise in the libraries that do it."""


class DamagedError(ValueError):
    """A file is not as it was written, or would take more memory than it may."""


class ObjectsError(ValueError):
    """A file holds objects that loading could run."""


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of an `.npz` file.

    Args:
        path: of the file.
        names: only those of these names; None reads all.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it is damaged or none.
    """
    check_digest(path)
    try:
        with path.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            _check_size(path, archive)
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = members if names is None else [name for name in members if name in names]
            return {name: _read_array(path, archive, members[name]) for name in wanted}
    except PermissionError:
        raise
    except READ_ERRORS as error:
        raise _damaged_error(path, "a .npz file of plain arrays", error) from error


def read_state(path: Path) -> Any:
    """Return what a `.pt` or `.pth` file holds, on the CPU; other objects than tensors and plain data are refused.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it is damaged.
        ObjectsError: it holds other objects.
    """
    check_digest(path)
    with path.open("rb") as opened:
        zipped = opened.read(4) == b"PK\x03\x04"
    if zipped:
        check_zip(path)
    try:
        atomic_files.before_disk_change("allocate", path)
        # a file's name tells torch how to read it; it is to go by what is inside
        with path.open("rb") as opened, warnings.catch_warnings(action="ignore"):
            found = torch.load(opened, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except READ_ERRORS as error:
        raise _damaged_error(path, "a file that torch.save has written", error) from error
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":  # torch's word for objects that loading could run
            raise ObjectsError(f"expected tensors alone in {path}, got other objects") from error
        raise
    try:
        _check_expanded(path, found)
    except RecursionError as error:
        raise DamagedError(f"{path} holds a dictionary that holds itself, or many inside each other") from error
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.safetensors` file.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it is damaged, as far as its header and its size tell.
    """
    from safetensors import SafetensorError  # comes with timm
    from safetensors.torch import load_file

    check_digest(path)
    try:
        atomic_files.before_disk_change("allocate", path)
        return load_file(path)
    except PermissionError:
        raise
    except (*READ_ERRORS, SafetensorError) as error:
        raise _damaged_error(path, "a .safetensors file", error) from error


def check_digest(path: Path) -> None:
    """Compare a file with `NAME.sha256` beside it, if there is one.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: they do not fit, or the latter holds no digest.
    """
    beside = require_regular_file(path).with_name(f"{path.name}.sha256")
    if not beside.is_file():
        return
    said = beside.read_bytes()[:4096].decode("ascii", "replace").split()
    if not said or len(said[0]) != 64 or set(said[0].lower()) - set("0123456789abcdef"):
        raise DamagedError(f"expected the SHA-256 of {path.name} in {beside}, as `sha256sum` writes it")
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != said[0].lower():
        raise DamagedError(
            f"{path} is damaged: its SHA-256 is {found[:12]}..., not {said[0][:12]}... as {beside.name} says"
        )


def check_zip(path: Path) -> None:
    """Compare all members of a zip archive with their checksums.

    Raises:
        DamagedError: one does not fit, or they would take too much memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(path, archive)
            wrong = archive.testzip()
    except READ_ERRORS as error:
        raise _damaged_error(path, "a zip archive", error) from error
    if wrong is not None:
        raise DamagedError(f"{path} is damaged: the checksum of {wrong!r} in it does not fit; get it or write it again")


def _check_size(path: Path, archive: zipfile.ZipFile) -> None:
    size, whole = path.stat().st_size, sum(info.file_size for info in archive.infolist())
    if whole > max(MAX_UNPACKED_BYTES, MAX_EXPANSION * size):
        raise DamagedError(
            f"{path} unpacks to {whole / 2**30:.1f} GiB, {whole / max(size, 1):.0f} times its size; above "
            f"{MAX_UNPACKED_BYTES >> 30} GiB at most {MAX_EXPANSION} times are read: save it without "
            "compression (numpy.savez)"
        )


def _read_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one array, if its header says what its size says."""
    with archive.open(info) as member:
        version = npy.read_magic(member)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, columns_first, dtype = read(member)
        if dtype.hasobject:
            raise ValueError(f"{info.filename!r} holds objects")
        stated, held = prod(shape) * dtype.itemsize, info.file_size - member.tell()
        if stated != held:
            raise ValueError(
                f"{info.filename!r} has {held} bytes of numbers, its header {shape} of {dtype} says {stated}"
            )
        atomic_files.before_disk_change("allocate", path)
        content = bytearray()
        while part := member.read(CHUNK_BYTES):  # to the end, where the checksum is compared
            content += part
    if len(content) != held:
        raise ValueError(f"{info.filename!r} ends too early")
    flat = np.frombuffer(content, dtype) if dtype.itemsize else np.zeros(prod(shape), dtype)
    return flat.reshape(shape, order="F" if columns_first else "C")


def _check_expanded(path: Path, found: Any) -> None:
    """A tensor that repeats its numbers takes no more memory than it may once they are written out."""
    if isinstance(found, dict):
        for value in found.values():
            _check_expanded(path, value)
    elif isinstance(found, Tensor) and found.layout == torch.strided:
        taken = found.numel() * found.element_size()
        if taken > max(MAX_UNPACKED_BYTES, found.untyped_storage().nbytes()):
            raise DamagedError(
                f"{path} holds a tensor {tuple(found.shape)} that repeats a few numbers over {taken >> 30} GiB"
            )


def _damaged_error(path: Path, wanted: str, error: BaseException) -> DamagedError:
    if isinstance(error, DamagedError):
        return error
    if isinstance(error, MemoryError):
        return DamagedError(f"{path} does not fit into memory")
    said = " ".join(str(error).split())[:200]
    if len(said) < 8:  # a bare key or number says nothing by itself
        said = f"it can't be read ({type(error).__name__})"
    return DamagedError(f"expected {wanted}, got {path}: {said}")
