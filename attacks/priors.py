"""What an attacker believes of images before it has seen any update."""

from __future__ import annotations

from torch import Tensor


def total_variation(inputs: Tensor, std: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, horizontal plus vertical, in units of `std` per channel.

    The units are those of normalised images, in which IG's weights are stated (Geiping et al. 2020, section 4); the
    image's border has no neighbours and adds nothing.

    Args:
        inputs: (B, C, H, W) in [0, 1].
        std: (C,).
    """
    scale = std.view(-1, 1, 1)
    across = ((inputs[..., :, 1:] - inputs[..., :, :-1]) / scale).abs().mean()
    down = ((inputs[..., 1:, :] - inputs[..., :-1, :]) / scale).abs().mean()
    return across + down
