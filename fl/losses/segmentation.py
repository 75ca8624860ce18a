"""Pixelwise cross entropy: a class for every pixel, or for every step of a series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fl.losses import Loss, expect_dimensions, losses


@losses.register("segmentation")
@dataclass(frozen=True, kw_only=True)
class Segmentation(Loss):
    """Mean cross entropy over all pixels (Long et al., CVPR 2015).

    Outputs are logits (B, K, ...), K >= 2, of images (B, K, H, W), say. Targets are masks int64 (B, ...), a class for
    each pixel.
    """

    outputs: ClassVar[str] = "logits (B, K, ...), of images (B, K, H, W)"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the batch and its pixels."""
        return functional.cross_entropy(outputs, targets)

    def check_outputs(self, outputs: Tensor) -> None:
        """Refuse what is no logits (B, K, ...) of two classes or more."""
        expect_dimensions(outputs, f"{self.outputs} under loss 'segmentation'", at_least=3)
        if outputs.shape[1] < 2:
            raise ValueError(
                f"expected 2 classes or more in {tuple(outputs.shape)}, got 1; for one logit a pixel give loss='bce'"
            )

    def prepare(self, targets: Tensor, output_shape: torch.Size) -> Tensor:
        """Return masks int64 (B, ...)."""
        classes, *rest = output_shape
        if targets.dtype != torch.int64 or list(targets.shape[1:]) != rest:
            last = list(targets.shape[1:]) == list(output_shape[:-1])
            hint = ": if classes come last, give output=lambda found: found.movedim(-1, 1)" if last else ""
            raise ValueError(
                f"expected masks int64 ({', '.join(map(str, [len(targets), *rest]))}), a class for each pixel, got "
                f"{targets.dtype} {tuple(targets.shape)}{hint}"
            )
        if int(targets.min()) < 0 or int(targets.max()) >= classes:
            raise ValueError(f"expected classes in [0, {classes}), got {int(targets.min())} to {int(targets.max())}")
        return targets

    def targets_in_words(self, count: int, output_shape: torch.Size) -> str:
        """Return a class for each pixel."""
        return f"masks int64 ({', '.join(map(str, (count, *output_shape[1:])))}), a class for each pixel"

    def relax(self, variables: Tensor) -> Tensor:
        """Return probabilities (B, K, ...)."""
        return variables.softmax(1)

    def harden(self, variables: Tensor) -> Tensor:
        """Return classes (B, ...)."""
        return variables.argmax(1)

    def errors(self, found: Tensor, true: Tensor) -> Tensor:
        """Return the share of pixels that are wrong."""
        return (found != true.to(found.device)).flatten(1).double().mean(1)
