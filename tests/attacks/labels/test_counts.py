"""Counts of classes where the gradient is doubted: the likeliest, and no worse than an even deal."""

import math
from collections import Counter
from itertools import product

import pytest
import torch

from attacks.labels.counts import LOG_ODDS_OF_ANY_COUNTS, map_counts, prior_deviance
from attacks.labels.recovery import recover_labels
from attacks.update.observed_update import ObservedUpdate
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
        alike = math.factorial(7) / math.prod(map(math.factorial, counts)) / 3**7
        any_counts = math.exp(LOG_ODDS_OF_ANY_COUNTS) / math.comb(9, 2)  # of 36 deals
        return float(off @ off) - doubt * 2 * math.log(alike + any_counts)

    every = [n for n in product(range(8), repeat=3) if sum(n) == 7 and n[2] >= 1]
    found = tuple(int(n) for n in map_counts(signals, target, 7, least, doubt))
    assert cost(found) == pytest.approx(min(map(cost, every)), abs=1e-9)
    if doubt > 1:
        assert sorted(found) == [2, 2, 3]


def test_surprise_is_least_where_classes_are_alike() -> None:
    alike, apart = torch.tensor([2.0, 2, 2]), torch.tensor([4.0, 1, 1])
    chances = [720 / multiple / 3**6 + math.exp(LOG_ODDS_OF_ANY_COUNTS) / 28 for multiple in (8, 24)]
    assert prior_deviance(apart) - prior_deviance(alike) == pytest.approx(
        2 * math.log(chances[0] / chances[1]), rel=1e-5
    )
    few = [prior_deviance(torch.tensor([64.0 - n, n, 0])) for n in (0, 1, 20)]
    assert max(few) - min(few) < 1e-3  # of one class or of two, however many of each


def told(classes: list[int], *, bias: bool) -> tuple[float, float]:
    """Shares of labels told and guessed by an even deal, for a classifier that is sure of most images."""
    given = build("linear", num_classes=5, seed=0)
    prototypes = torch.rand(5, 1, 8, 8, generator=stream(0, "prototypes"))
    with torch.no_grad():
        given.model.head.weight.copy_(0.4 * (prototypes - prototypes.mean(0)).flatten(1))
    if not bias:
        given.model.head.bias = None  # type: ignore[union-attr, assignment]
    right = guessed = 0
    for seed in range(8):
        draw = stream(seed, "sure")
        labels = torch.tensor(classes)[torch.randint(0, len(classes), (40,), generator=draw)]
        images = (prototypes[labels] + 0.4 * torch.randn(40, 1, 8, 8, generator=draw)).clamp(0, 1)
        view, _ = from_batch(given.model, images, labels, head="head.")
        found = recover_labels(ObservedUpdate(view))
        assert found is not None
        true, even = Counter(labels.tolist()), Counter(list(range(5)) * 8)
        right += (Counter(found.tolist()) & true).total()
        guessed += (even & true).total()
    return right / 320, guessed / 320


@pytest.mark.parametrize("bias", [True, False])
def test_counts_of_a_network_that_tells_classes_apart_are_no_worse_than_an_even_deal(bias: bool) -> None:
    """Images of a class that is predicted surely leave no gradient behind, and those that are mistaken leave all."""
    right, guessed = told([0, 1, 2, 3, 4], bias=bias)
    assert right >= guessed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("classes", [[0, 1], [3]], ids=["two classes", "one class"])
def test_a_client_of_few_classes_is_told_from_one_of_all(classes: list[int], bias: bool) -> None:
    right, guessed = told(classes, bias=bias)
    assert guessed < 0.5
    assert right > 0.85
