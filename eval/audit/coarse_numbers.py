"""What numbers of two bytes, or of one, leave of an update: how far each may be off, and that in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from attacks.update.quantization_grids import (
    MIN_ENTRIES,
    OFF_ROW,
    bits_of_grid,
    grid_steps,
    step_beside,
    were_rows_rounded,
)

DIGITS = {
    torch.float16: "about 3 digits",
    torch.bfloat16: "2 to 3 digits",
    torch.float8_e4m3fn: "about 1 digit",
    torch.float8_e4m3fnuz: "about 1 digit",
    torch.float8_e5m2: "less than 1 digit",
    torch.float8_e5m2fnuz: "less than 1 digit",
    torch.float8_e8m0fnu: "powers of two alone",
}
"""What numbers of such types hold."""
SIGN_STEPS = ", or as several steps of one size, or of few, make them (signSGD, Lion, Rprop)"
"""What else leaves a grid that all tensors share."""
MOST_BITS_OF_SIGNS = 5
"""Bits of a number that is a sum of some ten signs, of which more take other values than a few."""
MOST_ROWS = 8
"""Rows of a tensor, with grids of their own, by which small tensors beside it are read."""
SMALL_SHARE = 0.01
"""Share of float16's numbers that lie below its range, from which on they look like those of another type."""
LARGE_SHARE = 0.1
"""Share of an update's length from which on what rounding may be of it is said."""


def rounding_bounds(
    update: Mapping[str, Tensor], *states: Mapping[str, Tensor], known: Sequence[Mapping[str, Tensor]] = ()
) -> dict[str, Tensor]:
    """Return how far rounding may put each number of an update off, of tensors that are coarse.

    Args:
        update: by name; floating-point tensors count.
        states: what it was computed from: itself, or weights before and after. They are off by half of their numbers'
            last place at most, on an even grid by a step (which way it was rounded nobody says), together by the sum.
        known: of each state, how far tensors may be off of which that is known.
    """
    found: dict[str, Tensor] = {}
    nothing: Mapping[str, Tensor] = {}
    for state, told in zip_longest(states, known, fillvalue=nothing):
        own = {name: bound for name, bound in told.items() if name in update}
        own |= _bounds({name: value for name, value in state.items() if name in update and name not in own})
        for name, bound in own.items():
            found[name] = found.get(name, 0.0) + bound
    return found


def _bounds(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return how far numbers of tensors may be off, of those that are coarse."""
    found = {name: _half_spacing(value) for name, value in state.items() if value.dtype in DIGITS}
    plain = {n: v for n, v in state.items() if n not in found and v.is_floating_point() and bool(v.isfinite().all())}
    rows = were_rows_rounded(plain.values())
    known = {name: grid_steps(value, of_one_row=rows) for name, value in plain.items()}
    steps = {name: step for name, step in known.items() if step is not None}
    larger = dict[Tensor, float]()
    for name, step in steps.items():
        parts = zip(plain[name], step.flatten().tolist(), strict=True) if step.ndim else [(plain[name], float(step))]
        larger |= dict([(row, one) for row, one in parts if one][:MOST_ROWS])
    for name, value in plain.items():
        few = name not in steps and value.numel() < MIN_ENTRIES
        if (own := _step_of_few(value, larger) if few else steps.get(name)) is not None and bool(own.any()):
            found[name] = own.to(value.device).expand(value.shape)
    return found


def _step_of_few(value: Tensor, larger: Mapping[Tensor, float]) -> Tensor | None:
    """Return the step of the grid of a small tensor, or one for each of its rows; None where it has none."""
    if step := step_beside(value, larger):
        return torch.tensor(step, dtype=torch.float64)
    if value.ndim < 2:
        return None
    steps = [step_beside(row, larger) for row in value]
    if not all(step or not bool(row.any()) for step, row in zip(steps, value, strict=True)):
        return None
    return torch.tensor(steps, dtype=torch.float64).view(-1, *[1] * (value.ndim - 1))


def grid_bounds(
    update: Mapping[str, Tensor], start: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return how far numbers may be off in a difference of weights that was sent in few bits before it was taken off.

    Args:
        update: by name.
        start: the weights before.
        known: tensors whose rounding is known already.
    """
    found = _bounds({name: value for name, value in update.items() if name not in known})
    large = {name: update[name] for name in found if update[name].numel() >= MIN_ENTRIES}
    rows = were_rows_rounded(large.values())
    sent = {name for name, value in large.items() if bits_of_grid(value, start.get(name), of_one_row=rows)}
    return {name: bound for name, bound in found.items() if sent and (name in sent or name not in large)}


def grid_note(update: Mapping[str, Tensor], start: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> list[str]:
    """Return which tensors lie on an even grid, as of numbers that were sent in few bits; nothing where none do.

    Args:
        update: by name.
        start: the weights before, whose own last places are no such grid.
        known: tensors of which it is known already in what they were sent.
    """
    told = {name for name, value in update.items() if name in known or value.dtype in DIGITS}
    plain = {n: v for n, v in update.items() if n not in told and v.is_floating_point() and bool(v.isfinite().all())}
    rows = were_rows_rounded(plain.values())
    bits = {name: bits_of_grid(value, start.get(name), of_one_row=rows) for name, value in plain.items()}
    found = {name: count for name, count in bits.items() if count}
    if not found:
        return []
    counts = " to ".join(dict.fromkeys(str(count) for count in (min(found.values()), max(found.values()))))
    names = f"{', '.join(list(found)[:3])}{f' and {len(found) - 3} more' if len(found) > 3 else ''}"
    signs = _may_be_steps_of_signs([plain[name] for name in found], max(found.values()), rows)
    sent = f"as sent in {counts} bits{SIGN_STEPS if signs else ''}"
    return [f"{names}: numbers on an even grid, {sent}; whether images fit is asked beyond its step"]


def _may_be_steps_of_signs(tensors: Sequence[Tensor], bits: int, rows: bool) -> bool:
    """Return whether all numbers of an update may be sums of few steps of one size: then all are on one grid."""
    known = [steps for value in tensors if (steps := grid_steps(value, of_one_row=rows)) is not None]
    steps = torch.cat([one.flatten() for one in known])
    times = steps[steps > 0] / steps[steps > 0].min()  # rows of a kernel may lack a level
    return bits <= MOST_BITS_OF_SIGNS and bool(((times - times.round()).abs() < OFF_ROW * times).all())


def _half_spacing(values: Tensor) -> Tensor:
    kind, sizes = torch.finfo(values.dtype), values.double().abs()
    exponent = torch.frexp(sizes.clamp(min=kind.tiny)).exponent
    return torch.ldexp(torch.full_like(sizes, kind.eps / 4), exponent)


def rounding_share(update: Mapping[str, Tensor], bounds: Mapping[str, Tensor]) -> float:
    """Return how much of an update's length rounding may be, as of numbers that are anywhere within their bounds."""
    noise = sum(float(bound.square().sum()) / 3 for bound in bounds.values())
    size = sum(float(value.double().square().sum()) for value in update.values() if value.is_floating_point())
    return math.sqrt(noise / size) if size else 0.0


def coarse_type(tensors: Mapping[str, Tensor]) -> str:
    """Return the type that all of an update's numbers were sent in, where they do not show it themselves; else nothing.

    Numbers of one byte, and those of float16 that lie below its range, look like those of bfloat16.
    """
    kinds = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(kinds) != 1 or not kinds <= DIGITS.keys():
        return ""
    (kind,) = kinds
    sizes = torch.cat([value.flatten().abs().float() for value in tensors.values() if value.is_floating_point()])
    small = ((sizes > 0) & (sizes < torch.finfo(kind).tiny)).double().mean() > SMALL_SHARE * (sizes > 0).double().mean()
    return str(kind).removeprefix("torch.") if kind.itemsize == 1 or (kind is torch.float16 and bool(small)) else ""


def coarse_in_part(tensors: Mapping[str, Tensor]) -> str:
    """Return the coarsest type of an update's tensors, and that others have a finer one; nothing where all have one.

    Args:
        tensors: that the update is made of, by name: floating-point ones, no buffers.
    """
    kinds = {value.dtype for value in tensors.values()}
    coarse = sorted(kinds & DIGITS.keys(), key=lambda kind: (-torch.finfo(kind).eps, str(kind)))
    return f"{str(coarse[0]).removeprefix('torch.')} in some of its tensors" if coarse and len(kinds) > 1 else ""


def coarse_note(tensors: Mapping[str, Tensor], what: str) -> list[str]:
    """Return what coarse numbers leave of tensors; nothing where there are none.

    Args:
        tensors: by name.
        what: "weights", or "update".
    """
    kinds = {value.dtype for value in tensors.values()} & DIGITS.keys()
    said = [f"{str(kind).removeprefix('torch.')}: {DIGITS[kind]}" for kind in sorted(kinds, key=str)]
    if not said:
        return []
    left = " of the weights, of their difference fewer" if what == "weights" else " of each number"
    return [f"{', '.join(said)}{left}; exact attacks may find and confirm less than in float32"]


def share_note(update: Mapping[str, Tensor], bounds: Mapping[str, Tensor]) -> list[str]:
    """Return that rounding may be much of an update's length; nothing where it is little."""
    share = rounding_share(update, bounds)
    if share < LARGE_SHARE:
        return []
    size = "more than all" if share > 1 else f"{share:.0%}"
    return [f"rounding may be {size} of the update's length; whether given images fit is asked beyond it alone"]
