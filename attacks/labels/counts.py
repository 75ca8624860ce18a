"""The likeliest whole numbers of images per class, given a noisy linear observation of them.

Symbols. n (K,) counts of K classes, N their sum; S (M, K) the signal that one image of each class adds; t (M,) the
observed sum, t = S n + noise of variance s^2 in each entry. Up to a constant, minus twice the logarithm of the
posterior is

    |S n - t|^2 / s^2 - 2 log P(n),        P(n) = M(n) + e^F A(n),

with M the multinomial chance of n where every image is of any class with equal chance, and A the chance of n where all
counts of N images are as likely. F is the logarithm of how much less likely the second is: a client may have few
classes, and then nothing is held against it but that. `map_counts` makes s^2 times this as small as single images
moved between classes can make it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_ODDS_OF_ANY_COUNTS = -12.0
"""F. Without A clients of two classes lost half of their labels; from -10 to -15 batches of all classes and of few come
out alike, with more those of all get worse."""


def prior_deviance(counts: Tensor) -> float:
    """Return -2 log P(n) of counts (K,)."""
    return -2 * float(torch.logaddexp(_log_multinomial(counts), _log_any_counts(counts)))


def _log_multinomial(counts: Tensor) -> Tensor:
    """Return log M(n) of counts (K,)."""
    images = counts.sum()
    return torch.lgamma(images + 1) - torch.lgamma(counts + 1).sum() - images * math.log(len(counts))


def _log_any_counts(counts: Tensor) -> Tensor:
    """Return F + log A(n) of counts (K,): one over the number of ways to split N into K counts."""
    images, classes = counts.sum(), torch.tensor(float(len(counts))).to(counts)
    return LOG_ODDS_OF_ANY_COUNTS + torch.lgamma(images + 1) + torch.lgamma(classes) - torch.lgamma(images + classes)


def map_counts(signals: Tensor, target: Tensor, images: int, least: Tensor, doubt: float = 0.0) -> Tensor:
    """Return the counts that make |S n - t|^2 - 2 s^2 log P(n) least, among those that single moves lead to.

    Images are given out one by one where they help most, then moved between classes as long as that helps. This is
    done twice, giving out as if there were no noise and as if classes were alike, and the likelier result is taken.

    Args:
        signals: S (M, K), what one image of each class adds to the target.
        target: t (M,), the sum over all images.
        images: N.
        least: whole numbers (K,) that the counts are not below; they add up to no more than N.
        doubt: s^2, in squared units of the target; 0 takes the nearest counts.

    Returns:
        Whole numbers (K,) that add up to N, of the type of `least`.
    """
    starts = [_greedy_counts(signals, target, images, least, each) for each in {0.0, doubt}]
    found = [_refine_counts(signals, target, start, least, doubt) for start in starts]
    return min(found, key=lambda n: float((signals @ n - target).square().sum()) + doubt * prior_deviance(n))


def _greedy_counts(signals: Tensor, target: Tensor, images: int, least: Tensor, doubt: float) -> Tensor:
    """Deal images one by one, each to the class where it helps most, and return the counts (K,)."""
    gram, reach = signals.mT @ signals, signals.mT @ target
    counts = least.clone()
    while counts.sum() < images:
        counts[(2 * (gram @ counts - reach) + gram.diagonal() + 2 * doubt * counts.log1p()).argmin()] += 1
    return counts


def _refine_counts(signals: Tensor, target: Tensor, counts: Tensor, least: Tensor, doubt: float) -> Tensor:
    """Move single images between classes, always by the best move, as long as one helps; return the counts (K,).

    Moving one image from class a to class b changes |S n - t|^2 by slope_b - slope_a + |S_a - S_b|^2, where slope is
    its gradient 2 S^T (S n - t), and M(n) by the factor n_a / (n_b + 1); A(n) stays.
    """
    gram, reach = signals.mT @ signals, signals.mT @ target
    own, counts = gram.diagonal(), counts.clone()
    pairs = own + own[:, None] - 2 * gram
    floor, free = 1e-9 * float(target @ target), _log_any_counts(counts)
    while True:
        slope = 2 * (gram @ counts - reach)
        alike = _log_multinomial(counts)
        rarer = counts.clamp_min(1).log()[:, None] - counts.log1p()
        likelier = torch.logaddexp(alike + rarer, free) - torch.logaddexp(alike, free)
        change = slope - slope[:, None] + pairs - 2 * doubt * likelier
        change = change.masked_fill((counts <= least)[:, None], float("inf")).fill_diagonal_(float("inf"))
        if not float(change.min()) < -floor:
            return counts
        a, b = divmod(int(change.argmin()), len(counts))
        counts[a] -= 1
        counts[b] += 1
