"""ResNet-50 for small images."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torchvision.models import resnet50

from fl.models import Network, models
from fl.models.building_blocks.initialization import initialize
from fl.ranges import Width


@models.register("resnet50")
@dataclass(frozen=True, kw_only=True)
class ResNet50(Network):
    """torchvision's ResNet-50 (He et al., CVPR 2016), trained from random weights: 23,508,032 parameters and a head.

    HyperGenFL (Chen et al., CIKM 2025) has it on Fashion-MNIST, CIFAR-100 and Tiny-ImageNet and does not say how it
    begins. Its baseline MOON (Li et al., CVPR 2021) has the 3x3 stem of CIFAR's ResNets, and so has this one by
    default: 23,500,352 parameters and a head on color images.

    Attributes:
        stem: "small" begins with a 3x3 convolution of stride 1 and no pooling; "imagenet" with torchvision's 7x7
            convolution of stride 2 and 3x3 max pooling, which leaves 1x1 of a 32x32 image.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    stem: Literal["small", "imagenet"] = "small"

    def body(self) -> nn.Sequential:
        """Return features (B, 2048)."""
        layers = OrderedDict(resnet50().named_children())
        del layers["fc"]
        if self.stem == "small":
            layers["conv1"] = nn.Conv2d(self.input_shape[0], 64, 3, padding=1, bias=False)
            del layers["maxpool"]
        else:
            layers["conv1"] = nn.Conv2d(self.input_shape[0], 64, 7, stride=2, padding=3, bias=False)
        layers["flatten"] = nn.Flatten()
        body = nn.Sequential(layers)
        for module in body.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False  # what is overwritten can't be differentiated twice
        return body

    def initialize(self, model: nn.Module, generator: torch.Generator) -> None:
        """Convolutions from N(0, 2 / (width^2 * channels out)) as torchvision draws them, the head by default."""
        initialize(model, generator)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                std = math.sqrt(2 / (module.out_channels * module.kernel_size[0] * module.kernel_size[1]))
                nn.init.normal_(module.weight, std=std, generator=generator)
