"""One-to-one matching of reconstructions and true images."""

import itertools
import math

import pytest
import torch

from eval.metrics.image import mse
from eval.metrics.matching import assign, pairwise_mse


def images(count, seed=0, size=6):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 33, 64])
@pytest.mark.parametrize("seed", range(5))
def test_permuted_and_noisy_batches_are_recovered(count, seed):
    truth = images(count, seed)
    generator = torch.Generator().manual_seed(100 + seed)
    order = torch.randperm(count, generator=generator)
    guess = truth[order] + 0.05 * torch.randn(truth.shape, generator=generator)
    assert assign(guess, truth) == order.argsort().tolist()


def test_optimal_over_all_permutations_where_greedy_fails():
    for seed in range(20):
        truth, guess = images(5, seed, 2), images(5, 1000 + seed, 2)
        cost = pairwise_mse(truth, guess)
        best = min(sum(cost[i, p] for i, p in enumerate(order)) for order in itertools.permutations(range(5)))
        mine = sum(cost[i, j] for i, j in enumerate(assign(guess, truth)))
        assert mine.item() == pytest.approx(best.item(), rel=1e-12)
    line = torch.tensor([0.0, 0.4]).reshape(2, 1, 1, 1)  # greedy takes 0.39 for 0.4 and is left with 0.9 for 0
    assert assign(torch.tensor([0.39, 0.9]).reshape(2, 1, 1, 1), line) == [0, 1]


def test_pairwise_mse_is_the_mse_of_every_pair_down_to_rounding():
    a, b = images(3, 1), images(4, 2)
    b[1] = a[2] + 1e-6
    table = pairwise_mse(a, b)
    for i, j in itertools.product(range(3), range(4)):
        assert table[i, j].item() == pytest.approx(mse(a[i : i + 1], b[j : j + 1].clamp(0, 1)).item(), rel=1e-9)


def test_pixels_outside_the_range_are_clamped_before_matching():
    truth = torch.stack([torch.ones(1, 2, 2), torch.full((1, 2, 2), 0.6)])
    guess = torch.stack([torch.full((1, 2, 2), 0.5), torch.full((1, 2, 2), 50.0)])
    assert assign(guess, truth) == [1, 0]


def test_fewer_reconstructions_leave_true_images_unmatched():
    truth = images(4)
    assert assign(truth[[2, 0]], truth) == [1, None, 0, None]
    assert assign(truth[:0], truth) == [None] * 4


def test_more_reconstructions_leave_the_worst_unused():
    truth = images(2)
    assert assign(torch.cat([images(3, 7), truth.flip(0)]), truth) == [4, 3]


def test_reconstructions_that_are_not_finite_match_nothing():
    truth = images(3)
    guess = truth.clone()
    guess[1, 0, 0, 0] = math.nan
    guess[2, 0, 0, 0] = math.inf
    assert assign(guess, truth) == [0, None, None]


def test_ties_are_broken_alike_every_time():
    truth = images(1).repeat(6, 1, 1, 1)
    first = assign(truth, truth)
    assert sorted(first) == list(range(6))
    assert all(assign(truth.clone(), truth.clone()) == first for _ in range(5))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="truth's shape"):
        assign(images(2, size=5), images(2, size=6))
    with pytest.raises(ValueError, match="truth's shape"):
        assign(images(2)[0], images(2))
