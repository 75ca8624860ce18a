"""What a network's inputs are, and how they lie in the one tensor (B, C, H, W) in [0, 1] that everything else works on.

Pictures lie as they are. A series (B, C, T) lies as (B, C, 1, T), a table (B, F) as (B, F, 1, 1), and several inputs
one after the other as (B, D, 1, 1). Numbers of another range are brought to [0, 1] and back. Ids (of tokens, of
categories) are divided by a power of two, which loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""One tensor (B, ...), several in the order of forward's arguments, or several by their names."""
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
        columns: how many ids each entry of the shape's first dimension has, where these differ; else empty.
    """

    name: str
    shape: tuple[int, ...]
    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)
    ids: int = 0
    whole: str = ""
    columns: tuple[int, ...] = ()

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

    def _largest_ids(self, like: Tensor) -> Tensor:
        """Return the largest ids, shaped to go with one example."""
        most = torch.tensor(self.columns or (self.ids,)).to(like) - 1
        return most.view(-1, *[1] * (len(self.shape) - 1)) if self.shape else most[0]

    def first_id_beyond(self, values: Tensor) -> tuple[int, int] | None:
        """Return a packed id (B, *shape) that is too large, and how many its column has; None if there is none."""
        found = (values.detach() * self._unit).round()
        most = self._largest_ids(values).expand_as(found)
        wrong = (found > most).nonzero()
        return None if not len(wrong) else (int(found[(*wrong[0],)]), int(most[(*wrong[0],)]) + 1)

    def unpack(self, values: Tensor) -> Tensor:
        """Return what values in [0, 1] (B, *shape) stand for; differentiable, but for ids."""
        if self.ids:
            whole = getattr(torch, self.whole)
            found = (values.detach() * self._unit).round().clamp_min(0)
            return torch.minimum(found, self._largest_ids(values)).to(whole)
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
        """Whether it is one picture, for which total variation and structural similarity mean something."""
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

    def split(self, packed: Tensor) -> list[Tensor]:
        """Return the parts of the one tensor (B, C, H, W), each in the shape of its argument and still in [0, 1]."""
        rows = packed.reshape(len(packed), -1)
        if len(self.parts) == 1:
            return [packed.reshape(len(packed), *self.parts[0].shape)]
        split = rows.split([part.size for part in self.parts], 1)
        return [one.reshape(len(one), *part.shape) for part, one in zip(self.parts, split, strict=True)]

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return the arguments of forward that stand in the one tensor (B, C, H, W)."""
        return [part.unpack(one) for part, one in zip(self.parts, self.split(packed), strict=True)]

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
