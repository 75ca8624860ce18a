"""torchvision's residual networks (He et al., CVPR 2016), for small images or with ImageNet's stem."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import ClassVar, Literal

import torch
from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.initialization import initialize
from fl.ranges import Width

NORMALIZATIONS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 2),
    "layer": partial(nn.GroupNorm, 1),
}


@dataclass(frozen=True, kw_only=True)
class TorchvisionResNet(Network):
    """One of torchvision's residual networks (He et al., CVPR 2016), trained from random weights.

    Attributes:
        stem: "small" begins with a 3x3 convolution of stride 1 and no pooling; "imagenet" with torchvision's 7x7
            convolution of stride 2 and 3x3 max pooling, which leaves 1x1 of a 32x32 image.
    """

    architecture: ClassVar[str]

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    stem: Literal["small", "imagenet"] = "small"

    def normalization(self) -> Callable[[int], nn.Module]:
        """Return what makes the layer that follows a convolution of so many channels."""
        return nn.BatchNorm2d

    def body(self) -> nn.Sequential:
        """Return features (B, F): one for each channel of the last stage."""
        made = import_module("torchvision.models")  # here, as it takes as long to import as torch itself
        layers = OrderedDict(getattr(made, self.architecture)(norm_layer=self.normalization()).named_children())
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


@dataclass(frozen=True, kw_only=True)
class BasicBlockResNet(TorchvisionResNet):
    """A ResNet of blocks of two 3x3 convolutions.

    Attributes:
        norm: what follows each convolution: "batch" normalization; "group" normalization with two groups, which Reddi
            et al. (ICLR 2021) put in its place for federated learning; or "layer", one group of all channels.
    """

    norm: Literal["batch", "group", "layer"] = "batch"

    def normalization(self) -> Callable[[int], nn.Module]:
        """Return what makes the layer that follows a convolution of so many channels."""
        return NORMALIZATIONS[self.norm]


@models.register("resnet18")
@dataclass(frozen=True, kw_only=True)
class ResNet18(BasicBlockResNet):
    """torchvision's ResNet-18: on color images 11,168,832 parameters and a head, 512 features.

    With the 3x3 stem of CIFAR's ResNets, as here by default, federated experiments on small color images often have it.
    """

    architecture: ClassVar = "resnet18"


@models.register("resnet34")
@dataclass(frozen=True, kw_only=True)
class ResNet34(BasicBlockResNet):
    """torchvision's ResNet-34: on color images 21,276,992 parameters and a head, 512 features."""

    architecture: ClassVar = "resnet34"


@models.register("resnet50")
@dataclass(frozen=True, kw_only=True)
class ResNet50(TorchvisionResNet):
    """torchvision's ResNet-50: on color images 23,500,352 parameters and a head, 2048 features.

    HyperGenFL (Chen et al., CIKM 2025) has it on Fashion-MNIST, CIFAR-100 and Tiny-ImageNet and does not say how it
    begins. Its baseline MOON (Li et al., CVPR 2021) has the 3x3 stem of CIFAR's ResNets, and so has this one by
    default; with ImageNet's it has 23,508,032 parameters and a head.
    """

    architecture: ClassVar = "resnet50"
