"""The residual network for small images (He et al., CVPR 2016, section 4.2), with biases as HyperFedZero has it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl.models import Network, models
from fl.models.building_blocks.dropout import ReplayedDropout
from fl.ranges import Range, ShareBelow1, Width


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and ReLU, and a shortcut without parameters (option A of He et al.).

    The shortcut takes every other pixel where the block does, and adds channels of zeros.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.stride, self.more = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, before, H, W) to (B, after, H / stride, W / stride)."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        skipped = x[:, :, :: self.stride, :: self.stride]
        return torch.relu(y + functional.pad(skipped, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2)))


@models.register("resnet20")
@dataclass(frozen=True, kw_only=True)
class ResNet20(Network):
    """ResNet-20 for small images (He et al., CVPR 2016, section 4.2): 16, 32 and 64 channels, three blocks each.

    With biases in the convolutions it has 282,760 parameters for 200 classes: the count to which HyperFedZero's Table 3
    (Zhou et al., 2025) relates its own, whose text names no size.

    Attributes:
        blocks: in each of the three groups; 3 is ResNet-20, 5 is ResNet-32.
        width: channels of the first group.
        dropout: share of the features left out before the head. HyperFedZero says that its ResNet has dropout, not
            where nor how much; 0, since only methods that draw the masks themselves can train with it, as it does.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    blocks: Annotated[int, Range(1, 100)] = 3
    width: Width = 16
    dropout: ShareBelow1 = 0.0

    def __post_init__(self) -> None:
        for key in ("blocks", "width"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} >= 1, got {getattr(self, key)}")

    def body(self) -> nn.Sequential:
        """Return features (B, 4 * width)."""
        layers = OrderedDict[str, nn.Module](conv1=nn.Conv2d(self.input_shape[0], self.width, 3, padding=1))
        layers |= {"norm1": nn.BatchNorm2d(self.width), "act1": nn.ReLU()}
        before = self.width
        for group, after in enumerate((self.width, 2 * self.width, 4 * self.width), start=1):
            for block in range(1, self.blocks + 1):
                layers[f"group{group}_{block}"] = BasicBlock(before, after, stride=2 if after != before else 1)
                before = after
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        if self.dropout:
            layers["drop"] = ReplayedDropout(self.dropout, before)
        return nn.Sequential(layers)
