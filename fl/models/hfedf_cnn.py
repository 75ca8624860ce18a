"""hFedF's client network: a small one in the manner of Inception (Bartholet et al., 2024, Table 9)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl.models import Network, models
from fl.models.building_blocks.dropout import ReplayedDropout
from fl.models.building_blocks.layers import count_features
from fl.ranges import ShareBelow1, Width

POOLED = 3
"""Height and width after the adaptive pooling."""


class Inception(nn.Module):
    """1x1, 3x3 and 5x5 convolutions beside a 3x3 max pooling, joined: (B, C, H, W) to (B, C + sum(widths), H, W).

    The naive module of Szegedy et al. (2014, Figure 2a). hFedF names the three widths and the number of channels that
    come out, which leaves one branch without a convolution of its own; that it is the pooling is our reading.

    Args:
        channels: C.
        widths: channels of the three convolutions.
    """

    def __init__(self, channels: int, widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv1, self.conv3, self.conv5 = (
            nn.Conv2d(channels, width, size, padding=size // 2) for width, size in zip(widths, (1, 3, 5), strict=True)
        )
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the four branches, channel after channel."""
        return torch.cat([self.conv1(x), self.conv3(x), self.conv5(x), self.pool(x)], 1)


@models.register("hfedf-cnn")
@dataclass(frozen=True, kw_only=True)
class HFedFCnn(Network):
    """The client network of hFedF (Bartholet et al., 2024, Table 9): 928,199 parameters for seven classes.

    Two blocks of convolutions and max pooling, two Inception modules, adaptive pooling to 3x3, two linear layers; ReLU
    where the table has it, so none between the linear layers. How pixels are normalized is not given in the paper.

    Attributes:
        channels: after the first and the second block.
        widths: of the convolutions in each Inception module.
        hidden: units of the first linear layer.
        dropout: share of the features left out before it (0.2 in the paper). 0 by default, since only methods that
            draw the masks themselves can train with it: hFedF's do.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    channels: tuple[Width, Width] = (32, 64)
    widths: tuple[Width, Width, Width] = (32, 64, 16)
    hidden: Width = 256
    dropout: ShareBelow1 = 0.0

    def body(self) -> nn.Sequential:
        """Return features (B, hidden)."""
        first, second = self.channels
        more = sum(self.widths)
        layers = OrderedDict[str, nn.Module](conv1=nn.Conv2d(self.input_shape[0], first, 3, padding=1))
        layers |= {"pool1": nn.MaxPool2d(2), "act1": nn.ReLU()}
        layers |= {"conv2": nn.Conv2d(first, first, 1), "conv3": nn.Conv2d(first, second, 3, padding=1)}
        layers |= {"pool2": nn.MaxPool2d(2), "act2": nn.ReLU()}
        layers |= {"inception1": Inception(second, self.widths), "act3": nn.ReLU()}
        layers |= {"inception2": Inception(second + more, self.widths), "act4": nn.ReLU()}
        layers |= {"pool3": nn.AdaptiveAvgPool2d(POOLED), "flatten": nn.Flatten()}
        made = count_features(nn.Sequential(layers), self.input_shape)
        if self.dropout:
            layers["drop"] = ReplayedDropout(self.dropout, made)
        layers["fc1"] = nn.Linear(made, self.hidden)
        return nn.Sequential(layers)
