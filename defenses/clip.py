"""Clipping: an update is shortened to a fixed length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from defenses import defenses
from fl.defense import Defense
from fl.ranges import Limit
from fl.tensors import Tensors, dot, norm, scale_tensors

Scope = Literal["global", "tensor"]


@defenses.register("clip")
@dataclass(frozen=True, kw_only=True)
class Clip(Defense):
    """The update, if it is longer than `max_norm`, is shortened to it (McMahan et al., ICLR 2018, section 2.2).

    By itself it hides nothing but a length: no direction changes, and there is no differential privacy without noise.
    A structured update stays so, unless weight decay has given it a base. An attacker who knows it clips its own
    predictions; where a rewrite has lost the update's unit, it compares directions.

    Attributes:
        max_norm: longest Euclidean norm, in units of the update (weights, so it depends on learning rate and number
            of steps).
        scope: "global" takes the norm of all that is sent, further payloads included, "tensor" that of each tensor.

    Raises:
        ValueError: if `max_norm` is not positive.
    """

    plain: ClassVar[str] = "an update that is too long is shortened, in the same direction."

    max_norm: Limit = 1.0
    scope: Scope = "global"

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"expected max_norm > 0, got {self.max_norm}")

    @classmethod
    def example(cls) -> Clip:
        """Shortens some tensors of a small update."""
        return cls(max_norm=0.01, scope="tensor")

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update, shortened."""
        clipped: Tensors = {}
        for part in _clipped_units(update, self.scope):
            clipped.update(scale_tensors(part, (self.max_norm / norm(part)).clamp(max=1)))
        return {name: clipped[name] for name in update}

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the predicted update, shortened."""
        return self.transform_update(predicted, None)

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return the known part times the factor, which the server has to guess.

        The best multiple in [0, 1] of that part.
        """
        left: Tensors = {}
        for part in _clipped_units(known, self.scope):
            whole = {name: observed[name] for name in (observed if self.scope == "global" else part)}
            short = norm(whole) < self.max_norm * (1 - 1e-4)  # nothing was clipped
            size = dot(part, part)
            fitted = (dot(part, observed) / torch.where(size > 0, size, 1.0)).clamp(0, 1)
            left.update(scale_tensors(part, torch.where(short, 1.0, fitted)))
        return left

    def preserves_norm_ratios(self) -> bool:
        """Return whether all is shortened as one."""
        return self.scope == "global"

    def with_unknown_scale(self) -> Defense:
        """Return an update of unknown length."""
        return ClipOfUnknownNorm(scope=self.scope)


@dataclass(frozen=True, kw_only=True)
class ClipOfUnknownNorm(Defense):
    """What is known of a clipped update in another unit: nothing of its length, or of the length of each tensor.

    Attributes:
        scope: of the clipping.
    """

    name: ClassVar[str] = "clip"
    """It is still the clipping, to whoever reads why an attack does not apply."""

    scope: Scope

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the predicted update at the observed length."""
        fitted: Tensors = {}
        for part in _clipped_units(predicted, self.scope):
            fitted.update(scale_tensors(part, _norm_ratio({name: observed[name] for name in part}, part)))
        return {name: fitted[name] for name in predicted}

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return all of it, as far as can be told."""
        return known

    def preserves_norm_ratios(self) -> bool:
        """Return whether one factor clips all tensors, as in the clipping itself."""
        return self.scope == "global"


def _clipped_units(update: Tensors, scope: Scope) -> Iterator[Tensors]:
    """Yield what is clipped as one."""
    if scope == "global":
        yield update
    else:
        yield from ({name: value} for name, value in update.items())


def _norm_ratio(observed: Tensors, predicted: Tensors) -> Tensor:
    """Return the factor that gives a prediction the observed length."""
    return norm(observed) / norm(predicted)
