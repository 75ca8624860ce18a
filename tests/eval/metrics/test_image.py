"""Image metrics against closed forms, independent formulas, and the traps of other implementations."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from scipy.signal import convolve2d
from skimage import data
from skimage.metrics import structural_similarity

from eval.metrics.image import PSNR_CAP, exact8, mse, psnr, psnr_of_mse, ssim, ssim_rog, ssim_uniform7

METRICS = [mse, psnr, ssim, ssim_rog, ssim_uniform7]


def photos(size=32):
    """Four crops of scikit-image's photographs (4, 3, size, size)."""
    crops = [getattr(data, name)()[100 : 100 + size, 150 : 150 + size] for name in ("astronaut", "chelsea", "coffee")]
    crops.append(data.rocket()[200 : 200 + size, 300 : 300 + size])
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).double() / 255


def noisy(images, sigma=0.1, seed=0):
    return images + sigma * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed), dtype=images.dtype)


def per_channel(a, b, window_ssim):
    """Mean over channels of a single-plane SSIM, image by image."""
    pairs = zip(a.clamp(0, 1).numpy(), b.numpy(), strict=True)
    return [np.mean([window_ssim(x, y) for x, y in zip(p, q, strict=True)]) for p, q in pairs]


def formula(mx, my, vx, vy, cov):
    return np.mean((2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))


def gaussian_plane(x, y):
    """Wang et al.: an 11x11 Gaussian window of sigma 1.5, wherever it fits."""
    bell = np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2)
    kernel = np.outer(bell, bell) / bell.sum() ** 2

    def mean(z):
        return convolve2d(z, kernel, mode="valid")

    mx, my = mean(x), mean(y)
    return formula(mx, my, mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my)


def uniform_plane(x, y):
    """A 7x7 box with sample covariance, wherever it fits."""
    u, v = (sliding_window_view(z, (7, 7)).reshape(-1, 49) for z in (x, y))
    cov = ((u - u.mean(1, keepdims=True)) * (v - v.mean(1, keepdims=True))).sum(1) / 48
    return formula(u.mean(1), v.mean(1), u.var(1, ddof=1), v.var(1, ddof=1), cov)


def rog_8bit(x, y):
    """The three factors (luminance, contrast, structure) on the 0-255 range, weighted over YCrCb planes."""

    def plane(p, q):
        p, q, c1, c2 = 255 * p, 255 * q, 2.55**2, 7.65**2
        sp, sq, cov = p.std(), q.std(), ((p - p.mean()) * (q - q.mean())).mean()
        luminance = (2 * p.mean() * q.mean() + c1) / (p.mean() ** 2 + q.mean() ** 2 + c1)
        return luminance * (2 * sp * sq + c2) / (sp**2 + sq**2 + c2) * (cov + c2 / 2) / (sp * sq + c2 / 2)

    def planes(z):
        luminance = 0.299 * z[0] + 0.587 * z[1] + 0.114 * z[2]
        return luminance, 128 / 255 + 0.713 * (z[0] - luminance), 128 / 255 + 0.564 * (z[2] - luminance)

    return sum(w * plane(p, q) for w, p, q in zip((0.8, 0.1, 0.1), planes(x), planes(y), strict=True))


@pytest.mark.parametrize(("offset", "expected"), [(1.0, 0.0), (0.1, 20.0), (0.01, 40.0), (1e-4, 80.0)])
def test_psnr_of_a_constant_offset(offset, expected):
    truth = torch.zeros(2, 3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(psnr(truth + offset, truth), torch.full((2,), expected, dtype=torch.float64))


def test_psnr_of_equal_images_is_the_cap_and_spares_the_rest_of_the_batch():
    truth = photos()
    guess = truth.clone()
    guess[1:] += 0.01
    values = psnr(guess, truth)
    assert values[0] == PSNR_CAP
    assert (values[1:] < 45).all()


def test_psnr_is_taken_per_image_not_pooled():
    truth = torch.zeros(2, 1, 4, 4)
    guess = torch.stack([torch.full((1, 4, 4), 0.1), torch.full((1, 4, 4), 0.01)])
    assert psnr(guess, truth).mean().item() == pytest.approx(30, abs=1e-5)
    assert psnr_of_mse(mse(guess, truth).mean()).item() == pytest.approx(22.967, abs=1e-3)


def test_reconstructions_are_clamped_first():
    truth = torch.tensor([0.0, 1.0]).repeat(8).reshape(1, 1, 4, 4)
    assert psnr(truth * 3 - 1, truth).item() == PSNR_CAP


def test_small_errors_survive_float32_inputs():
    truth = torch.full((1, 1, 8, 8), 0.5)
    guess = truth + 2.0**-16
    assert mse(guess, truth).item() == pytest.approx(2.0**-32, rel=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.5])
def test_ssim_against_independent_formulas(channels, sigma):
    truth = photos()[:, :channels]
    guess = noisy(truth, sigma)
    np.testing.assert_allclose(ssim(guess, truth), per_channel(guess, truth, gaussian_plane), atol=1e-6)
    np.testing.assert_allclose(ssim_uniform7(guess, truth), per_channel(guess, truth, uniform_plane), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("size", [(32, 32), (11, 11), (13, 47), (28, 31)])
def test_ssim_is_scikit_images(channels, size):
    """In two parts of a batch, or one image at a time."""
    draw = torch.Generator().manual_seed(0)
    count = 2**15 // (channels * size[0] * size[1]) + 3
    truth = torch.rand(count, channels, *size, generator=draw, dtype=torch.float64)
    truth[1] = 0.5  # flat: what is divided by is smallest there
    guess = noisy(truth, 0.2).clamp(0, 1)
    planes = [(x.movedim(0, -1).numpy(), y.movedim(0, -1).numpy()) for x, y in zip(guess, truth, strict=True)]
    wang = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    for metric, settings in ((ssim, wang), (ssim_uniform7, {})):
        expected = [structural_similarity(x, y, data_range=1.0, channel_axis=-1, **settings) for x, y in planes]
        np.testing.assert_allclose(metric(guess, truth), expected, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(
            torch.cat([metric(guess[:2], truth[:2]), metric(guess[2:], truth[2:])]), metric(guess, truth)
        )


def test_ssim_rog_is_global_and_weighted_over_ycrcb():
    truth, guess = photos(), noisy(photos()).clamp(0, 1)
    expected = [rog_8bit(x, y) for x, y in zip(guess.numpy(), truth.numpy(), strict=True)]
    np.testing.assert_allclose(ssim_rog(guess, truth), expected, atol=1e-4)
    shuffled = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ssim_rog(guess[..., shuffled], truth[..., shuffled]), ssim_rog(guess, truth))


def test_ssim_names_stand_for_different_numbers():
    truth = photos()
    guess = noisy(truth, 0.155)
    wang, uniform, whole = (metric(guess, truth).mean().item() for metric in (ssim, ssim_uniform7, ssim_rog))
    reference = structural_similarity(
        guess[0].clamp(0, 1).movedim(0, -1).numpy(), truth[0].movedim(0, -1).numpy(), data_range=1.0, channel_axis=-1
    )
    assert ssim_uniform7(guess, truth)[0].item() == pytest.approx(reference, abs=1e-12)
    assert abs(wang - uniform) > 0.001
    assert abs(whole - wang) > 0.05


def test_ssim_closed_forms():
    truth = photos()
    for metric in (ssim, ssim_uniform7, ssim_rog):
        torch.testing.assert_close(metric(truth, truth), torch.ones(4, dtype=torch.float64))
    flat, other = torch.full((1, 1, 16, 16), 0.5), torch.full((1, 1, 16, 16), 0.25)
    expected = (2 * 0.5 * 0.25 + 1e-4) / (0.5**2 + 0.25**2 + 1e-4)
    for metric in (ssim, ssim_uniform7, ssim_rog):
        assert metric(other, flat).item() == pytest.approx(expected, abs=1e-9)


def test_ssim_of_images_below_the_window_is_not_available():
    small = torch.full((2, 1, 10, 28), 0.5)
    assert ssim(small, small).isnan().all()
    assert ssim_uniform7(small, small).isfinite().all()
    assert ssim_uniform7(small[..., :6], small[..., :6]).isnan().all()
    assert ssim(torch.full((1, 1, 11, 11), 0.5), torch.full((1, 1, 11, 11), 0.5)).item() == pytest.approx(1)


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.__name__)
def test_metrics_score_each_image_by_itself(metric):
    truth = photos()
    guess = noisy(truth)
    values = metric(guess, truth)
    assert values.shape == (4,)
    assert values.dtype == torch.float64
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(metric(guess[order], truth[order]), values[order])
    assert torch.equal(torch.cat([metric(guess[i : i + 1], truth[i : i + 1]) for i in range(4)]), values)
    torch.testing.assert_close(metric(guess.float(), truth.float()), values, atol=1e-5, rtol=0)
    strided = guess.contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.testing.assert_close(metric(strided, truth), values, atol=1e-12, rtol=0)
    torch.testing.assert_close(metric(guess.mT, truth.mT), values, atol=1e-9, rtol=0)
    torch.testing.assert_close(metric(truth, guess.clamp(0, 1)), values, atol=1e-12, rtol=0)


def test_exact8_rounds_before_comparing():
    truth = photos()
    assert exact8(truth + 0.4 / 255, truth).all()
    wrong = truth.clone()
    wrong[2, 1, 3, 4] = 1 - wrong[2, 1, 3, 4]
    assert exact8(wrong, truth).tolist() == [True, True, False, True]


@pytest.mark.parametrize("metric", [*METRICS, exact8], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("guess", "truth", "message"),
    [
        (torch.zeros(2, 3, 16, 16), torch.zeros(2, 1, 16, 16), "one shape"),
        (torch.zeros(3, 16, 16), torch.zeros(3, 16, 16), r"\(N, C, H, W\)"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.zeros(1, 3, 16, 16), "floating-point"),
        (torch.full((2, 3, 16, 16), math.nan), torch.zeros(2, 3, 16, 16), r"reconstruction images \[0, 1\]"),
        (torch.zeros(1, 3, 16, 16), torch.full((1, 3, 16, 16), math.inf), r"truth images \[0\]"),
        (torch.zeros(1, 3, 16, 16), torch.full((1, 3, 16, 16), 255.0), "undo the normalization"),
        (torch.zeros(1, 3, 16, 16), torch.full((1, 3, 16, 16), -2.0), "undo the normalization"),
    ],
)
def test_bad_images_are_refused(metric, guess, truth, message):
    with pytest.raises(ValueError, match=message):
        metric(guess, truth)


def test_ssim_rog_refuses_other_channel_counts():
    with pytest.raises(ValueError, match="1 or 3 channels"):
        ssim_rog(torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("metric", [*METRICS, exact8], ids=lambda m: m.__name__)
def test_images_on_a_gpu_get_the_same_figures(metric):
    truth, guess = photos(), noisy(photos())
    found = metric(guess.cuda(), truth.cuda())
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, metric(guess, truth), atol=1e-10, rtol=0)


def test_golden_values_on_digits():
    """The same noise reads 32.6 or 34.9 dB and .86 to 1.00 SSIM, by definition; digits show it most."""
    folder = os.environ.get("HYPERLEAK_DATA")
    if not folder or not (Path(folder) / "mnist_test.npz").is_file():
        pytest.skip("set HYPERLEAK_DATA to the folder that holds mnist_test.npz")
    with np.load(Path(folder) / "mnist_test.npz", allow_pickle=False) as archive:
        truth = torch.from_numpy(archive["images"][:32]).permute(0, 3, 1, 2).double() / 255
    guess = noisy(truth, 0.0235)
    assert psnr(guess, truth).mean().item() == pytest.approx(34.9, abs=0.3)
    assert ssim(guess, truth).mean().item() == pytest.approx(0.936, abs=0.03)
    assert ssim_uniform7(guess, truth).mean().item() == pytest.approx(0.862, abs=0.04)
    assert ssim_rog(guess, truth).mean().item() == pytest.approx(0.998, abs=0.002)
    black = torch.zeros_like(truth)
    assert ssim(black, truth).mean().item() < ssim_uniform7(black, truth).mean().item() < 0.6
    assert ssim_rog(black, truth).mean().item() == pytest.approx(0, abs=0.01)


def test_no_images_have_no_figures():
    none = torch.zeros(0, 3, 16, 16)
    for metric in (mse, psnr, ssim, ssim_uniform7, ssim_rog, exact8):
        assert metric(none, none).shape == (0,)
