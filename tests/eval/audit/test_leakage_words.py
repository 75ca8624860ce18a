from types import SimpleNamespace

import pytest
import torch

from attacks.base import Reconstruction
from eval.audit.leakage_words import leakage
from eval.audit.verdict import image_line
from eval.metrics.baselines import baseline_images
from eval.metrics.score import score, score_without_truth
from fl.seeds import stream
from fl.types import Batch


@pytest.fixture
def truth():
    images = torch.rand(2, 1, 8, 8, generator=stream(0, "images")) * 0.4 + 0.3
    return SimpleNamespace(inputs=images, labels=torch.tensor([0, 1]), private={}, extractor={})


def said(truth, images):
    return leakage(Reconstruction(images, None, 0.0, (0.0,)), truth).splitlines()[-1]


def test_no_guess_counts_as_a_leak(truth):
    for name, images in baseline_images(truth.inputs).items():
        assert not said(truth, images).startswith("image content leaked"), name
    mean = baseline_images(truth.inputs)["mean"]
    assert said(truth, mean).startswith("not told apart from a guess: 0 of 2")
    slightly = mean + 0.05 * (truth.inputs - mean)  # 0.45 dB above the mean color
    assert said(truth, slightly).endswith("on average +0.4 dB")
    assert said(truth, 1 - truth.inputs).startswith("no image content shown to leak: 0 of 2")


def test_equal_images_count_once(truth):
    images = truth.inputs[:1].repeat(7, 1, 1, 1)
    truth.inputs, truth.labels = images, torch.zeros(7, dtype=torch.int64)
    mean = baseline_images(images)["mean"]
    text = said(truth, mean + 0.2 * (images - mean))
    assert text.startswith("too few images to tell content from chance: 7 of 7 image(s) at least 1 dB above")
    assert text.endswith("images that equal others (6) count once: 1 in all")


def test_the_mean_of_an_attacks_public_images_is_a_guess():
    def pictures(count, seed):
        disk = torch.zeros(1, 1, 8, 8)
        disk[..., 2:6, 2:6] = 0.8
        return disk + 0.2 * torch.rand(count, 1, 8, 8, generator=stream(seed, "pictures"))

    truth = SimpleNamespace(inputs=pictures(8, 0), labels=torch.zeros(8).long(), private={}, extractor={})
    public = Batch(pictures(40, 1), torch.zeros(40, dtype=torch.int64))
    guess = Reconstruction(public.inputs.mean(0, keepdim=True).expand(8, -1, -1, -1), None, 0.0, (0.0,))
    assert leakage(guess, truth).splitlines()[-1].startswith("image content leaked")
    assert not leakage(guess, truth, public=public).splitlines()[-1].startswith("image content leaked")


def test_a_margin_above_the_best_guess_of_two_images_is_no_leak_yet(truth):
    mean = baseline_images(truth.inputs)["mean"]
    text = said(truth, mean + 0.2 * (truth.inputs - mean))  # 1.9 dB above it
    assert text.startswith("too few images to tell content from chance: 2 of 2 image(s) at least 1 dB above")
    assert text.endswith("on average +1.9 dB")


def test_one_leaked_image_among_others_counts(truth):
    images = torch.stack([truth.inputs[0], 0.75 - 0.5 * truth.inputs[1]])  # the second has its contrast reversed
    text = said(truth, images)
    assert text.startswith("image content leaked: 1 of 2 image(s) came back at 20 dB or more and at least 10 dB above")
    assert "the furthest at 100.0 dB" in text


def test_an_image_without_a_figure_is_described_by_the_reason(truth):
    found = Reconstruction(truth.inputs, torch.tensor([0, 1]), 0.0, (0.0,))
    unknown = score_without_truth(found, 2)
    assert image_line(unknown[1], 1).startswith("image 1: not scored, the true images are not known")
    nothing = score(Reconstruction(None, None, 0.0, (0.0,)), truth)
    assert image_line(nothing[0], 0) == "image 0: not scored, the attack recovers no images"
    assert image_line({}, 7).startswith("image 7: not scored, for want of")
    assert image_line(score(found, truth)[1], 1).startswith("image 1: PSNR 100.0 dB")
