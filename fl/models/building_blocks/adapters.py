"""Adapters: small trained modules between the layers of a frozen network, as HyperFL-LPM generates them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fl.models import Network
from fl.models.building_blocks.initialization import initialize
from fl.models.building_blocks.layers import Normalize
from fl.models.building_blocks.pretrained import RANDOM
from fl.ranges import Width

log = logging.getLogger(__name__)


class Bottleneck(nn.Module):
    """A(u) = u + LayerNorm(W_up relu(W_down u + b_down) + b_up) on tokens (..., width) (HyperFL-LPM, Figure 3).

    Args:
        width: of a token.
        reduction: the hidden layer has `width // reduction` units.
    """

    def __init__(self, width: int, reduction: int = 16) -> None:
        super().__init__()
        if not 1 <= reduction <= width:
            raise ValueError(f"expected reduction in [1, {width}], got {reduction}")
        self.down = nn.Linear(width, width // reduction)
        self.up = nn.Linear(width // reduction, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, u: Tensor) -> Tensor:
        """Return tokens of the shape of `u`."""
        adapted: Tensor = u + self.norm(self.up(torch.relu(self.down(u))))
        return adapted


class ConvAdapter(nn.Module):
    """A(x) = BN(x + conv(BN(x))) on maps (B, C, H, W), with a 1x1 convolution without bias (HyperFL-LPM, appendix D.1).

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        self.after = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of the shape of `x`."""
        adapted: Tensor = self.after(x + self.conv(self.before(x)))
        return adapted


class Affine(nn.Module):
    """`weight * x + bias`, channel by channel (C,): what batch norm is once its statistics are fixed.

    It stands where a pre-trained network has batch norm, so that a frozen one has no buffers.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of the shape of `x` (B, C, H, W)."""
        return torch.addcmul(self.bias.view(-1, 1, 1), x, self.weight.view(-1, 1, 1))


class PreparedImages(nn.Module):
    """Images as a pre-trained network wants them: three channels, `size` pixels high and wide.

    Args:
        size: None leaves the images as large as they are.
    """

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return images (B, 3, size, size) of images (B, 1 or 3, H, W): gray repeated, resized bilinearly."""
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if self.size is None or x.shape[-2:] == (self.size, self.size):
            return x
        return interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)

    def extra_repr(self) -> str:
        """Return the size, for `print(model)`."""
        return f"size={self.size}"


@dataclass(frozen=True, kw_only=True)
class AdapterNetwork(Network):
    """Settings of a frozen backbone with trained adapters and a trained head.

    Attributes:
        image_size: the network resizes its input to so many pixels; None leaves it. Not given in the paper.
        train: "adapters" freezes the backbone and trains adapters and head, "head" trains the head of a network without
            adapters, "all" that whole network (the columns of HyperFL's Table 2). "fixed-adapters" trains the head of
            a network whose adapters stay as they were drawn: that is what the authors' code for the ResNet does.
        weights: of the backbone: "random", "imagenet" (downloaded), or a file (`fl.models.building_blocks.pretrained`).
    """

    statistics: ClassVar[dict[int, tuple[tuple[float, ...], tuple[float, ...]]]] = {}
    """Mean and standard deviation that the backbone was trained with, by number of channels."""

    input_shape: tuple[Width, Width, Width] = (3, 32, 32)
    image_size: Width | None = None
    train: Literal["adapters", "fixed-adapters", "head", "all"] = "adapters"
    weights: str = RANDOM

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ValueError(f"expected image_size >= 1 or None, got {self.image_size}")
        if self.input_shape[0] not in (1, 3):
            raise ValueError(f"expected images of 1 or 3 channels, got input_shape {self.input_shape}")

    def body(self) -> nn.Sequential:
        """Return features (B, F); all but the adapters frozen, unless everything trains."""
        layers = OrderedDict[str, nn.Module](prepare=PreparedImages(self.image_size))
        body = nn.Sequential(layers | self.backbone())
        if self.train != "all":
            body.requires_grad_(False)
            for adapter in _adapters(body):
                adapter.requires_grad_(self.train == "adapters")
        return body

    @property
    def has_adapters(self) -> bool:
        """Whether adapters stand in the network, trained or not."""
        return self.train in ("adapters", "fixed-adapters")

    def backbone(self) -> OrderedDict[str, nn.Module]:
        """Return the layers after `PreparedImages`, with adapters if the network has them."""
        raise NotImplementedError

    def fill(self, body: nn.Module, generator: torch.Generator) -> None:
        """Give the backbone in `body` its weights: drawn or read."""
        raise NotImplementedError

    def initialize(self, model: nn.Module, generator: torch.Generator) -> None:
        """The backbone's weights, and PyTorch's default for adapters and head.

        Raises:
            FileNotFoundError: a file of weights is not where it was looked for.
            ValueError: it is of another network; says which tensors do not fit.
        """
        body = model.get_submodule("body")
        for part in (*_adapters(body), model.get_submodule("head")):
            initialize(part, generator)
        if isinstance(first := model.get_submodule("normalize"), Normalize):
            first.reset_buffers()
        if self.weights == RANDOM and self.train != "all":
            log.warning("the frozen backbone of the network is random, not pre-trained: set task.model.weights")
        self.fill(body, generator)

    def _normalization(self) -> Normalize | None:
        if not self.normalize or self.mean or self.std:
            return super()._normalization()
        return Normalize(*self.statistics[self.input_shape[0]])


def _adapters(body: nn.Module) -> list[nn.Module]:
    return [module for module in body.modules() if isinstance(module, Bottleneck | ConvAdapter)]


def backbone_parameters(body: nn.Module) -> dict[str, Tensor]:
    """Return the backbone's own parameters by their names in `body`: all but those of adapters."""
    ours = {id(p) for adapter in _adapters(body) for p in adapter.parameters()}
    return {name: p for name, p in body.named_parameters() if id(p) not in ours}
