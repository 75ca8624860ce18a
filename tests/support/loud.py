"""A defense that only changes the unit of what is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fl.defense import Defense
from fl.tensors import Tensors, scale_tensors


@dataclass(frozen=True, kw_only=True)
class Loud(Defense):
    """Everything sent is multiplied by 1024, and the server knows it."""

    name: ClassVar[str] = "loud"

    def transform_update(self, update: Tensors, generator: torch.Generator) -> Tensors:
        return scale_tensors(update, 1024.0)

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        return scale_tensors(predicted, 1024.0)
