"""The six-convolution network of R-GAP (Zhu, Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl.models import Network, models
from fl.ranges import ShareBelow1, Width

LAYERS = ((4, 2, 2), (3, 2, 1), (3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 1))
"""Kernel size, stride and padding of each convolution."""


@models.register("cnn6")
@dataclass(frozen=True, kw_only=True)
class CNN6(Network):
    """Six convolutions without biases, each with LeakyReLU: 3,200 features of a 3x32x32 image.

    The published network ends in one logit without bias; here the head has one logit per class, and a bias.

    Attributes:
        channels: of the six convolutions; R-GAP's CNN6-d has 20 in place of the first 36.
        slope: of LeakyReLU below zero; 0 makes it ReLU.
    """

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    normalize: bool = False
    channels: tuple[Width, ...] = (12, 36, 36, 36, 64, 128)
    slope: ShareBelow1 = 0.2

    def __post_init__(self) -> None:
        if len(self.channels) != len(LAYERS):
            raise ValueError(f"expected {len(LAYERS)} channels, got {self.channels}")

    def body(self) -> nn.Sequential:
        """Return features (B, F)."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        before = self.input_shape[0]
        for i, (after, (kernel, stride, padding)) in enumerate(zip(self.channels, LAYERS, strict=True), start=1):
            layers[f"conv{i}"] = nn.Conv2d(before, after, kernel, stride=stride, padding=padding, bias=False)
            layers[f"act{i}"] = nn.LeakyReLU(self.slope) if self.slope else nn.ReLU()
            before = after
        layers["flatten"] = nn.Flatten()
        return nn.Sequential(layers)
