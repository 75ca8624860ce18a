"""Random changes of training images, drawn anew for every image each time it is fed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fl.ranges import CountFrom0
from fl.registry import Registry
from fl.types import Batch

augmentations: Registry[Augmentation] = Registry("augmentation", "fl.data")


@augmentations.register("none")
@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The base of every augmentation, and images as they are."""

    name: ClassVar[str]
    registry: ClassVar[Registry[Augmentation]] = augmentations

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Return `batch` with changed images of the same shape, type and device, and the same labels.

        Args:
            batch: images (B, C, H, W) in [0, 1].
            generator: on the CPU; nothing is drawn from any other source.
        """
        return batch


@augmentations.register("crop-flip")
@dataclass(frozen=True, kw_only=True)
class CropFlip(Augmentation):
    """A random crop of the zero-padded image and a random horizontal flip (He et al., 2016, for CIFAR; HyperFL's too).

    Attributes:
        padding: black pixels added on every side before the crop, which has the image's own size.
        flip: mirror left and right with probability 1/2.
    """

    padding: CountFrom0 = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"expected padding >= 0, got {self.padding}")

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Crop and flip every image by its own draw: first all rows, then all columns, then all flips.

        The layout in memory stays: channels innermost makes convolutions on a CPU a third cheaper.
        """
        inputs = batch.inputs
        count, _, height, width = inputs.shape
        top, left = (torch.randint(2 * self.padding + 1, (count, 1), generator=generator) for _ in range(2))
        rows, columns = top + torch.arange(height), left + torch.arange(width)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        images = torch.arange(count, device=inputs.device)[:, None, None]
        rows, columns = rows.to(inputs.device)[:, :, None], columns.to(inputs.device)[:, None, :]
        padded = F.pad(inputs, (self.padding,) * 4).permute(0, 2, 3, 1)
        innermost = inputs.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if innermost else torch.contiguous_format
        changed = padded[images, rows, columns].permute(0, 3, 1, 2).contiguous(memory_format=layout)
        return Batch(changed, batch.labels)
