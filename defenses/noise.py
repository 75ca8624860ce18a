"""Gaussian noise on the update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from defenses import defenses
from fl.defense import Defense
from fl.tensors import Tensors, Value, dense, inner


@defenses.register("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(Defense):
    """Independent Gaussian noise on every entry of the update (Zhu et al., NeurIPS 2019, section 5.1).

    A heuristic, no differential privacy: nothing bounds what one image contributes. Noise has full rank, so a
    structured update leaves this defence dense. An attacker who knows it weights every tensor by the inverse of its
    noise (whitening), which makes a squared distance the likelihood.

    Attributes:
        std: standard deviation; 0 is no defence.
        unit: "relative" takes `std` in units of each tensor's own root mean square, so that every tensor has the
            signal-to-noise ratio 1 / std; "absolute" in units of the update (weights, so it depends on learning
            rate and number of steps).

    Raises:
        ValueError: if `std` is negative.
    """

    plain: ClassVar[str] = "random noise is added to the update."

    std: float = 0.1
    unit: Literal["relative", "absolute"] = "relative"

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf:
            raise ValueError(f"expected std >= 0, got {self.std}")

    @classmethod
    def example(cls) -> Noise:
        """A tenth of each tensor's size."""
        return cls(std=0.1)

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """The update plus noise."""
        if self.std == 0 or generator is None:
            return update
        noisy: Tensors = {}
        for name, value in update.items():
            scale = self.std * rms(value) if self.unit == "relative" else self.std
            matrix = dense(value)
            draw = torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype).to(matrix.device)
            noisy[name] = matrix + draw * scale
        return noisy

    def weights(self, observed: Tensors) -> dict[str, float]:
        """Inverse standard deviations of the noise, estimated from the update itself; the largest is 1."""
        if self.std == 0 or self.unit == "absolute":
            return dict.fromkeys(observed, 1.0)
        sizes = {name: rms(value) for name, value in observed.items()}  # noise inflates all by one common factor
        smallest = min((size for size in sizes.values() if size > 0), default=1.0)
        return {name: smallest / size if size > 0 else 1.0 for name, size in sizes.items()}


def rms(value: Value) -> float:
    """Root mean square of the entries; structured values stay so."""
    return math.sqrt(max(float(inner(value, value)), 0.0) / value.numel())
