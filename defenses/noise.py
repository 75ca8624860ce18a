"""Gaussian noise on the update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from defenses import defenses
from fl.defense import Defense
from fl.privacy.gaussian_noise import Noise as Secret
from fl.privacy.gaussian_noise import fresh_key
from fl.ranges import Weight
from fl.tensors import Tensors, dense, rms


@defenses.register("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(Defense):
    """Independent Gaussian noise on every entry of the update (Zhu et al., NeurIPS 2019, section 5.1).

    A heuristic, no differential privacy: nothing bounds what one image contributes. In an experiment the noise follows
    from the run's seed, and who knows that takes it off; a real update takes `release`. Noise has full rank, so a
    structured update leaves this defense dense. An attacker who knows it and solves equations weighs every tensor by
    the inverse of its noise. A search doesn't by itself: whether that helps depends on the network, with and without
    noise (`balance` of `attacks.gradient_matching.engine.base.GradientMatching`, whose 1 makes a squared distance the
    likelihood of relative noise).

    Attributes:
        std: standard deviation; 0 is no defense.
        unit: "relative" takes `std` in units of each tensor's own root mean square, so that every tensor has the
            signal-to-noise ratio 1 / std; "absolute" in units of the update (weights, so it depends on learning
            rate and number of steps).

    Raises:
        ValueError: if `std` is negative.
    """

    plain: ClassVar[str] = "random noise is added to the update."

    std: Weight = 0.1
    unit: Literal["relative", "absolute"] = "relative"

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf:
            raise ValueError(f"expected std >= 0, got {self.std}")

    @classmethod
    def example(cls) -> Noise:
        """Return a tenth of each tensor's size."""
        return cls(std=0.1)

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update plus noise."""
        if self.std == 0 or generator is None:
            return update
        noisy: Tensors = {}
        for name, value in update.items():
            scale = self.std * rms(value) if self.unit == "relative" else self.std
            matrix = dense(value)
            draw = torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype).to(matrix.device)
            noisy[name] = matrix + draw * scale
        return noisy

    def release(self, update: Tensors) -> Tensors:
        """Return the update plus noise that nobody can draw again (`fl.runtime.secure_rng`)."""
        if self.std == 0 or not update:
            return update
        matrices = {name: dense(value) for name, value in update.items()}
        drawn = Secret(fresh_key(), secret=True).like({name: value.double() for name, value in matrices.items()})
        relative = self.unit == "relative"
        scales = {name: self.std * rms(value) if relative else self.std for name, value in update.items()}
        return {name: value + drawn[name].to(value) * scales[name] for name, value in matrices.items()}

    def noise_std(self, observed: Tensors) -> dict[str, float]:
        """Return the noise's, estimated from the update itself where they are relative to it."""
        if self.unit == "absolute":
            return dict.fromkeys(observed, self.std)
        share = self.std / math.hypot(1.0, self.std)  # what was observed has the noise's share in it
        return {name: share * rms(value) for name, value in observed.items()}
