"""The small convolutional network that most comparisons of federated methods on CIFAR-10 use."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.layers import count_features
from fl.ranges import Width


@models.register("simple-cnn")
@dataclass(frozen=True, kw_only=True)
class SimpleCnn(Network):
    """Two 5x5 convolutions with ReLU and 2x2 max pooling, then two linear layers with ReLU.

    With (6, 16) channels it is the encoder of MOON (Li et al., CVPR 2021, section 4.1): 62,006 parameters with a head
    for ten classes. HyperGenFL (Chen et al., CIKM 2025, section 4.1) has "two convolution layers followed by two MLP
    layers in the encoder" and gives no sizes: we read that as the network of MOON, one of its baselines. With (16, 32)
    channels it is the client network of pFedHN (Shamsian et al., ICML 2021, the authors' code): 121,182 parameters.

    Attributes:
        channels: of the two convolutions.
        widths: units of the two linear layers.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    channels: tuple[Width, Width] = (6, 16)
    widths: tuple[Width, Width] = (120, 84)

    def body(self) -> nn.Sequential:
        """Return features (B, widths[1])."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        before = self.input_shape[0]
        for i, after in enumerate(self.channels, start=1):
            layers[f"conv{i}"] = nn.Conv2d(before, after, 5)
            layers[f"pool{i}"] = nn.MaxPool2d(2)  # before the activation, which rises: the same, with less work
            layers[f"act{i}"] = nn.ReLU()
            before = after
        layers["flatten"] = nn.Flatten()
        before = count_features(nn.Sequential(layers), self.input_shape)
        for i, after in enumerate(self.widths, start=1):
            layers[f"fc{i}"] = nn.Linear(before, after)
            layers[f"act{i + 2}"] = nn.ReLU()
            before = after
        return nn.Sequential(layers)
