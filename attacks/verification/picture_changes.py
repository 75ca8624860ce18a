"""Changes of pictures and weights whose effect on an update is tested."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fl.seeds import stream
from fl.tensors import Value, dense
from fl.view import ServerView

BRIGHTNESS_CHANGE = 0.02
"""A change of brightness that must show, or the picture is not borne out: 40 dB for one of full brightness."""


def brightness_variants(view: ServerView, images: Tensor) -> Iterator[Tensor]:
    """Yield the images darker and brighter: what another step size for a layer's bias makes of them.

    Args:
        view: whose normalization counts.
        images: (N, C, H, W).
    """
    mean, _ = view.task.normalization(images)
    for middle in [torch.zeros_like(mean), *([mean] if bool(mean.any()) else [])]:
        for change in (-BRIGHTNESS_CHANGE, BRIGHTNESS_CHANGE):
            yield middle + (images - middle) * (1 + change)


def differences(images: Tensor, distance: float) -> Iterator[Tensor]:
    """Return changes of each image by this root mean square: of its brightness, and at random, slow and quick ones."""
    height, width = images.shape[-2:]
    noise = noise_like(images, stream(0, "pair"))
    slow = functional.adaptive_avg_pool2d(noise, (min(3, height), min(3, width)))
    for kind in (images, functional.interpolate(slow, (height, width)), noise):
        size = kind.flatten(1).square().mean(1).sqrt().clamp(min=torch.finfo(kind.dtype).tiny)
        yield kind * (distance / size).view(-1, *[1] * (kind.ndim - 1))


def changed_inside(images: Tensor, change: Tensor) -> Tensor:
    """Return changed inputs, of such in [0, 1] the other way where they would leave it.

    A network need not take others: a power of a negative number is none.
    """
    changed = images + change
    if not bool(((images >= 0) & (images <= 1)).all()):
        return changed
    return torch.where((changed < 0) | (changed > 1), images - change, changed)


def noise_like(values: Tensor, draw: torch.Generator) -> Tensor:
    """Return normal noise of a tensor's shape, in double precision."""
    return torch.randn(values.shape, generator=draw, dtype=torch.float64).to(values.device)


def change_last_digit(values: Value, eps: float, draw: torch.Generator) -> Tensor:
    """Return numbers times 1 + eps and normal noise, which is drawn in float32: that is four times as fast."""
    start = dense(values)
    noise = torch.randn(start.shape, generator=draw, dtype=torch.float32).to(start.device)
    return torch.addcmul(start, start, noise.to(start.dtype), value=eps)
