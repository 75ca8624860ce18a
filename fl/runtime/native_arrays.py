"""NumPy arrays of any kind of number as tensors: of the other byte order, of long floating-point numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PACKED_HINT = (
    "as NumPy writes numbers of a type that it has not, such as bfloat16 of JAX or TensorFlow: "
    "array.astype('float32') before it is saved"
)
SHORT = ("bfloat16", "float8")
"""What types of two bytes or one are called in names of the package ml_dtypes, which NumPy calls raw bytes."""


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the same numbers in a type and a byte order that PyTorch has; others stay as they are.

    Numbers longer than 8 bytes (`numpy.longdouble`) become float64, which rounds them, and complex ones likewise; those
    of bfloat16 and float8 in JAX and TensorFlow become float32.
    """
    kind, name = array.dtype.kind, array.dtype.name
    if (kind == "f" and array.dtype.itemsize > 8) or (kind == "c" and array.dtype.itemsize > 16):
        return array.astype(np.float64 if kind == "f" else np.complex128)
    if name.startswith(SHORT):
        return array.astype(np.float32)
    return array.astype(array.dtype.newbyteorder("="), copy=False) if kind in "biufc" else array


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor of an array's numbers, which may share its memory.

    Args:
        array: of truth values or numbers, of any length and byte order.

    Raises:
        ValueError: it holds something else; says what.
    """
    plain = native(array)
    if plain.dtype.kind not in "biufc":
        packed = f", {PACKED_HINT}" if plain.dtype.kind == "V" and plain.dtype.names is None else ""
        raise ValueError(f"expected numbers, got an array of {array.dtype}{packed}")
    return torch.from_numpy(plain.copy() if any(step < 0 for step in plain.strides) else plain)
