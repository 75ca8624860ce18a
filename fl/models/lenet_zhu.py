"""The sigmoid LeNet that gradient inversion started with (Zhu, Liu, Han, "Deep Leakage from Gradients", 2019)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.initialization import initialize, initialize_uniform
from fl.ranges import Width

BOUND = 0.5


@models.register("lenet-zhu")
@dataclass(frozen=True, kw_only=True)
class LeNetZhu(Network):
    """Three 5x5 convolutions of 12 channels with sigmoids and a linear head on 768 features (588 for 1x28x28).

    Attributes:
        init: "uniform" draws every weight and bias from U(-0.5, 0.5), as DLG and iDLG do; "redrawn" draws PyTorch's
            default first and U(-0.5, 0.5) over it from the same generator, as where a constructor ends by redrawing
            its weights (the victims of Geiping et al., who also normalize); "default" is PyTorch's.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    normalize: bool = False
    init: Literal["uniform", "redrawn", "default"] = "uniform"

    def body(self) -> nn.Sequential:
        """Return features (B, 12 * ceil(H / 4) * ceil(W / 4))."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = self.input_shape[0]
        for i, stride in enumerate((2, 2, 1), start=1):
            layers[f"conv{i}"] = nn.Conv2d(channels, 12, 5, stride=stride, padding=2)
            layers[f"act{i}"] = nn.Sigmoid()
            channels = 12
        layers["flatten"] = nn.Flatten()
        return nn.Sequential(layers)

    def initialize(self, model: nn.Module, generator: torch.Generator) -> None:
        """Draw the initial parameters as `init` says."""
        if self.init != "uniform":
            initialize(model, generator)
        if self.init != "default":
            initialize_uniform(model, generator, BOUND)
