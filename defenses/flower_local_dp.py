"""Flower's LocalDpMod: a client clips its update and adds Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from defenses import defenses
from defenses.clip import Clip, ClipOfUnknownNorm
from defenses.noise import Noise
from fl.defense import Defense
from fl.method import Method
from fl.privacy.accounting import Charge
from fl.privacy.client_level import state_client_level
from fl.privacy_statement import PrivacyStatement
from fl.ranges import OpenShare, Positive, Weight
from fl.tensors import Tensors
from fl.types import Task


@defenses.register("flower-local-dp")
@dataclass(frozen=True, kw_only=True)
class FlowerLocalDp(Defense):
    """Clips the update and adds noise (Dwork and Roth, 2014, Theorem A.1), as Flower 1.42's LocalDpMod does it.

    The noise's standard deviation is sensitivity * sqrt(2 ln(1.25 / delta)) / epsilon. Flower takes the sensitivity as
    it is told: it proves `epsilon` only where no client moves its update by more, which takes `clipping_norm`, or twice
    that where a client stands in for another, and only up to an epsilon of one. `privacy` says what follows from noise
    and clip themselves, exactly (Balle and Wang, ICML 2018). Flower has no defaults; these are ours.

    An attacker who knows it clips its predictions, too, and weighs tensors by the noise. Norms count what is sent as
    parameters; Flower counts buffers among the arrays, and fails at those of whole numbers, such as batch
    normalization's counters.

    Attributes:
        clipping_norm: longest norm of all that is sent, in units of the update.
        sensitivity: how far a client can move its update, as Flower is told; 0 adds no noise.
        epsilon: as Flower is told, of one round.
        delta: likewise.

    Raises:
        ValueError: a setting out of range.
    """

    plain: ClassVar[str] = "an update that is too long is shortened, and the client adds random noise to it."

    clipping_norm: Positive = 1.0
    sensitivity: Weight = 1.0
    epsilon: Positive = 1.0
    delta: OpenShare = 1e-5

    def __post_init__(self) -> None:
        for name in ("clipping_norm", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        if not 0 <= self.sensitivity < math.inf:
            raise ValueError(f"expected sensitivity >= 0, got {self.sensitivity}")
        if not 0 < self.delta < 1:
            raise ValueError(f"expected delta in (0, 1), got {self.delta}")

    @classmethod
    def example(cls) -> FlowerLocalDp:
        """Return a filter that shortens a small update, with little noise."""
        return cls(clipping_norm=0.1, sensitivity=1e-3)

    @property
    def std(self) -> float:
        """Standard deviation of the noise, in units of the update."""
        return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    @property
    def _clip(self) -> Clip:
        return Clip(max_norm=self.clipping_norm)

    @property
    def _noise(self) -> Noise:
        return Noise(std=self.std, unit="absolute")

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update, shortened, plus noise where there is a generator."""
        return self._noise.transform_update(self._clip.transform_update(update, None), generator)

    def release(self, update: Tensors) -> Tensors:
        """Return the update, shortened, plus noise that nobody can draw again (`fl.runtime.secure_rng`)."""
        return self._noise.release(self._clip.transform_update(update, None))

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the predicted update, shortened."""
        return self._clip.surrogate(predicted, observed)

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return the known part as far as clipping lets it through."""
        return self._clip.transmit_known_part(known, observed)

    def with_unknown_scale(self) -> Defense:
        """Return an update of unknown length, with noise of unknown size."""
        return ClipOfUnknownNorm(scope="global")

    def noise_std(self, observed: Tensors) -> dict[str, float]:
        """Return the noise's."""
        return self._noise.noise_std(observed)

    def privacy(
        self, method: Method, task: Task, sizes: Sequence[int], rounds: int, *, beside: Sequence[Defense] = ()
    ) -> PrivacyStatement:
        """Return what a client has after `rounds` rounds: whether it took part with its images or with nothing."""
        return state_client_level(
            Charge(self.std / self.clipping_norm, 1.0, rounds),
            clip=self.clipping_norm,
            delta=self.delta,
            mode="local",
            released="the client's update",
            trusted="nobody else",
        )
