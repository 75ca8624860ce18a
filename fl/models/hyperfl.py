"""The two convolutional networks of HyperFL (Guo et al., AAAI 2025), as in the authors' code."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.layers import count_features
from fl.ranges import Width

SLOPE = 0.01


def _extractor(convolutions: list[nn.Conv2d], input_shape: tuple[int, int, int]) -> nn.Sequential:
    """Return convolutions, each with LeakyReLU and 2x2 max pooling, then a fully connected layer to 128 features."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, convolution in enumerate(convolutions, start=1):
        layers[f"conv{i}"] = convolution
        layers[f"pool{i}"] = nn.MaxPool2d(
            2
        )  # before the activation, which rises: the same maximum, a quarter of the work
        layers[f"act{i}"] = nn.LeakyReLU(SLOPE)
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(count_features(nn.Sequential(layers), input_shape), 128)
    layers["act"] = nn.LeakyReLU(SLOPE)
    return nn.Sequential(layers)


@models.register("hyperfl-grey")
@dataclass(frozen=True, kw_only=True)
class HyperFLGray(Network):
    """HyperFL's network for EMNIST and Fashion-MNIST: two convolutions, 115,776 parameters before the head."""

    input_shape: tuple[Width, Width, Width] = (1, 28, 28)

    def body(self) -> nn.Sequential:
        """Return features (B, 128)."""
        return _extractor([nn.Conv2d(self.input_shape[0], 16, 5), nn.Conv2d(16, 32, 5, padding=1)], self.input_shape)


@models.register("hyperfl-colour")
@dataclass(frozen=True, kw_only=True)
class HyperFLColor(Network):
    """HyperFL's network for CIFAR-10 and CINIC-10: three convolutions, 106,400 parameters before the head."""

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)

    def body(self) -> nn.Sequential:
        """Return features (B, 128)."""
        convolutions = [
            nn.Conv2d(self.input_shape[0], 16, 5),
            nn.Conv2d(16, 32, 5, padding=1),
            nn.Conv2d(32, 64, 3, padding=1),
        ]
        return _extractor(convolutions, self.input_shape)
