"""Networks small enough for tests and demonstrations."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.layers import count_features
from fl.ranges import Width


@models.register("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(Network):
    """Softmax regression: the head alone, on the pixels."""

    input_shape: tuple[Width, Width, Width] = (1, 8, 8)
    normalize: bool = False

    def body(self) -> nn.Sequential:
        """Return the pixels (B, C * H * W)."""
        return nn.Sequential(OrderedDict[str, nn.Module](flatten=nn.Flatten()))


@models.register("tiny")
@dataclass(frozen=True, kw_only=True)
class Tiny(Network):
    """One 3x3 convolution of 4 channels, LeakyReLU, 2x2 max pooling and a fully connected layer to 16 features.

    Attributes:
        batch_norm: whether batch normalization follows the convolution.
    """

    input_shape: tuple[Width, Width, Width] = (1, 8, 8)
    normalize: bool = False
    batch_norm: bool = False

    def body(self) -> nn.Sequential:
        """Return features (B, 16)."""
        layers = OrderedDict[str, nn.Module](conv1=nn.Conv2d(self.input_shape[0], 4, 3, padding=1))
        if self.batch_norm:
            layers["norm1"] = nn.BatchNorm2d(4)
        layers |= {"act1": nn.LeakyReLU(0.01), "pool1": nn.MaxPool2d(2), "flatten": nn.Flatten()}
        layers["fc1"] = nn.Linear(count_features(nn.Sequential(layers), self.input_shape), 16)
        layers["act"] = nn.LeakyReLU(0.01)
        return nn.Sequential(layers)
