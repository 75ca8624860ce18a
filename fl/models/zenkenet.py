"""ZenkeNet, the convolutional network of Zenke et al. for CIFAR."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from fl.models import Network, models
from fl.models.building_blocks.dropout import ReplayedDropout
from fl.models.building_blocks.layers import count_features
from fl.ranges import Range, Width


class ReplayedChannels(ReplayedDropout):
    """`ReplayedDropout` of whole channels: one number of the mask (B, C) for each channel of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return feature maps (B, C, H, W), masked in train mode."""
        ones = x.new_ones(x.shape[:2])
        return x * super().forward(ones)[:, :, None, None]


@models.register("zenkenet")
@dataclass(frozen=True, kw_only=True)
class ZenkeNet(Network):
    """Four 3x3 convolutions in two blocks and a hidden layer of 512 units (Zenke, Poole, Ganguli, ICML 2017).

    32, 32, 64 and 64 channels, the first of each block padded, 2x2 max pooling after each block, ReLU: 1,250,858
    parameters for ten classes of 3x32x32 images. HyperFedZero (Zhou et al., 2025) uses it in Table 1.

    Attributes:
        dropout: share of the channels left out after each block, of the hidden units twice that (0.25 in Zenke et al.).
            0, since only methods that draw the masks themselves can train with it, as HyperFedZero does.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    dropout: Annotated[float, Range(0, 0.5, below=True)] = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 0.5:
            raise ValueError(f"expected dropout in [0, 0.5), got {self.dropout}")

    def body(self) -> nn.Sequential:
        """Return features (B, 512)."""
        layers = OrderedDict[str, nn.Module]()
        before = self.input_shape[0]
        for block, after in enumerate((32, 64), start=1):
            layers[f"conv{block}_1"] = nn.Conv2d(before, after, 3, padding=1)
            layers |= {f"act{block}_1": nn.ReLU(), f"conv{block}_2": nn.Conv2d(after, after, 3)}
            layers |= {f"pool{block}": nn.MaxPool2d(2), f"act{block}_2": nn.ReLU()}
            if self.dropout:
                layers[f"drop{block}"] = ReplayedChannels(self.dropout, after)
            before = after
        layers["flatten"] = nn.Flatten()
        layers |= {"fc1": nn.Linear(count_features(nn.Sequential(layers), self.input_shape), 512), "act3": nn.ReLU()}
        if self.dropout:
            layers["drop3"] = ReplayedDropout(2 * self.dropout, 512)
        return nn.Sequential(layers)
