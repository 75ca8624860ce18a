"""Tensors in integers or in numbers of one byte beside their scales: written out as what they stand for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.audit.coarse_numbers import DIGITS, rounding_bounds

JOINTS = ("_", ".", "/", ":")
SCALES, ZEROS = ("scale", "scales", "scale_inv"), ("zero_point", "zero_points", "zero", "offset")
"""What a tensor's scale, and the integer that stands for 0, are called behind its name. All these scales multiply: that
which is called "inv" as well (of DeepSeek, of Transformer Engine) is the inverse of what numbers were multiplied by."""
INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
BYTES = {kind for kind in DIGITS if kind.itemsize == 1}
BESIDE = re.compile(
    r"^[_./:](?:.*_)?(scales?|scale_inv|zero_points?|zeros?|offset|absmax|quant_map|g_idx|shape|mask)(?![a-z])"
)
"""What stands behind a tensor's name in those of what it takes to tell its numbers."""
REMEDY = "write the tensor out as plain numbers first"
COUNTER = "num_batches_tracked"
"""End of the name of a count, which no scale of all tensors is of."""


@dataclass(frozen=True)
class Scaled:
    """What is known of tensors that were written out.

    Attributes:
        rounding: how far their numbers may be off, by name.
        sent_as: what they were, in words; empty where there are none.
        notes: what to say of it.
    """

    rounding: dict[str, Tensor] = field(default_factory=dict)
    sent_as: str = ""
    notes: tuple[str, ...] = ()


def write_out_scaled(tensors: Mapping[str, object], wanted: str) -> tuple[dict[str, object], Scaled]:
    """Return tensors with (values - zero_point) * scale in place of those that have a scale beside them.

    A scale is one number, or one for each row of the tensor (its first dimension), or for each block of it; a single
    one called "scale" is that of all tensors, where all are in integers or in one byte.

    Args:
        tensors: by name; a scale is called as its tensor with `_scale` behind, say.
        wanted: the beginning of an error.

    Returns:
        All, and what is known of those that were written out.

    Raises:
        ValueError: a scale, or an integer that stands for 0, that can't be one of its tensor.
    """
    found, rounding, written, kinds = dict(tensors), dict[str, Tensor](), list[str](), set[str]()
    common = _common_scale(tensors)
    for name, value in tensors.items():
        scale, zero = (_beside(tensors, name, words) for words in (SCALES, ZEROS))
        if scale is None and not name.endswith(COUNTER):
            scale = common
        if not isinstance(value, Tensor) or value.dtype not in INTEGERS | BYTES or scale is None:
            continue
        if not _is_scale_of(tensors[scale]):
            continue
        factor, start = _factor_and_start(tensors, name, scale, zero, wanted)
        found[name] = (value.float() - start) * factor
        bounds = rounding_bounds({name: value}, {name: value}) if value.dtype in BYTES else {}
        rounding[name] = bounds.get(name, torch.ones(())).double() * factor.double().abs().expand(value.shape)
        written.append(name)
        kinds.add(str(value.dtype).removeprefix("torch."))
        for part in filter(None, (scale, zero)):
            found.pop(part, None)
    some = f"{', '.join(written[:3])}{f' and {len(written) - 3} more' if len(written) > 3 else ''}"
    what = "numbers of one byte" if any("float" in kind for kind in kinds) else "integers"
    note = f"{some}: {what}, written out as (values - zero_point) * scale"
    _refuse_left_scales(found, wanted)
    return found, Scaled(rounding, f"{' and '.join(sorted(kinds))} with a scale", (note,)) if written else Scaled()


def _factor_and_start(
    tensors: Mapping[str, object], name: str, scale: str, zero: str | None, wanted: str
) -> tuple[Tensor, Tensor | int]:
    """Return what a tensor's numbers are multiplied by, and which of them stands for 0.

    Raises:
        ValueError: one of the two can't be of this tensor.
    """
    value = tensors[name]
    assert isinstance(value, Tensor)
    factor = _spread(tensors[scale], value)
    if factor is None:
        shape = tuple(torch.as_tensor(tensors[scale]).shape)
        shapes = f"{name!r}, {tuple(value.shape)}, {scale!r}, {shape}, stands"
        raise ValueError(f"{wanted}, got nothing that tells for which numbers of {shapes}: {REMEDY}")
    start = 0 if zero is None else _as_zero_point(tensors[zero], value)
    if start is None:
        raise ValueError(
            f"{wanted}, got {zero!r} that is no zero point of {name!r}: expected whole numbers that "
            f"{str(value.dtype).removeprefix('torch.')} can have. What is added behind the scale is none: write "
            "the tensor out, values * scale + offset"
        )
    return factor, start


def _refuse_left_scales(found: Mapping[str, object], wanted: str) -> None:
    """Refuse a number that may be a factor of a tensor of which it was not taken for one."""
    for name, value in found.items():
        lost = None if isinstance(value, Tensor) else find_lost_scale([name], found.keys() - {name})
        if lost is not None and isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(
                f"{wanted}, got {value!r} under {name!r}, which may be a factor of {lost[0]!r}: multiply the tensor "
                "with it, or leave it out"
            )


def find_lost_scale(left: Collection[str], taken: Collection[str]) -> tuple[str, str] | None:
    """Return a tensor that is taken, and a missing one without which it can't be told; None if there is none."""
    for name in left:
        for cut in (match.start() for match in re.finditer(r"[_./:]", name)):
            if name[:cut] in taken and BESIDE.match(name[cut:]):
                return name[:cut], name
    return None


def _beside(names: Collection[str], name: str, words: Collection[str]) -> str | None:
    return next((own for word in words for joint in JOINTS if (own := f"{name}{joint}{word}") in names), None)


def _common_scale(tensors: Mapping[str, object]) -> str | None:
    """Return the name of the one scale of all tensors; None where there is none, or others are there."""
    name = next((word for word in SCALES if word in tensors), None)
    if name is None or (number := _as_number(tensors[name])) is None or number.numel() != 1:
        return None
    rest = [value for other, value in tensors.items() if other != name and isinstance(value, Tensor)]
    return name if rest and all(value.dtype in INTEGERS | BYTES for value in rest) else None


def _as_number(value: object) -> Tensor | None:
    """Return a tensor as it is, and a number of Python as one in double precision; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        return None
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _is_scale_of(scale: object) -> bool:
    """Return whether a tensor may be the scale of another one, and is none that was sent in as few bits itself."""
    if not isinstance(scale, Tensor):
        return True
    return scale.is_floating_point() and (scale.dtype not in BYTES or scale.dtype is torch.float8_e8m0fnu)


def _as_zero_point(zero: object, value: Tensor) -> Tensor | None:
    """Return the integers that stand for 0, for all numbers of a tensor; None where they can be none."""
    plain = _as_number(zero)
    if plain is None or (factor := _spread(zero, value)) is None:
        return None
    exact, least, most = plain.double(), 0, 0
    if value.dtype in INTEGERS:
        least, most = torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max
    whole = bool(((exact == exact.round()) & (exact >= least) & (exact <= most)).all())
    return factor if whole else None


def _spread(factor: object, value: Tensor) -> Tensor | None:
    """Return a factor of all numbers of a tensor, or of its rows or blocks, in a shape that goes with it; or None."""
    plain = _as_number(factor)
    if plain is None or not plain.numel():
        return None
    plain = plain.float()
    if plain.numel() == 1:
        return plain.flatten()[0]
    if plain.ndim == value.ndim:
        blocks = _blocks(tuple(value.shape), tuple(plain.shape))
        for dim, block in enumerate(blocks or ()):
            if plain.shape[dim] > 1:
                plain = plain.repeat_interleave(block, dim).narrow(dim, 0, value.shape[dim])
        return plain if blocks else None
    if value.ndim and plain.numel() == len(value) and plain.squeeze().ndim == 1:
        return plain.flatten().view(-1, *[1] * (value.ndim - 1))
    return None


def _blocks(sizes: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Return how many numbers share a scale in each dimension; None where none do, or several numbers would do.

    Blocks are of 2 to some power, of which the last may be cut short, or all of one size; where that leaves several,
    they are as long in one dimension as in another.
    """
    fits = [_block_sizes(size, count) for size, count in zip(sizes, counts, strict=True)]
    several = [found for found in fits if len(found) > 1]
    cut = [found for found, size, count in zip(fits, sizes, counts, strict=True) if count not in {1, size}]
    shared = set.intersection(*cut) or set.intersection(*several) if several else set()
    chosen = [found if len(found) < 2 else shared for found in fits]
    return [next(iter(found)) for found in chosen] if all(len(found) == 1 for found in chosen) else None


def _block_sizes(size: int, count: int) -> set[int]:
    if count in {1, size}:
        return {size // count} if size else {1}
    fits = {2**power for power in range(size.bit_length()) if -(-size // 2**power) == count}
    return fits | ({size // count} if not size % count else set())
