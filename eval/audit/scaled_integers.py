"""Tensors in integers beside their scales, as updates are sent in eight bits: written out as what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

JOINTS = ("_", ".", "/", ":")
SCALES, ZEROS = ("scale", "scales"), ("zero_point", "zero_points", "zero", "offset")
"""What a tensor's scale, and the integer that stands for 0, are called behind its name."""
INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
T = TypeVar("T")


def write_out_integers(tensors: Mapping[str, T]) -> tuple[dict[str, T | Tensor], list[str]]:
    """Return tensors with (values - zero_point) * scale in place of integers that have a scale beside them, and a note.

    A scale is one number, or one for each row of the tensor (its first dimension).

    Args:
        tensors: by name; a scale is called as its tensor with `_scale` behind, say.
    """
    found: dict[str, T | Tensor] = dict(tensors)
    written = []
    for name, value in tensors.items():
        scale, zero = (_beside(tensors, name, words) for words in (SCALES, ZEROS))
        if not isinstance(value, Tensor) or value.dtype not in INTEGERS or scale is None:
            continue
        factors = [None if part is None else _by_row(tensors[part], value) for part in (scale, zero)]
        if factors[0] is None or (zero is not None and factors[1] is None):
            continue
        found[name] = (value.float() - (0 if factors[1] is None else factors[1])) * factors[0]
        written.append(name)
        for part in filter(None, (scale, zero)):
            del found[part]
    some = f"{', '.join(written[:3])}{f' and {len(written) - 3} more' if len(written) > 3 else ''}"
    return found, [f"{some}: integers, written out as (values - zero_point) * scale"] if written else []


def _beside(names: Mapping[str, object], name: str, words: tuple[str, ...]) -> str | None:
    return next((own for word in words for joint in JOINTS if (own := f"{name}{joint}{word}") in names), None)


def _by_row(factor: object, value: Tensor) -> Tensor | None:
    """Return a factor of all numbers of a tensor, or one of each row; None where it is neither."""
    if not isinstance(factor, Tensor):
        return None
    plain = factor.float()
    if plain.numel() == 1:
        return plain.flatten()[0]
    if value.ndim and plain.numel() == len(value) and plain.squeeze().ndim == 1:
        return plain.flatten().view(-1, *[1] * (value.ndim - 1))
    return None
