"""LeNet as it is used today, in two sizes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.layers import count_features
from fl.ranges import Width


@models.register("lenet")
@dataclass(frozen=True, kw_only=True)
class LeNet(Network):
    """Two 5x5 convolutions with 2x2 max pooling and ReLU, one hidden layer (after LeCun et al., 1998): 431,080 numbers.

    HyperFedZero (Zhou et al., 2025) names LeNet and a LeNet-S "with reduced hidden layer dimensions", and no size of
    either. Its method stands in the tradition of von Oswald et al. (2020), whose library knows the two sizes usual for
    MNIST, 431,080 and 21,840 parameters; we take these.

    Attributes:
        channels: of the two convolutions.
        hidden: units of the hidden layer.
    """

    input_shape: tuple[Width, Width, Width] = (1, 28, 28)
    channels: tuple[Width, Width] = (20, 50)
    hidden: Width = 500

    def body(self) -> nn.Sequential:
        """Return features (B, hidden)."""
        layers = OrderedDict[str, nn.Module]()
        before = self.input_shape[0]
        for i, after in enumerate(self.channels, start=1):
            layers |= {f"conv{i}": nn.Conv2d(before, after, 5), f"pool{i}": nn.MaxPool2d(2), f"act{i}": nn.ReLU()}
            before = after
        layers["flatten"] = nn.Flatten()
        layers["fc1"] = nn.Linear(count_features(nn.Sequential(layers), self.input_shape), self.hidden)
        layers["act3"] = nn.ReLU()
        return nn.Sequential(layers)


@models.register("lenet-s")
@dataclass(frozen=True, kw_only=True)
class LeNetS(LeNet):
    """The smaller of the two usual sizes of LeNet (after LeCun et al., 1998): 21,840 parameters for ten classes."""

    channels: tuple[Width, Width] = (10, 20)
    hidden: Width = 50
