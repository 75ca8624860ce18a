"""What a network's inputs are, and how they lie in the one tensor (B, C, H, W) in [0, 1] that everything else works on.

Pictures lie as they are. A series (B, C, T) lies as (B, C, 1, T), a table (B, F) as (B, F, 1, 1), and several inputs
one after the other as (B, D, 1, 1). Numbers of another range are brought to [0, 1] and back. Ids (of tokens, of
categories) are divided by a power of two, which loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""One tensor (B, ...), several in the order of forward's arguments, or several by their names."""
Range = tuple[float | Sequence[float], float | Sequence[float]]
"""Least and largest number, one for all or one for each channel (of a table: for each column)."""
UNIFORM_STD = 12**-0.5
"""Standard deviation of a number that is equally likely anywhere in [0, 1]."""


@dataclass(frozen=True)
class InputPart:
    """One argument of a network's forward.

    Attributes:
        name: of the argument; empty where it is given by its place.
        shape: of one example.
        low: least value, one for each entry of the shape's first dimension, or one for all.
        high: largest value, likewise.
        ids: how many ids there are, where it holds ids; 0 for real numbers.
        whole: the type of ids, e.g. "int64"; empty for real numbers.
    """

    name: str
    shape: tuple[int, ...]
    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)
    ids: int = 0
    whole: str = ""

    @property
    def size(self) -> int:
        """How many numbers one example has."""
        return math.prod(self.shape)

    @property
    def is_plain(self) -> bool:
        """Whether its numbers stay as they are."""
        return not self.ids and set(self.low) == {0.0} and set(self.high) == {1.0}

    @property
    def _unit(self) -> int:
        return 2 ** max(self.ids - 1, 1).bit_length()

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return least and largest values in double precision, shaped to go with one example."""
        rest = [1] * (len(self.shape) - 1)
        low, high = (torch.tensor(x, dtype=torch.float64) for x in (self.low, self.high))
        return (low.view(-1, *rest), high.view(-1, *rest)) if self.shape else (low[0], high[0])

    def pack(self, values: Tensor) -> Tensor:
        """Return values (B, *shape) in [0, 1], in double precision."""
        if self.ids:
            return values.double() / self._unit
        low, high = (limit.to(values.device) for limit in self.limits())
        return (values.double() - low) / (high - low)

    def unpack(self, values: Tensor) -> Tensor:
        """Return what values in [0, 1] (B, *shape) stand for; differentiable, but for ids."""
        if self.ids:
            whole = getattr(torch, self.whole)
            return (values.detach() * self._unit).round().clamp(0, self.ids - 1).to(whole)
        if self.is_plain:
            return values
        low, high = (limit.to(values) for limit in self.limits())
        return values * (high - low) + low


@dataclass(frozen=True)
class InputForm:
    """What a network's inputs are.

    Attributes:
        kind: "image", "series", "table", or "several" inputs; "tokens" where there are ids alone.
        parts: the arguments of forward.
        categories: of a table, where a column of a category begins and ends that is given as one-hot numbers.
        column_std: standard deviation of each column of a table in its own units, as far as known.
    """

    kind: str
    parts: tuple[InputPart, ...]
    categories: tuple[tuple[int, int], ...] = ()
    column_std: tuple[float, ...] = ()

    @property
    def is_image(self) -> bool:
        """Whether it is one picture, of which total variation and structural similarity say something."""
        return self.kind == "image"

    @property
    def has_ids(self) -> bool:
        """Whether there are inputs that no gradient reaches."""
        return any(part.ids for part in self.parts)

    @property
    def is_plain(self) -> bool:
        """Whether the network is given the one tensor as it is."""
        return self.is_image and self.parts[0].is_plain and not self.parts[0].name

    @property
    def noun(self) -> str:
        """What one example is called."""
        return {"image": "image", "series": "series", "table": "row"}.get(self.kind, "example")

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """The shape (C, H, W) of one example in the one tensor."""
        if len(self.parts) > 1:
            return sum(part.size for part in self.parts), 1, 1
        own = self.parts[0].shape
        if len(own) == 3:
            return own[0], own[1], own[2]
        if len(own) < 2:
            return self.parts[0].size, 1, 1
        return own[0], math.prod(own[1:-1]), own[-1]

    def units(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the offset and the scale of each channel (C,): number = (value - offset) / scale."""
        means: list[float] = []
        stds: list[float] = []
        for part in self.parts:
            low, high = part.limits()
            wide = len(self.parts) > 1 and len(part.shape) > 0
            for found, value in ((means, -low / (high - low)), (stds, 1 / (high - low))):
                grown = value.expand(part.shape) if wide else value
                found.extend(grown.flatten().tolist())
        channels = self.shape[0]
        return tuple(means * (channels // len(means))), tuple(stds * (channels // len(stds)))

    def pack(self, inputs: Inputs, dtype: torch.dtype) -> Tensor:
        """Return a batch of inputs as the one tensor (B, C, H, W) in [0, 1]."""
        if self.is_plain:
            assert isinstance(inputs, Tensor)
            return inputs
        pairs = zip(self.parts, tensors_of(inputs), strict=True)
        flat = [part.pack(value).reshape(len(value), -1) for part, value in pairs]
        return torch.cat(flat, 1).to(dtype).reshape(-1, *self.shape)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return the arguments of forward that stand in the one tensor (B, C, H, W)."""
        rows = packed.reshape(len(packed), -1)
        if len(self.parts) == 1:
            return [self.parts[0].unpack(packed.reshape(len(packed), *self.parts[0].shape))]
        split = rows.split([part.size for part in self.parts], 1)
        return [part.unpack(one.reshape(len(one), *part.shape)) for part, one in zip(self.parts, split, strict=True)]

    def restore(self, packed: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        """Return the inputs as the user gives them: a tensor, several, or a dictionary, in their own units."""
        found = self.unpack(packed)
        if self.parts[0].name:
            return {part.name: value for part, value in zip(self.parts, found, strict=True)}
        return found[0] if len(found) == 1 else tuple(found)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Columns of a table that are in no category."""
        inside = {column for start, stop in self.categories for column in range(start, stop)}
        return tuple(column for column in range(self.shape[0]) if column not in inside)

    def tolerances(self) -> Tensor:
        """Return what 1 standard deviation of each column of a table is in [0, 1] (C,).

        Where it is not known, it is that of a number equally likely anywhere in its range.
        """
        if not self.column_std:
            return torch.full((self.shape[0],), UNIFORM_STD, dtype=torch.float64)
        low, high = self.parts[0].limits()
        return torch.tensor(self.column_std, dtype=torch.float64) / (high - low)


@dataclass(frozen=True)
class InputHook:
    """Gives a network its arguments in place of the one tensor, as a forward pre-hook.

    Attributes:
        form: of its inputs.
    """

    form: InputForm

    def __call__(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Return the positional and the named arguments."""
        found = self.form.unpack(args[0])
        if self.form.parts[0].name:
            return (), {part.name: value for part, value in zip(self.form.parts, found, strict=True)}
        return tuple(found), given


def image_form(shape: Sequence[int]) -> InputForm:
    """Return the form of plain pictures (C, H, W) in [0, 1]."""
    return InputForm("image", (InputPart("", tuple(shape)),))


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of a batch's inputs, in their order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)


def describe_inputs(
    inputs: Inputs,
    *,
    input_range: Range | None = None,
    categories: Sequence[tuple[int, int]] = (),
    column_std: Sequence[float] = (),
    ids: Sequence[int] = (),
) -> InputForm:
    """Return the form of a batch of inputs, or of an example of them.

    Args:
        inputs: floating-point numbers, or ids (whole numbers).
        input_range: least and largest number of the floating-point inputs; None is [0, 1].
        categories: of a table, first column of each category and the one behind its last.
        column_std: standard deviation of each column of a table.
        ids: of each input how many ids there are, where that is known; 0 takes the largest of the batch.

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
        known = ids[number] if number < len(ids) else 0
        count = max(known, int(value.max()) + 1)
        parts.append(InputPart(name, shape, ids=count, whole=str(value.dtype).removeprefix("torch.")))
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
    if not all(a < b for a, b in zip(low, high, strict=True)):
        raise ValueError(f"expected input_range (low, high) with low < high, got {low}, {high}")
    return InputPart(name, shape, low, high)


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
    """Refuse a batch (B, C, H, W) whose numbers are not in the range stated, or whose categories are none.

    Raises:
        ValueError: says what it found, and in which column.
    """
    for start, stop in form.categories:
        group = form.unpack(packed)[0][:, start:stop]
        if not bool(((group == 0) | (group == 1)).all() and (group.sum(1) == 1).all()):
            raise ValueError(f"expected one 1 and else 0 in columns {start} to {stop - 1}, a category, got others")
    low, high = float(packed.min()), float(packed.max())
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        found = [value for part, value in zip(form.parts, form.unpack(packed), strict=True) if not part.ids]
        least, most = min(float(x.min()) for x in found), max(float(x.max()) for x in found)
        stated = next(part for part in form.parts if not part.ids)
        if stated.is_plain:
            raise ValueError(
                f"expected numbers in [0, 1], got {least:.4g} to {most:.4g}: state what the attacker knows of their "
                "range, input_range=(low, high)"
            )
        raise ValueError(
            f"expected numbers in the input_range stated, {min(stated.low):g} to {max(stated.high):g}, got {least:.4g} "
            f"to {most:.4g}"
        )
