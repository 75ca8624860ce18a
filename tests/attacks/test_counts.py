"""Counts of classes where the gradient is doubted: the likeliest, and no worse than an even deal."""

import math
from collections import Counter
from itertools import product

import pytest
import torch

from attacks.counts import nearest, surprise
from attacks.labels import recovered
from fl.capture import from_batch
from fl.models import build
from fl.seeds import stream


@pytest.mark.parametrize("doubt", [0.0, 1e-3, 1e-2, 1e3])
@pytest.mark.parametrize("seed", range(4))
def test_counts_are_the_likeliest_of_all(seed: int, doubt: float) -> None:
    draw = stream(seed, "likeliest")
    predictions = torch.rand(3, 3, generator=draw, dtype=torch.float64).softmax(-1)
    signals, least = (predictions.mT - torch.eye(3)) / 7, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    target = signals @ torch.tensor([6.0, 0.0, 1.0], dtype=torch.float64)
    target = target + 0.05 * torch.randn(3, generator=draw, dtype=torch.float64)

    def cost(counts: tuple[int, ...]) -> float:
        off = signals @ torch.tensor(counts, dtype=torch.float64) - target
        return float(off @ off) + doubt * 2 * sum(math.log(math.factorial(n)) for n in counts)

    every = [n for n in product(range(8), repeat=3) if sum(n) == 7 and n[2] >= 1]
    found = tuple(int(n) for n in nearest(signals, target, 7, least, doubt))
    assert cost(found) == pytest.approx(min(map(cost, every)), abs=1e-9)
    if doubt > 1:
        assert sorted(found) == [2, 2, 3]


def test_surprise_is_least_where_classes_are_alike() -> None:
    alike, apart = torch.tensor([2.0, 2, 2]), torch.tensor([4.0, 1, 1])
    assert surprise(apart) - surprise(alike) == pytest.approx(2 * math.log(24 / 8))


@pytest.mark.parametrize("bias", [True, False])
def test_counts_of_a_network_that_tells_classes_apart_are_no_worse_than_an_even_deal(bias: bool) -> None:
    """Images of a class that is predicted surely leave no gradient behind, and those that are mistaken leave all."""
    given = build("linear", num_classes=5, seed=0)
    prototypes = torch.rand(5, 1, 8, 8, generator=stream(0, "prototypes"))
    with torch.no_grad():
        given.model.head.weight.copy_(0.4 * (prototypes - prototypes.mean(0)).flatten(1))
    if not bias:
        given.model.head.bias = None  # type: ignore[union-attr, assignment]
    told = []
    for seed in range(8):
        draw = stream(seed, "sure")
        labels = torch.randint(0, 5, (40,), generator=draw)
        images = (prototypes[labels] + 0.4 * torch.randn(40, 1, 8, 8, generator=draw)).clamp(0, 1)
        view, _ = from_batch(given.model, images, labels, head="head.")
        found = recovered(view, view.update)
        assert found is not None
        true = Counter(labels.tolist())
        even = Counter(list(range(5)) * 8)
        told.append((Counter(found.tolist()) & true).total() - (even & true).total())
    assert sum(told) >= 0
