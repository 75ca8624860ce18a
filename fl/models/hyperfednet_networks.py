"""The networks of HyperFedNet (Chen et al., 2024): the residual ones of its Table I, and a LeNet for its Figure 6."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fl.models import Network, models
from fl.models.building_blocks.initialization import initialize, initialize_uniform
from fl.models.building_blocks.layers import count_features
from fl.models.lenet_zhu import BOUND
from fl.ranges import Range, Width


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with batch norm and ReLU, around which the input is added before the last ReLU."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if before != after or stride != 1:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, before, H, W) to (B, after, H / stride, W / stride)."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


@models.register("hfn-resnet")
@dataclass(frozen=True, kw_only=True)
class HFNResNet(Network):
    """A convolution and three groups of residual blocks of 1, 2 and 4 times its width (HyperFedNet, Table I).

    563,834 parameters on 1x28x28 and 564,122 on 3x32x32 images of 10 classes, 77,754 with one block a group on MNIST;
    that is the paper's cost per round of FedAvg, which counts up and down. Strides of 2 where a group changes the width
    and the size of the shortcuts are not given in the paper; the counts fix the latter.

    Attributes:
        blocks: in each group; 1 for MNIST.
        width: channels of the first convolution and the first group; 32 for CIFAR-100.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    blocks: Annotated[int, Range(1, 100)] = 6
    width: Width = 16

    def __post_init__(self) -> None:
        for key in ("blocks", "width"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} >= 1, got {getattr(self, key)}")

    def body(self) -> nn.Sequential:
        """Return features (B, 4 * width)."""
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(self.input_shape[0], self.width, 3, padding=1, bias=False),
            norm1=nn.BatchNorm2d(self.width),
            act1=nn.ReLU(),
        )
        before = self.width
        for group, after in enumerate((self.width, 2 * self.width, 4 * self.width), start=2):
            first = BasicBlock(before, after, stride=1 if group == 2 else 2)
            rest = [BasicBlock(after, after, stride=1) for _ in range(self.blocks - 1)]
            layers[f"group{group}"] = nn.Sequential(first, *rest)
            before = after
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        return nn.Sequential(layers)


@models.register("hfn-lenet")
@dataclass(frozen=True, kw_only=True)
class HFNLeNet(Network):
    """LeNet-5 (LeCun et al., 1998): two 5x5 convolutions of 6 and 16 channels, layers of 120 and 84 units.

    HyperFedNet attacks "LeNet" in its Figure 6 and says no more. Sigmoids and average pooling, as DLG needs a network
    that can be differentiated twice; 28x28 images are padded to 32x32, as LeCun et al. do.

    Attributes:
        init: "uniform" draws every weight and bias from U(-0.5, 0.5), as DLG and iDLG do; "default" is PyTorch's.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    normalize: bool = False
    init: Literal["uniform", "default"] = "uniform"

    def body(self) -> nn.Sequential:
        """Return features (B, 84)."""
        channels, height, _ = self.input_shape
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 6, 5, padding=2 if height < 32 else 0),
            act1=nn.Sigmoid(),
            pool1=nn.AvgPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            act2=nn.Sigmoid(),
            pool2=nn.AvgPool2d(2),
            flatten=nn.Flatten(),
        )
        layers["fc1"] = nn.Linear(count_features(nn.Sequential(layers), self.input_shape), 120)
        layers |= {"act3": nn.Sigmoid(), "fc2": nn.Linear(120, 84), "act4": nn.Sigmoid()}
        return nn.Sequential(layers)

    def initialize(self, model: nn.Module, generator: torch.Generator) -> None:
        """Draw the initial parameters as `init` says."""
        if self.init == "uniform":
            initialize_uniform(model, generator, BOUND)
        else:
            initialize(model, generator)
