"""How close a reconstruction is to an image: MSE, PSNR, SSIM and the SSIM variants that papers print under one name.

Every metric takes reconstructions `a` and true images `b`, both floating point (N, C, H, W) on de-normalized pixels,
and returns one float64 number per image (N,), on the CPU; whole batches are computed where the true images are.
Reconstructions are clamped to [0, 1] first, as a picture would be when it is saved; true images have to lie there
already, so that a forgotten de-normalization or a 0-255 range is an error instead of a good score.
"""

from __future__ import annotations

import torch
from torch import Tensor

PSNR_CAP = 100.0
"""dB of two equal images (their MSE is floored at 1e-10)."""

WINDOWS = {"ssim": 11, "ssim_uniform7": 7}
"""Smallest image side, in pixels, of the metrics that have one."""

_MSE_FLOOR = 1e-10
_ROUNDING = 1e-3
_C1, _C2 = 0.01**2, 0.03**2
_AT_ONCE = 2**15
"""Numbers of an image batch whose windows are taken at a time: what is kept of them fits a CPU's caches."""


def prepare(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return reconstructions and true images as clamped float64, on the device of the true ones.

    Raises:
        ValueError: shapes differ or are not (N, C, H, W), pixels are not floating point or not finite, or true images
            leave [0, 1] by more than rounding.
    """
    for name, images in (("reconstruction", a), ("truth", b)):
        if images.ndim != 4 or 0 in images.shape[1:]:
            raise ValueError(f"expected {name} of shape (N, C, H, W), got {tuple(images.shape)}")
        if not images.is_floating_point():
            raise ValueError(f"expected floating-point {name} with pixels in [0, 1], got {images.dtype}")
        if not images.isfinite().all():
            bad = (~images.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
            raise ValueError(f"expected finite pixels, got NaN or infinity in {name} images {bad}")
    if a.shape != b.shape:
        raise ValueError(f"expected images of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    if b.numel() and (b.min() < -_ROUNDING or b.max() > 1 + _ROUNDING):
        low, high = b.min().item(), b.max().item()
        raise ValueError(f"expected truth with pixels in [0, 1], got [{low:.4g}, {high:.4g}]; undo the normalization")
    return a.detach().to(b.device, torch.float64).clamp(0, 1), b.detach().double().clamp(0, 1)


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Return mean squared error over channels and pixels (N,), in [0, 1]."""
    a, b = prepare(a, b)
    return (a - b).square().flatten(1).mean(1).cpu()


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return peak signal-to-noise ratio (N,) in dB for a pixel range of 1, at most `PSNR_CAP`."""
    return psnr_of_mse(mse(a, b))


def psnr_of_mse(error: Tensor) -> Tensor:
    """Return `10 log10(1 / mse)` in dB, at most `PSNR_CAP`."""
    return -10 * error.clamp_min(_MSE_FLOOR).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return structural similarity with the settings of Wang et al. (2004): the SSIM that hyperleak reports.

    Gaussian window of 11 pixels with sigma 1.5, population covariance, range 1, mean over channels.

    Returns:
        (N,) in [-1, 1]; NaN (not available) for images smaller than the window.
    """
    size = WINDOWS["ssim"]
    bell = torch.exp(-0.5 * ((torch.arange(size, dtype=torch.float64) - size // 2) / 1.5).square())
    return _local(a, b, (bell / bell.sum()).tolist())


def ssim_uniform7(a: Tensor, b: Tensor) -> Tensor:
    """Return SSIM with scikit-image's defaults, a uniform 7x7 window and sample covariance, to re-read papers with.

    Returns:
        (N,) in [-1, 1]; NaN (not available) for images smaller than the window.
    """
    size = WINDOWS["ssim_uniform7"]
    return _local(a, b, [1 / size] * size, sample=size**2 / (size**2 - 1))


def ssim_rog(a: Tensor, b: Tensor) -> Tensor:
    """Return SSIM over one window as large as the image, as ROG's code defines it (Yue et al., USENIX Security 2023).

    Color images are converted to YCrCb and weighted 0.8, 0.1 and 0.1. Its values lie far above those of `ssim`.

    Returns:
        (N,) in [-1, 1].

    Raises:
        ValueError: images have neither one channel nor three.
    """
    a, b = prepare(a, b)
    if a.shape[1] == 1:
        return _whole_plane_ssim(a, b).squeeze(1).cpu()
    if a.shape[1] != 3:
        raise ValueError(f"expected 1 or 3 channels, got {a.shape[1]}")
    return _whole_plane_ssim(_ycrcb(a), _ycrcb(b)).cpu() @ torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)


def exact8(a: Tensor, b: Tensor) -> Tensor:
    """Return whether every pixel is right after rounding both images to 8 bits, (N,) bool."""
    a, b = prepare(a, b)
    return ((a * 255).round() == (b * 255).round()).flatten(1).all(1).cpu()


def _local(a: Tensor, b: Tensor, weights: list[float], sample: float = 1.0) -> Tensor:
    """Return mean SSIM over all windows that lie within the image, (N,).

    Args:
        a: reconstructions.
        b: true images.
        weights: of a window, along each side.
        sample: what covariances are multiplied by.
    """
    a, b = prepare(a, b)
    if min(a.shape[2:]) < len(weights):
        return torch.full((len(a),), torch.nan, dtype=torch.float64)
    parts = (part.split(max(1, _AT_ONCE // a.shape[1:].numel())) for part in (a, b))
    return torch.cat([_windows(x, y, weights, sample) for x, y in zip(*parts, strict=True)]).cpu()


def _windows(a: Tensor, b: Tensor, weights: list[float], sample: float) -> Tensor:
    """Return mean SSIM (N,) of prepared images over all windows that lie within them."""
    mean_a, mean_b, aa, bb, ab = _smoothed(torch.stack((a, b, a * a, b * b, a * b)), weights)
    product, squares = mean_a * mean_b, mean_a.square() + mean_b.square()
    luminance = (2 * product + _C1) / (squares + _C1)
    structure = (2 * sample * (ab - product) + _C2) / (sample * (aa + bb - squares) + _C2)
    return (luminance * structure).flatten(1).mean(1)


def _smoothed(images: Tensor, weights: list[float]) -> Tensor:
    """Return weighted means over square windows that fit: (..., H, W) to (..., H - k + 1, W - k + 1).

    Sums of shifted images, one side after the other: in double precision on a CPU up to nine times as fast as torch's
    convolutions, and the numbers do not depend on how many images there are.
    """
    for side in (-2, -1):
        length = images.shape[side] - len(weights) + 1
        total = images.narrow(side, 0, length) * weights[0]
        for shift, weight in enumerate(weights[1:], 1):
            total.add_(images.narrow(side, shift, length), alpha=weight)
        images = total
    return images


def _whole_plane_ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return SSIM of whole planes, (N, C)."""
    mean_a, mean_b = a.mean((2, 3)), b.mean((2, 3))
    da, db = a - mean_a[..., None, None], b - mean_b[..., None, None]
    luminance = (2 * mean_a * mean_b + _C1) / (mean_a.square() + mean_b.square() + _C1)
    spread = da.square().mean((2, 3)) + db.square().mean((2, 3))
    return luminance * (2 * (da * db).mean((2, 3)) + _C2) / (spread + _C2)


def _ycrcb(images: Tensor) -> Tensor:
    """Return ITU-R BT.601 luminance and color differences, offset to [0, 1]."""
    red, green, blue = images.unbind(1)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    return torch.stack((y, (red - y) * 0.713 + 0.5, (blue - y) * 0.564 + 0.5), 1)
