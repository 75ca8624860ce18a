"""Per-sample gradients of a convolution's weight: the windows of what entered, times what flows back, sample by sample.

The numbers are those of Opacus' rule, up to rounding. What takes time there is laying out the windows; here they are
copied in the longest runs that lie together in memory, along the channels or along the image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_supported(layer: nn.Module) -> bool:
    """Return whether `layer` is a convolution of this kind: of images, in one group, with padding in numbers."""
    return type(layer) is nn.Conv2d and layer.groups == 1 and not isinstance(layer.padding, str)


def per_sample_weight_gradients(layer: nn.Conv2d, entered: Tensor, back: Tensor) -> Tensor:
    """Return the samples' gradients of the weight.

    Args:
        layer: the convolution.
        entered: its input (B, C, H, W).
        back: the gradient with respect to its output (B, O, H', W').

    Returns:
        (B, O, C, kernel height, kernel width), in any order of memory.
    """
    batch, channels = entered.shape[:2]
    flowed = back.permute(0, 2, 3, 1).flatten(1, 2).mT  # (B, O, H' W')
    if layer.kernel_size[1] * channels < back.shape[3]:
        windows = _windows(layer, entered, back).flatten(4, 5).flatten(1, 3)  # (B, C kernel, H' W'), along the image
        return torch.bmm(flowed, windows.mT).view(batch, -1, channels, *layer.kernel_size)
    innermost = _windows(layer, entered, back, channels_last=True).permute(0, 4, 5, 2, 3, 1)
    windows = innermost.flatten(3, 5).flatten(1, 2)  # (B, H' W', kernel C), along the channels
    return torch.bmm(flowed, windows).view(batch, -1, *layer.kernel_size, channels).permute(0, 1, 4, 2, 3)


def _windows(layer: nn.Conv2d, entered: Tensor, back: Tensor, *, channels_last: bool = False) -> Tensor:
    """Return a view (B, C, kernel height, kernel width, H', W') of the padded input.

    Overlapping, not to be written to.
    """
    assert not isinstance(layer.padding, str)
    high, wide = layer.padding
    order = torch.channels_last if channels_last else torch.contiguous_format
    padded = F.pad(entered, (wide, wide, high, high)) if high or wide else entered
    padded = padded.contiguous(memory_format=order)
    image, channel, row, column = padded.stride()
    (down, right), (apart, beside) = layer.stride, layer.dilation
    shape = (*entered.shape[:2], *layer.kernel_size, *back.shape[2:])
    return padded.as_strided(shape, (image, channel, apart * row, beside * column, down * row, right * column))
