"""The fully connected network, on which exact attacks on batches are defined."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import nn

from fl.models import Network, models
from fl.ranges import Length, ShareBelow1, Width


@models.register("mlp")
@dataclass(frozen=True, kw_only=True)
class MLP(Network):
    """Linear layers with biases and (leaky) ReLU on the flattened pixels, as attacked by SPEAR (Dimitrov et al., 2024).

    Attributes:
        widths: units of each hidden layer, in order; SPEAR's own victims have 200.
        slope: of the activation below zero; 0 is ReLU.

    Raises:
        ValueError: no layer, or one without units, or a slope outside [0, 1).
    """

    input_shape: tuple[Width, Width, Width] = (1, 28, 28)
    widths: Annotated[tuple[Width, ...], Length(1)] = (200,)
    slope: ShareBelow1 = 0.0

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"expected at least one width, each >= 1, got {self.widths}")
        if not 0 <= self.slope < 1:
            raise ValueError(f"expected slope in [0, 1), got {self.slope}")

    def body(self) -> nn.Sequential:
        """Return features (B, widths[-1])."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        sizes = (torch.Size(self.input_shape).numel(), *self.widths)
        for i, (before, after) in enumerate(pairwise(sizes), start=1):
            layers[f"fc{i}"] = nn.Linear(before, after)
            layers[f"act{i}"] = nn.LeakyReLU(self.slope) if self.slope else nn.ReLU()
        return nn.Sequential(layers)
