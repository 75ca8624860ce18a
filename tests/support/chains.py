"""Small plain chains of layers, in float64, and what a server sees of one step on one image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fl.capture import from_batch
from fl.seeds import stream
from fl.types import Truth
from fl.view import ServerView

CLASSES = 4


def initialized(model: nn.Module, seed: int = 0) -> nn.Module:
    """`model` in float64 with weights of standard deviation 1 / sqrt(fan in)."""
    draw = stream(seed, "chain")
    for value in model.double().parameters():
        nn.init.normal_(value, std=(value[0].numel() if value.ndim > 1 else 25) ** -0.5, generator=draw)
    return model


def chain(
    act: Callable[[], nn.Module], channels: tuple[int, int] = (12, 12), classes: int = CLASSES, *, bias: bool = True
) -> nn.Module:
    """Two convolutions (the first with stride 2), each with `act`, and a classifier, for 2x8x8 images."""
    first, second = channels
    return initialized(
        nn.Sequential(
            nn.Conv2d(2, first, 4, stride=2, padding=1, bias=bias),
            act(),
            nn.Conv2d(first, second, 3, padding=1, bias=bias),
            act(),
            nn.Flatten(),
            nn.Linear(second * 16, classes, bias=bias),
        )
    )


def image(seed: int = 0, shape: tuple[int, int, int] = (2, 8, 8)) -> Tensor:
    """Noise (1, C, H, W)."""
    return torch.rand(1, *shape, generator=stream(seed, "image"), dtype=torch.float64)


def seen(model: nn.Module, *, label: int = 1, seed: int = 0, **settings: Any) -> tuple[ServerView, Truth]:
    """What the server sees of one step of `model` on one image."""
    dtype = next(model.parameters()).dtype
    return from_batch(model, image(seed).to(dtype), torch.tensor([label]), **settings)
