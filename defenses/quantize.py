"""Quantization: every number of the update is rounded to one of a few values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from defenses import defenses
from fl.defense import Defense
from fl.ranges import Range
from fl.tensors import Tensors, dense

MAX_COARSE_BITS = 3
"""Up to so many bits an attacker does better with the grid than without; beyond it, without."""

FLOAT_FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@defenses.register("quantize")
@dataclass(frozen=True, kw_only=True)
class Quantize(Defense):
    """Each tensor on an even grid between its extremes (Konecny et al., 2016, section 3), or in a short float type.

    A structured update leaves this defense dense. An attacker who knows it puts its predictions on the observed grid
    where that is coarse, with derivatives that pass straight through: most entries then share a value that may be far
    from their own. A fine grid it leaves out, since it only roughens the search; counting no error within a cell did
    worse than either.

    Attributes:
        format: "uniform" is the grid; "float16" and "bfloat16" round to those types (16 bits per number). float16
            takes what is below 3e-8 to zero and what is above 65504 to infinity.
        bits: per number, on a grid of 2^bits values, in [1, 16]; two float32 numbers per tensor say its
            extremes.
        rounding: "nearest", or "stochastic" for unbiased random rounding (uniform format only).

    Raises:
        ValueError: a setting out of range, or stochastic rounding to a float type.
    """

    plain: ClassVar[str] = "the numbers of the update are rounded to a few values."

    format: Literal["uniform", "float16", "bfloat16"] = "uniform"
    bits: Annotated[int, Range(1, 16)] = 8
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"expected bits in [1, 16], got {self.bits}")
        if self.format in FLOAT_FORMATS and self.rounding == "stochastic":
            raise ValueError(f"expected rounding 'nearest' with format {self.format!r}, got 'stochastic'")

    @classmethod
    def example(cls) -> Quantize:
        """Return quantization to sixteen values."""
        return cls(bits=4)

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update, rounded; derivatives pass straight through."""
        if self.rounding == "stochastic" and generator is None:
            return update
        return {
            name: _straight_through(dense(value), self._quantize(dense(value), generator))
            for name, value in update.items()
        }

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction on the observed grid, where that is coarse; derivatives pass straight through."""
        if self.format in FLOAT_FORMATS or self.rounding == "stochastic" or self.bits > MAX_COARSE_BITS:
            return predicted
        rounded: Tensors = {}
        for name, value in predicted.items():
            matrix, seen = dense(value), dense(observed[name])
            rounded[name] = _straight_through(matrix, self._round_to_grid(matrix, *self._grid(seen), 0.5))
        return rounded

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return all of it, but for the rounding."""
        return known

    def with_unknown_scale(self) -> Defense:
        """Return no defense: the distance of two values on the grid is known only as far as the unit is."""
        return Defense()

    def _quantize(self, matrix: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.format in FLOAT_FORMATS:
            return matrix.to(FLOAT_FORMATS[self.format]).to(matrix.dtype)
        up: Tensor | float = 0.5
        if self.rounding == "stochastic":
            up = torch.rand(matrix.shape, generator=generator, dtype=matrix.dtype).to(matrix.device)
        return self._round_to_grid(matrix, *self._grid(matrix), up)

    def _grid(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest value and the distance of two, as they are sent."""
        low, high = matrix.amin(), matrix.amax()
        return low.float().to(matrix.dtype), ((high - low) / (2**self.bits - 1)).float().to(matrix.dtype)

    def _round_to_grid(self, matrix: Tensor, low: Tensor, width: Tensor, up: Tensor | float) -> Tensor:
        """Round `matrix` down to the grid after `up` of a step is added."""
        level = ((matrix - low) / torch.where(width > 0, width, 1.0) + up).floor()
        return low + level.clamp(0, 2**self.bits - 1) * width


def _straight_through(matrix: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the derivatives of `matrix`."""
    return rounded.detach() + (matrix - matrix.detach())
