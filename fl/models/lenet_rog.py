"""The LeNet that ROG's authors attack (Yue et al., USENIX Security 2023, and their code)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.layers import count_features
from fl.ranges import Width


@models.register("lenet-rog")
@dataclass(frozen=True, kw_only=True)
class LeNetROG(Network):
    """Two 5x5 convolutions of 32 and 64 channels, ReLU, 2x2 max pooling, 512 features; linear layers without bias."""

    head_bias: ClassVar[bool] = False

    input_shape: tuple[Width, Width, Width] = (3, 128, 128)
    normalize: bool = False

    def body(self) -> nn.Sequential:
        """Return features (B, 512)."""
        layers = OrderedDict[str, nn.Module]()
        channels = self.input_shape[0]
        for i, width in enumerate((32, 64), start=1):
            layers[f"conv{i}"] = nn.Conv2d(channels, width, 5, padding=2)
            layers |= {f"act{i}": nn.ReLU(), f"pool{i}": nn.MaxPool2d(2)}
            channels = width
        layers["flatten"] = nn.Flatten()
        layers["fc1"] = nn.Linear(count_features(nn.Sequential(layers), self.input_shape), 512, bias=False)
        layers["act"] = nn.ReLU()
        return nn.Sequential(layers)
