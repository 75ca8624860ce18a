"""What all networks are put together from: normalization, extractor, head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STATISTICS = {
    1: ((0.1307,), (0.3081,)),  # MNIST
    3: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),  # CIFAR-10
}


def usual_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation customary for images of so many channels: MNIST's for 1, CIFAR-10's for 3.

    Raises:
        ValueError: neither 1 nor 3 channels.
    """
    if channels not in STATISTICS:
        raise ValueError(f"expected mean and std for {channels} channels: there are usual ones for 1 and 3 only")
    return STATISTICS[channels]


class Normalize(nn.Module):
    """`(pixels - mean) / std`, channel by channel, for pixels in [0, 1] (B, C, H, W).

    The constants are buffers, so they follow the model's device and type, and are left out of its state.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(f"expected as many means as standard deviations, got {mean}, {std}")
        if any(value <= 0 for value in std):
            raise ValueError(f"expected std > 0, got {std}")
        self.values = (tuple(mean), tuple(std))
        self.register_buffer("mean", torch.empty(len(mean), 1, 1), persistent=False)
        self.register_buffer("std", torch.empty(len(std), 1, 1), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the buffers, which lose their values when a model made without storage is given some."""
        for buffer, values in zip((self.mean, self.std), self.values, strict=True):
            buffer.copy_(torch.tensor(values, dtype=buffer.dtype, device=buffer.device).view_as(buffer))

    def forward(self, x: Tensor) -> Tensor:
        """Return normalized pixels, of the shape of `x`."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Return the constants, for `print(model)`."""
        return f"mean={self.values[0]}, std={self.values[1]}"


class Classifier(nn.Module):
    """A normalization, an extractor `body` and a linear `head`, with or without `bias`.

    Raises:
        ValueError: images of `input_shape` are too small for the extractor or have other channels.
    """

    def __init__(
        self,
        normalize: Normalize | None,
        body: nn.Module,
        input_shape: tuple[int, int, int],
        num_classes: int,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.normalize = normalize if normalize is not None else nn.Identity()
        self.body = body
        self.head = nn.Linear(count_features(body, input_shape), num_classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of pixels in [0, 1] (B, C, H, W)."""
        logits: Tensor = self.head(self.body(self.normalize(x)))
        return logits


def count_features(extractor: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Return how many numbers `extractor`, a module without storage, makes of one image.

    Raises:
        ValueError: images of `input_shape` don't fit it.
    """
    try:
        with torch.no_grad():
            return int(extractor(torch.empty(2, *input_shape, device="meta")).flatten(1).shape[1])
    except RuntimeError as error:
        raise ValueError(f"expected images that fit the network, got input_shape {input_shape}: {error}") from error
