"""Scores of guesses that know nothing, against the published floors of four photographs."""

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from eval.metrics.baselines import baseline_images, nearest_reference
from eval.metrics.image import mse, psnr

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")


def photo(name, size, mode="RGB"):
    """Center square, bicubic to (1, C, size, size)."""
    picture = Image.fromarray(getattr(data, name)())
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    picture = picture.crop((left, top, left + side, top + side)).convert(mode)
    pixels = np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC)).reshape(size, size, -1)
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].double() / 255


@pytest.mark.parametrize(("name", "expected"), list(zip(PHOTOS, (11.1, 19.0, 12.7, 18.8), strict=True)))
def test_mean_color_floor_in_color(name, expected):
    truth = photo(name, 32)
    assert psnr(baseline_images(truth)["mean"], truth).item() == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("name", "expected"), list(zip(PHOTOS, (11.7, 19.7, 12.9, 19.2), strict=True)))
def test_mean_floor_in_gray(name, expected):
    truth = photo(name, 28, "L")
    assert psnr(baseline_images(truth)["mean"], truth).item() == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("name", "expected"), list(zip(PHOTOS, (10.66, 15.48, 9.85, 11.97), strict=True)))
def test_gray_floor_in_color(name, expected):
    truth = photo(name, 32)
    assert psnr(baseline_images(truth)["grey"], truth).item() == pytest.approx(expected, abs=0.05)


def test_mean_is_the_best_constant_and_its_mse_the_variance():
    truth = torch.cat([photo(name, 32) for name in PHOTOS])
    best = mse(baseline_images(truth)["mean"], truth)
    torch.testing.assert_close(best, truth.var((2, 3), correction=0).mean(1))
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert (mse(torch.full_like(truth, level), truth) >= best).all()


def test_noise_comes_from_its_seed_and_has_the_expected_error():
    truth = torch.full((8, 3, 32, 32), 0.5)
    state = torch.get_rng_state()
    noise = baseline_images(truth, seed=3)["noise"]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(noise, baseline_images(truth, seed=3)["noise"])
    assert not torch.equal(noise, baseline_images(truth, seed=4)["noise"])
    assert mse(noise, truth).mean().item() == pytest.approx(1 / 12, rel=0.02)


def test_guesses_have_the_truths_shape_and_range():
    truth = torch.rand(3, 1, 9, 7, generator=torch.Generator().manual_seed(0))
    for images in baseline_images(truth, reference=1 - truth).values():
        assert images.shape == truth.shape
        assert images.dtype == truth.dtype
        assert images.min() >= 0
        assert images.max() <= 1
    assert "nearest" not in baseline_images(truth)


def test_nearest_is_the_closest_reference_over_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    truth, reference = (torch.rand(n, 3, 8, 8, generator=generator) for n in (5, 40))
    expected = (truth[:, None] - reference[None]).square().mean((2, 3, 4)).argmin(1)
    assert torch.equal(nearest_reference(truth, reference), expected)
    monkeypatch.setattr("eval.metrics.baselines._CHUNK", 7)
    assert torch.equal(nearest_reference(truth, reference), expected)
    assert torch.equal(baseline_images(truth, reference=reference)["nearest"], reference[expected])


def test_copies_of_the_truth_are_left_out_and_near_copies_kept():
    truth = (torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 255).round() / 255
    near = truth.clone()
    near[0, 0, 0, 0] = 1 - near[0, 0, 0, 0]
    reference = torch.cat([torch.zeros_like(truth), truth + 0.3 / 255, near])
    assert nearest_reference(truth, reference).tolist() == [2]


@pytest.mark.parametrize("reference", [torch.full((2, 1, 4, 4), 0.5), torch.zeros(0, 1, 4, 4)])
def test_a_reference_of_nothing_but_copies_is_refused(reference):
    with pytest.raises(ValueError, match="other than true image 0"):
        nearest_reference(torch.full((1, 1, 4, 4), 0.5), reference)


def test_a_reference_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="truth's shape"):
        nearest_reference(torch.zeros(1, 1, 4, 4), torch.zeros(3, 3, 4, 4))
