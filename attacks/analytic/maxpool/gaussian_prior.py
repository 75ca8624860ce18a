"""What is expected of an input before any equation is read: smooth images, or channels of features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.spd_linalg import Factor, spd_inverse


@dataclass(frozen=True)
class GaussianPrior:
    """A Gaussian over X whose precision is a product over channels and pixels, plus one term per number.

    The precision is `channels` (x) `pixels` + diag(`sites`[0]), with (x) Kronecker's product.

    Attributes:
        channels: precision between channels (I, I).
        pixels: precision between pixels (H W, H W).
        mean: expected value of every channel (I,).
        sites: precision, and precision times mean, of what is known of single numbers (2, I, H, W), or None.
    """

    channels: Tensor
    pixels: Tensor
    mean: Tensor
    sites: Tensor | None = None

    @cached_property
    def shift(self) -> Tensor:
        """The precision times the mean (I, H W)."""
        smooth = (self.channels @ self.mean)[:, None] * self.pixels.sum(0)
        return smooth if self.sites is None else smooth + self.sites[1].flatten(1)

    @cached_property
    def dense(self) -> Tensor:
        """The precision itself (N, N), N = I H W."""
        matrix = torch.kron(self.channels, self.pixels)
        if self.sites is not None:
            matrix.diagonal().add_(self.sites[0].flatten())
        return matrix

    @property
    def channel_blocks(self) -> Tensor:
        """Each channel's own block of the precision (I, H W, H W)."""
        blocks = self.channels.diagonal()[:, None, None] * self.pixels
        return blocks if self.sites is None else blocks + torch.diag_embed(self.sites[0].flatten(1))

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the precision times X (I, H W)."""
        smooth = self.channels @ x @ self.pixels
        return smooth if self.sites is None else smooth + self.sites[0].flatten(1) * x

    def penalty(self, x: Tensor) -> float:
        """Return minus twice the logarithm of the density at X (I, H, W), up to a constant."""
        x = x.flatten(1)
        return float((x * (self @ x - 2 * self.shift)).sum())

    def step_moments(self, x: Tensor, entries: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is expected of some numbers of X as steps away from their values, all others staying.

        Args:
            x: where the steps start (I, H, W).
            entries: which numbers, counted along X (n,).
            step: size of a step of each (n,).

        Returns:
            Precision (n, n), and precision times mean (n,), both in steps.
        """
        channel, pixel = entries // len(self.pixels), entries % len(self.pixels)
        precision = self.channels[channel[:, None], channel] * self.pixels[pixel[:, None], pixel]
        if self.sites is not None:
            precision = precision + torch.diag(self.sites[0].flatten()[entries])
        pull = (self.shift - self @ x.flatten(1)).flatten()[entries]
        return precision * step[:, None] * step, pull * step

    def to(self, dtype: torch.dtype) -> GaussianPrior:
        """Return this prior in another floating-point precision."""
        sites = None if self.sites is None else self.sites.to(dtype)
        return GaussianPrior(self.channels.to(dtype), self.pixels.to(dtype), self.mean.to(dtype), sites)

    def restrict_to(self, pixels: Tensor) -> GaussianPrior:
        """Return the prior whose precision is that of some pixels of the plane (n,), the others being known."""
        sites = None if self.sites is None else self.sites.flatten(2)[..., pixels]
        return GaussianPrior(self.channels, self.pixels[pixels[:, None], pixels], self.mean, sites)

    @property
    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Mean (I, H W) and covariance (N, N) of X, `sites` left out.

        None where it is no Gaussian, as that of outputs which are zero or not finite.
        """
        channels, pixels = Factor.of(self.channels), Factor.of(self.pixels)
        if channels is None or pixels is None:
            return None
        return self.mean[:, None].expand(-1, len(self.pixels)), torch.kron(channels.inverse(), pixels.inverse())

    def with_smoothness(self, factor: float) -> GaussianPrior:
        """Return this prior with its smoothness times `factor`."""
        return replace(self, channels=self.channels * factor)


def image_prior(layer: ConvPoolLayer, mean: Tensor, std: Tensor, deviation: float) -> GaussianPrior:
    """Return a prior of smooth images of no particular kind, in a network's normalized units.

    Pixels correlate by .93 to the power of their distance and by .9 between channels; nothing is trained.

    Args:
        layer: whose input they are.
        mean: of the normalization (I,).
        std: of the normalization (I,).
        deviation: standard deviation of a pixel in [0, 1].
    """
    distance = _pixel_distances(layer, mean)
    correlation = _with_independent_share(0.93**distance, 0.02)
    return _prior_from(_channel_covariance(layer, std, deviation), layer, correlation, (0.5 - mean) / std)


def choice_prior(layer: ConvPoolLayer, mean: Tensor, std: Tensor) -> GaussianPrior:
    """Return a prior of smoother images with less noise: for the choice among levels that equations leave open.

    Correlation is Matern's of 3/2 with a length of 8 pixels, a thousandth of the variance a pixel's own. Of four
    correlations and several lengths it made the corners of 4,000 images of CIFAR-10 likeliest, given the pixels around.

    Args:
        layer: whose input they are.
        mean: of the normalization (I,).
        std: of the normalization (I,).
    """
    distance = 3**0.5 * _pixel_distances(layer, mean) / 8
    correlation = _with_independent_share((1 + distance) * torch.exp(-distance), 1e-3)
    return _prior_from(_channel_covariance(layer, std, 0.3), layer, correlation, (0.5 - mean) / std)


def feature_prior(equations: Equations) -> GaussianPrior:
    """Return a prior of independent channels, a little smooth, as large as the layer's outputs suggest."""
    channels = equations.layer.shape[0]
    size = equations.output_scale.square() / equations.layer.filters.square().sum(1).mean()
    eye = torch.eye(channels).to(size)
    correlation = _with_independent_share(0.7 ** _pixel_distances(equations.layer, size), 0.05)
    return _prior_from(eye * size, equations.layer, correlation, torch.zeros(channels).to(size))


def _channel_covariance(layer: ConvPoolLayer, std: Tensor, deviation: float) -> Tensor:
    """Return the covariance between channels (I, I), of a pixel whose standard deviation in [0, 1] is `deviation`."""
    channels = layer.shape[0]
    between = torch.full((channels, channels), 0.9).to(std).fill_diagonal_(1.0)
    scale = deviation / std
    return between * scale[:, None] * scale


def _pixel_distances(layer: ConvPoolLayer, like: Tensor) -> Tensor:
    """Return distances between the pixels of an image (H W, H W)."""
    _, height, width = layer.image_shape
    rows, columns = torch.arange(height).to(like), torch.arange(width).to(like)
    y, x = rows.repeat_interleave(width), columns.repeat(height)
    return ((y[:, None] - y) ** 2 + (x[:, None] - x) ** 2).sqrt()


def _with_independent_share(correlation: Tensor, share: float) -> Tensor:
    """Return correlations where a share of each pixel's variance is its own."""
    return (1 - share) * correlation + share * torch.eye(len(correlation)).to(correlation)


def _prior_from(channel_covariance: Tensor, layer: ConvPoolLayer, correlation: Tensor, mean: Tensor) -> GaussianPrior:
    """Return the prior of the layer's images, which know nothing of each other."""
    pixels = torch.block_diag(*[spd_inverse(correlation)] * layer.images)
    return GaussianPrior(torch.linalg.inv(channel_covariance).contiguous(), pixels.contiguous(), mean)
