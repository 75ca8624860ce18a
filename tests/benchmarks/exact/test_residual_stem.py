"""`benchmarks.exact.residual_stem`: what a stem passes on is the network's own, and the search meets its equations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.exact import residual_stem
from benchmarks.exact.residual_stem import FLOWER, SIZES, Stem, bounds_of_windows, document, imagenet, search
from benchmarks.exact.residual_victims import NOISE, Victim, observe

CASE = replace(SIZES[0], pictures=NOISE, first=0, side=16)


@pytest.fixture(scope="module")
def victim() -> Victim:
    return observe(CASE, 0)


def stem_of(victim: Victim) -> Stem:
    body: Any = victim.model.body
    return Stem.of(victim.model, victim.images, body.conv1, body.bn1, body.maxpool)


def test_outputs_and_gradient_are_those_of_the_network(victim: Victim) -> None:
    network: Any = victim.model
    stem, pixels, other = stem_of(victim), victim.images.inputs, victim.images.inputs.flip(-1)
    made = [network.body.bn1(network.body.conv1(network.normalize(images))) for images in (pixels, other)]
    torch.testing.assert_close(stem.convolve(pixels) - stem.convolve(other), made[0] - made[1], rtol=1e-3, atol=1e-4)
    assert torch.equal(stem.convolve(pixels), stem.values)
    loss = nn.functional.cross_entropy(network(pixels), victim.images.labels)
    (expected,) = torch.autograd.grad(loss, [network.body.conv1.weight])
    means = pixels - network.normalize(pixels) * stem.std
    found = stem.gradient(pixels) - stem.gradient(means)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_the_truth_is_within_its_bounds(victim: Victim) -> None:
    stem = stem_of(victim)
    assert 0 < int(stem.passed.sum()) <= 64 * 4 * 4
    assert float(stem.room[stem.passed == 0].min()) >= 0
    assert float(stem.room[stem.passed == 1].abs().max()) == 0


def test_an_input_is_at_most_the_least_output_of_its_windows() -> None:
    largest = torch.tensor([[[[1.0, 5.0], [2.0, 7.0]]]])
    bounds = bounds_of_windows(largest, torch.Size((1, 1, 4, 4)), nn.MaxPool2d(3, 2, 1))
    expected = [[1, 1, 5, 5], [1, 1, 5, 5], [2, 2, 7, 7], [2, 2, 7, 7]]
    assert bounds[0, 0, 0].tolist() == expected[0]
    assert bounds[0, 0, 3, 3] == 7
    assert bounds[0, 0, 1, 1] == 1


def test_a_search_meets_its_equations(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_stem, "STEPS", 60)
    stem, truth = stem_of(victim), victim.images.inputs
    found, gray = search(stem, truth), torch.full_like(truth, 0.5)
    misfits = [float(((stem.convolve(images) - stem.values) * stem.passed).norm()) for images in (found, gray)]
    assert misfits[0] < 0.1 * misfits[1]


def test_sizes_and_networks_have_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_stem, "SIZES", (CASE,))
    counts = imagenet(CASE.name, 0)[2]
    assert counts["inputs"] == 64 * 4 * 4
    assert 81920 < counts["equations"] <= 81920 + 2 * 128 * 2 * 2
    row = {"victim": 0, "numbers": 768, "first_gradient": 9408, "passed": 600, "psnr_told": 41.6, "seconds": 1.0}
    text = document([{"case": CASE.name, **row, **counts}, {"case": FLOWER, **row, "first_gradient": 450}])
    assert any(line.startswith("| 16 x 16 | 1 | 1024 |") and "| 768 | 10008 | 13.03 |" in line for line in text)
    assert "| 1 | 768 | 1050 | 1.37 | 42 (42 to 42) |" in text
