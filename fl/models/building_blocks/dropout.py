"""Dropout that can be replayed: its mask is handed in, never drawn from the global generator."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ReplayedDropout(nn.Module):
    """Dropout of features (B, F) by a mask that stands in its buffer `mask` while a batch is fed.

    The mask holds 0 and 1 / (1 - p). A method that trains with it says so (`enable_mask_draws`, in `client_model`) and
    draws it (`draw_masks`, in `draw`, so that it is recorded); like all that is drawn under a buffer's name it then
    stands there. Without a mask, as in evaluation mode or where an attacker looks at the network alone, features pass
    as they are.

    Args:
        p: share of the features left out, in [0, 1).
        features: F.

    Attributes:
        ready: whether the method that trains draws masks; a network in train mode refuses to run otherwise.

    Raises:
        ValueError: `p` is out of range.
    """

    mask: Tensor

    def __init__(self, p: float, features: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"expected dropout in [0, 1), got {p}")
        self.p, self.features, self.ready = p, features, False
        self.register_buffer("mask", torch.empty(0), persistent=False)  # no number: none travels with the buffers

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F), masked in train mode.

        Raises:
            ValueError: nobody draws masks, or the mask is of another batch.
        """
        if not self.training or not self.p or x.is_meta:
            return x
        if not self.ready:
            raise ValueError("expected a method that draws masks for dropout: set the network's dropout to 0")
        if not self.mask.numel():
            return x
        if self.mask.shape != x.shape:
            raise ValueError(f"expected features as the mask {tuple(self.mask.shape)}, got {tuple(x.shape)}")
        return x * self.mask

    def extra_repr(self) -> str:
        """Return the constants, for `print(model)`."""
        return f"p={self.p}, features={self.features}"


def enable_mask_draws(model: nn.Module) -> nn.Module:
    """Mark `model` in place: whoever trains it draws masks."""
    for module in model.modules():
        if isinstance(module, ReplayedDropout):
            module.ready = True
    return model


def has_dropout(model: nn.Module) -> bool:
    """Return whether masks are drawn for any part of `model`."""
    return any(isinstance(module, ReplayedDropout) and module.p for module in model.modules())


def draw_masks(model: nn.Module, inputs: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
    """Return a mask (B, F) for every dropout of `model`, by the name of its buffer; none without dropout.

    Args:
        model: the client's network.
        inputs: the batch (B, C, H, W), whose type and device the masks take.
        generator: draws them; None keeps every feature as it is, an attacker's guess of the mean.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ReplayedDropout) and module.p:
            size = (len(inputs), module.features)
            if generator is None:
                found[f"{name}.mask"] = inputs.new_ones(size)
            else:
                kept = torch.rand(size, generator=generator) >= module.p
                found[f"{name}.mask"] = kept.to(inputs) / (1 - module.p)
    return found
