"""signSGD: of every number of the update only its sign is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from defenses import defenses
from fl.defense import Defense
from fl.ranges import Positive
from fl.tensors import Tensors, dense, zeros

AGREEMENT_MARGIN = 0.3
"""A guess is rewarded for the right sign up to this many times the root mean square of its tensor's entries."""


@defenses.register("signsgd")
@dataclass(frozen=True, kw_only=True)
class SignSGD(Defense):
    """The sign of every entry, times one size (Bernstein et al., ICML 2018; mean size: Karimireddy et al., ICML 2019).

    One bit per number, and one number per tensor where `step` is None; exact zeros stay zero. A structured update
    leaves this defense dense. An attacker who knows it compares signs: an entry of the right sign costs less the
    further it is from zero, up to a margin, and nothing beyond; sizes are compared nowhere.

    Attributes:
        step: size of what is sent, in units of the update (weights); None takes each tensor's mean absolute value.

    Raises:
        ValueError: if `step` is not positive.
    """

    plain: ClassVar[str] = "only whether each number of the update is positive or negative is sent."

    step: Positive | None = None

    def __post_init__(self) -> None:
        if self.step is not None and not 0 < self.step < math.inf:
            raise ValueError(f"expected step > 0, got {self.step}")

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the signs; derivatives pass straight through."""
        return {name: self._signs(dense(value)) for name, value in update.items()}

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the observed signs, each times how well the prediction agrees with it: 1 from the margin on."""
        return {name: _sign_agreement(dense(value), dense(observed[name])) for name, value in predicted.items()}

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return zeros: what is added before signs are taken does not add to them."""
        return zeros(known, known)

    def preserves_norm_ratios(self) -> bool:
        """Return False: signs have no norm of their own."""
        return False

    def _signs(self, matrix: Tensor) -> Tensor:
        size = matrix.detach().abs().mean() if self.step is None else self.step
        return matrix.detach().sign() * size + (matrix - matrix.detach())


def _sign_agreement(predicted: Tensor, observed: Tensor) -> Tensor:
    size = (predicted.square().mean() + torch.finfo(predicted.dtype).tiny).sqrt()
    return observed * (observed.sign() * predicted / (AGREEMENT_MARGIN * size)).clamp(max=1)
