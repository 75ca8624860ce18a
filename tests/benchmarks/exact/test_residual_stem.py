"""`benchmarks.exact.residual_stem`: counts are of the network's own tensors, and the search meets linear equations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.exact import residual_stem
from benchmarks.exact.residual_stem import SIZES, convolved, document, measure, search_with_positions, stem_outputs
from benchmarks.exact.residual_victims import NOISE, Victim, observe

CASE = replace(SIZES[0], pictures=NOISE, first=0, side=16)


@pytest.fixture(scope="module")
def victim() -> Victim:
    return observe(CASE, 0)


def test_outputs_are_those_of_the_stem(victim: Victim) -> None:
    network: Any = victim.model
    outputs = stem_outputs(victim)
    other = victim.images.inputs.flip(-1)
    made = [
        torch.nn.functional.conv2d(network.normalize(images), network.body.conv1.weight, stride=2, padding=3)
        for images in (victim.images.inputs, other)
    ]
    torch.testing.assert_close(outputs["values"] - convolved(network, other), made[0] - made[1], rtol=1e-4, atol=1e-4)
    assert outputs["inner"].shape == outputs["block"].shape == (1, 128, 2, 2)
    assert int(outputs["passed"].sum()) <= 64 * 4 * 4


def test_the_signal_is_what_flows_back_into_the_first_convolution(victim: Victim) -> None:
    network: Any = victim.model
    outputs = stem_outputs(victim)
    (expected,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(network(victim.images.inputs), victim.images.labels),
        [network.body.conv1.weight],
    )
    pixels = network.normalize(victim.images.inputs)
    signal = outputs["signal"] * network.body.bn1.weight.detach()[:, None, None]
    signal = signal / (network.body.bn1.running_var + network.body.bn1.eps).sqrt()[:, None, None]
    found = torch.nn.grad.conv2d_weight(pixels, expected.shape, signal, stride=2, padding=3)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_a_search_meets_its_equations(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_stem, "STEPS", 60)
    outputs = stem_outputs(victim)
    found = search_with_positions(victim, outputs)
    network = victim.model
    gray = torch.full_like(found, 0.5)

    def misfit(images: torch.Tensor) -> float:
        return float(((convolved(network, images) - outputs["values"]) * outputs["passed"]).norm())

    assert misfit(found) < 0.1 * misfit(gray)


def test_a_size_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_stem, "STEPS", 2)
    row = measure(CASE, 0)
    assert row["numbers"] == 768
    assert row["inputs"] == 64 * 4 * 4
    assert 81920 < row["equations"] <= 81920 + 2 * 128 * 2 * 2
    (line,) = (line for line in document([row]) if line.startswith("| 64 x 64 | 1 | 1024 |"))
    assert f"| 768 | {row['passed'] + row['first_gradient']} |" in line
