"""Find out what a network's inputs are from a batch of them, and whether numbers are what was stated of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl.inputs.form import InputForm, InputPart, Inputs, tensors_of

Range = tuple[float | Sequence[float], float | Sequence[float]]
"""Least and largest number, one for all or one for each channel (of a table: for each column)."""


def describe_inputs(
    inputs: Inputs,
    *,
    input_range: Range | None = None,
    categories: Sequence[tuple[int, int]] = (),
    column_std: Sequence[float] = (),
    ids: Sequence[Sequence[int]] = (),
) -> InputForm:
    """Return the form of a batch of inputs, or of an example of them.

    Args:
        inputs: floating-point numbers, or ids (whole numbers).
        input_range: least and largest number of the floating-point inputs; None is [0, 1].
        categories: of a table, first column of each category and the one behind its last.
        column_std: standard deviation of each column of a table.
        ids: of each input how many ids there are, where that is known: one number, or one for each column. None takes
            the largest of the batch.

    Raises:
        ValueError: inputs are no tensors with one example each, or the rest does not fit them; says what.
    """
    tensors, names = tensors_of(inputs), list(inputs) if isinstance(inputs, Mapping) else []
    _check_tensors(tensors)
    low, high = _range(input_range)
    parts = []
    for number, value in enumerate(tensors):
        shape, name = tuple(value.shape[1:]), names[number] if names else ""
        if value.is_floating_point():
            part = _real_part(name, shape, low, high, alone=len(tensors) == 1)
            parts.append(_with_categories(part, categories) if categories else part)
            continue
        if value.dtype == torch.bool:
            parts.append(InputPart(name, shape, ids=2, whole="bool"))
            continue
        if int(value.min()) < 0:
            raise ValueError(f"expected ids >= 0 in inputs of {value.dtype}, got {int(value.min())}")
        known = tuple(ids[number]) if number < len(ids) else ()
        count = max(*known, int(value.max()) + 1, 0)
        columns = known if len(known) > 1 else ()
        whole = str(value.dtype).removeprefix("torch.")
        parts.append(InputPart(name, shape, ids=count, whole=whole, columns=columns))
    form = InputForm(_kind(parts), tuple(parts), tuple((int(a), int(b)) for a, b in categories), tuple(column_std))
    _check_table(form)
    return form


def _real_part(
    name: str, shape: tuple[int, ...], low: tuple[float, ...], high: tuple[float, ...], *, alone: bool
) -> InputPart:
    channels = shape[0] if shape else 1
    for what, limit in (("low", low), ("high", high)):
        if len(limit) not in {1, channels} or (len(limit) > 1 and not alone):
            raise ValueError(
                f"expected input_range with one {what} value, or one for each of {channels} channels of a single "
                f"input, got {len(limit)}"
            )
    low, high = (limit * (channels if len(low + high) > 2 and len(limit) == 1 else 1) for limit in (low, high))
    _check_order(low, high)
    return InputPart(name, shape, low, high)


def check_range(given: Range | None) -> None:
    """Refuse a range in which no number lies, whatever the inputs are.

    Args:
        given: as for `describe_inputs`.

    Raises:
        ValueError: its ends are no finite numbers, or a least one is not below its largest.
    """
    low, high = _range(given)
    if len(low) != len(high) and 1 not in {len(low), len(high)}:
        raise ValueError(f"expected input_range with as many least as largest numbers, got {len(low)} and {len(high)}")
    channels = max(len(low), len(high))
    _check_order(*(end * (channels if len(end) == 1 else 1) for end in (low, high)))


def _check_order(low: tuple[float, ...], high: tuple[float, ...]) -> None:
    if not all(a < b for a, b in zip(low, high, strict=True)):
        raise ValueError(f"expected input_range (low, high) with low < high, got {low}, {high}")


def _with_categories(part: InputPart, categories: Sequence[tuple[int, int]]) -> InputPart:
    """Return a table's part with 0 and 1 as the limits of columns that are in a category."""
    columns = part.shape[0] if part.shape else 1
    low, high = ([*limit] * (1 if len(limit) == columns else columns) for limit in (part.low, part.high))
    for start, stop in categories:
        for column in range(max(start, 0), min(stop, columns)):
            low[column], high[column] = 0.0, 1.0
    return replace(part, low=tuple(low), high=tuple(high))


def _range(given: Range | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if given is None:
        return (0.0,), (1.0,)
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"expected input_range as (low, high), got {given!r}")
    ends = []
    for end in given:
        numbers = end.tolist() if hasattr(end, "tolist") else end
        numbers = [numbers] if isinstance(numbers, int | float) else numbers
        if not isinstance(numbers, Sequence) or not numbers or not all(math.isfinite(float(x)) for x in numbers):
            raise ValueError(f"expected input_range as finite numbers (low, high), got {given!r}")
        ends.append(tuple(float(x) for x in numbers))
    return ends[0], ends[1]


def _kind(parts: Sequence[InputPart]) -> str:
    if all(part.ids for part in parts):
        return "tokens"
    if len(parts) > 1:
        return "several"
    rank = len(parts[0].shape)
    return {0: "table", 1: "table", 3: "image"}.get(rank, "series")


def _check_tensors(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("expected at least one input, got none")
    for value in tensors:
        if not isinstance(value, Tensor):
            raise ValueError(f"expected inputs as tensors, got {type(value).__name__}; torch.as_tensor makes one")
        if value.ndim < 1 or not len(value) or 0 in value.shape:
            raise ValueError(f"expected inputs (B, ...) of at least one example, got {tuple(value.shape)}")
        if value.is_complex():
            raise ValueError(f"expected real inputs, got {value.dtype}")
    if len({len(value) for value in tensors}) > 1:
        raise ValueError(f"expected as many examples in each input, got {[len(value) for value in tensors]}")


def _check_table(form: InputForm) -> None:
    columns = form.shape[0]
    if (form.categories or form.column_std) and form.kind != "table":
        raise ValueError(f"expected a table (B, F) beside categories or column_std, got inputs of kind {form.kind!r}")
    last = 0
    for start, stop in form.categories:
        if not last <= start < stop - 1 < columns:
            raise ValueError(
                f"expected categories as (first, behind the last) of at least 2 of {columns} columns, in ascending "
                f"order, got {(start, stop)}"
            )
        last = stop
    if form.column_std and (len(form.column_std) != columns or min(form.column_std) <= 0):
        raise ValueError(f"expected column_std > 0 for each of {columns} columns, got {len(form.column_std)} numbers")


def check_values(form: InputForm, packed: Tensor) -> None:
    """Refuse a batch (B, C, H, W) whose numbers are not in the range stated, ids too large, or categories none.

    Raises:
        ValueError: says what it found, and in which column.
    """
    if not bool(packed.isfinite().all()):
        raise ValueError("expected finite numbers, got inputs with NaN or infinite ones: leave these examples out")
    for start, stop in form.categories:
        group = form.unpack(packed)[0][:, start:stop]
        if not bool(((group == 0) | (group == 1)).all() and (group.sum(1) == 1).all()):
            raise ValueError(f"expected one 1 and else 0 in columns {start} to {stop - 1}, a category, got others")
    for part, value in zip(form.parts, form.split(packed), strict=True):
        if part.ids and (beyond := part.first_id_beyond(value)) is not None:
            raise ValueError(
                f"expected ids below {beyond[1]}, as many as the network takes or the example that was given has, got "
                f"{beyond[0]}: give an example with the largest ids"
            )
    low, high = float(packed.min()), float(packed.max())
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        found = [value for part, value in zip(form.parts, form.unpack(packed), strict=True) if not part.ids]
        least, most = min(float(x.min()) for x in found), max(float(x.max()) for x in found)
        stated = next(part for part in form.parts if not part.ids)
        if stated.is_plain:
            bytes_ = form.is_image and least >= 0 and 2 < most <= 255
            hint = "; of pixels from 0 to 255 give images / 255" if bytes_ else ""
            raise ValueError(
                f"expected numbers in [0, 1], got {least:.4g} to {most:.4g}: state what the attacker knows of their "
                f"range, input_range=(low, high){hint}"
            )
        raise ValueError(
            f"expected numbers in the input_range stated, {min(stated.low):g} to {max(stated.high):g}, got {least:.4g} "
            f"to {most:.4g}"
        )
