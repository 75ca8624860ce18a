"""Nested values as a few flat tensors: what travels between processes is one block of memory for each type."""

from __future__ import annotations

import copyreg
import io
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes: a tensor starts where a fresh one would, so that kernels take the same path and round alike."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: its type, first entry and layout."""

    dtype: torch.dtype
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A value with places for its tensors, and the tensors' entries by type."""

    value: Any
    blocks: dict[torch.dtype, Tensor]


@dataclass(frozen=True)
class FlatPacked:
    """A packed value with what is in no tensor as bytes in one of its own, so that next to nothing is left beside them.

    Attributes:
        code: uint8.
        blocks: of the value.
    """

    code: Tensor
    blocks: dict[torch.dtype, Tensor]

    def opened(self) -> Packed:
        """Return the packed value again."""
        return Packed(ForkingPickler.loads(self.code.numpy().tobytes()), self.blocks)


def flatten(packed: Packed) -> FlatPacked:
    """Return the packed value, ready to be handed to as many processes as start."""
    code = io.BytesIO()
    _TensorPickler(code).dump(packed.value)
    return FlatPacked(torch.frombuffer(code.getbuffer(), dtype=torch.uint8), packed.blocks)


def unportable_reason(value: Any) -> str:
    """Return why a value can't be handed to another process, or nothing.

    Classes of a function's own are of one alone.
    """
    try:
        flatten(pack(value))
    except Exception as error:
        if type(error).__name__ in {"PicklingError", "AttributeError", "TypeError", "RuntimeError"}:
            return " ".join(str(error).split())
        raise
    return ""


class _TensorPickler(ForkingPickler):
    """Pickles tensors that are no part of a packed value, such as a model's, with their numbers.

    As torch has it, memory is handed over that only the first process which asks is given.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = copyreg.dispatch_table


def pack(value: Any) -> Packed:
    """Return a nested value (dataclasses, dicts, lists, tuples) with every tensor moved into the block of its type.

    A tensor keeps its layout if its entries fill one stretch of memory, and becomes contiguous otherwise.
    """
    parts: dict[torch.dtype, list[Tensor]] = {}
    used: dict[torch.dtype, int] = {}
    known: dict[int, tuple[_Place, Tensor]] = {}  # with the tensor, which keeps its id from being given again

    def place(tensor: Tensor) -> _Place:
        if id(tensor) not in known:
            kept = tensor.detach() if _is_dense_in_memory(tensor) else tensor.detach().contiguous()
            start, count = used.get(kept.dtype, 0), kept.numel()
            gap = kept.new_zeros(-count % max(1, _ALIGNMENT // kept.element_size()))
            parts.setdefault(kept.dtype, []).extend([kept.as_strided((count,), (1,)), gap])
            used[kept.dtype] = start + count + len(gap)
            known[id(tensor)] = (_Place(kept.dtype, start, tuple(kept.shape), kept.stride()), tensor)
        return known[id(tensor)][0]

    replaced = map_instances(value, Tensor, place)
    return Packed(replaced, {dtype: torch.cat(pieces) for dtype, pieces in parts.items()})


def unpack(packed: Packed) -> Any:
    """Return the value again, its tensors views of the blocks; one that stood in two places is one again."""
    known: dict[_Place, Tensor] = {}

    def tensor(place: _Place) -> Tensor:
        if place not in known:
            known[place] = packed.blocks[place.dtype].as_strided(place.size, place.stride, place.start)
        return known[place]

    return map_instances(packed.value, _Place, tensor)


def map_instances(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with `change` applied to every part of type `kind`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {k: map_instances(v, kind, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_instances(v, kind, change) for v in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {f.name: getattr(value, f.name) for f in fields(value)}
    changed = {k: map_instances(v, kind, change) for k, v in parts.items()}
    made = object.__new__(type(value))
    for k, v in changed.items():
        object.__setattr__(made, k, v)
    return made


def _is_dense_in_memory(tensor: Tensor) -> bool:
    """Return whether the entries lie in one stretch of memory, each once, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
