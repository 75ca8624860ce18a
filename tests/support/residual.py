"""A small residual network, pictures for it, and what counts as exactly recovered."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, Result


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A small residual network, for pictures of 8 by 8 pixels and more."""

    def __init__(self, widths: tuple[int, ...] = (16, 48, 96)) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0])
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(Block(i, o, 1 if k == 0 else 2) for k, (i, o) in enumerate(pairs)))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(functional.relu(self.norm(self.stem(x)))).mean((2, 3)))


def victim(widths: tuple[int, ...] = (16, 48, 96)) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return ResNet(widths).eval()


def pictures(count: int, seed: int = 1, size: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, size // 4, size // 4, generator=draw)
    smooth = functional.interpolate(coarse, size=size, mode="bicubic", align_corners=False).clamp(0, 1)
    return (255 * smooth).round() / 255, torch.randint(10, (count,), generator=draw)


def decibels(found: Tensor, true: Tensor) -> list[float]:
    errors = (found[None].double() - true[:, None].double()).square().mean((2, 3, 4)).amin(1).clamp_min(1e-14)
    return [-10 * float(error.log10()) for error in errors]


def assert_exact(found: Result, images: Tensor) -> None:
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert min(decibels(found.inputs, images)) > 80
    assert found.verified is True
