"""hFedF's autoencoder: from images to a latent vector and back (Bartholet et al., 2024, Table 6)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

WIDTHS = (16, 32)
"""Channels of the two convolutions."""


class Autoencoder(nn.Module):
    """Two convolutions with ReLU and max pooling, a linear layer to the latent vector, and the same way back.

    Takes pixels in [0, 1] (B, C, H, W) and returns such; `encode` gives latent vectors (B, E).

    Args:
        input_shape: (C, H, W), H and W divisible by 4.
        latent: E.

    Raises:
        ValueError: images of a size that does not come back.
    """

    def __init__(self, input_shape: tuple[int, int, int], latent: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if height % 4 or width % 4:
            raise ValueError(f"expected images whose height and width 4 divides, got {height}x{width}")
        first, second = WIDTHS
        small = (second, height // 4, width // 4)
        flat = second * small[1] * small[2]
        down = OrderedDict[str, nn.Module](conv1=nn.Conv2d(channels, first, 3, padding=1), act1=nn.ReLU())
        down |= {"pool1": nn.MaxPool2d(2), "conv2": nn.Conv2d(first, second, 3, padding=1), "act2": nn.ReLU()}
        down |= {"pool2": nn.MaxPool2d(2), "flatten": nn.Flatten(), "fc": nn.Linear(flat, latent)}
        up = OrderedDict[str, nn.Module](fc=nn.Linear(latent, flat), unflatten=nn.Unflatten(1, small))
        up |= {"conv1": nn.ConvTranspose2d(second, first, 2, stride=2), "act1": nn.ReLU()}
        up |= {"conv2": nn.ConvTranspose2d(first, channels, 2, stride=2), "act2": nn.Sigmoid()}
        self.encoder, self.decoder = nn.Sequential(down), nn.Sequential(up)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return latent vectors (B, E), and the images made of them."""
        latent = self.encoder(x)
        return latent, self.decoder(latent)
