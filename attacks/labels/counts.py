"""Whole numbers of images per class that a gradient speaks for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_ODDS_OF_ANY_COUNTS = -12.0
"""Logarithm of the odds that a client's classes come in any numbers. Without it clients of two classes lost half of
their labels; from -10 to -15 batches of all classes and of few come out alike, with more those of all get worse."""


def prior_deviance(counts: Tensor) -> float:
    """Minus twice the logarithm of the chance of `counts` (K,).

    Images are of every class with equal chance, or, far less likely, of classes in any numbers: a client may
    have few, and then nothing is held against it but that.
    """
    return -2 * float(torch.logaddexp(_log_multinomial(counts), _log_any_counts(counts)))


def _log_multinomial(counts: Tensor) -> Tensor:
    """Logarithm of a multinomial's chance of `counts` (K,), all classes alike."""
    images = counts.sum()
    return torch.lgamma(images + 1) - torch.lgamma(counts + 1).sum() - images * math.log(len(counts))


def _log_any_counts(counts: Tensor) -> Tensor:
    """Logarithm of the chance that all `counts` (K,) of their sum are as likely, times that chance of these."""
    images, classes = counts.sum(), torch.tensor(float(len(counts))).to(counts)
    return LOG_ODDS_OF_ANY_COUNTS + torch.lgamma(images + 1) + torch.lgamma(classes) - torch.lgamma(images + classes)


def map_counts(signals: Tensor, target: Tensor, images: int, least: Tensor, doubt: float = 0.0) -> Tensor:
    """The likeliest whole counts >= `least` (K,), `images` in all, if `signals` (M, K) times them is about `target`.

    Likeliest if entries of the target (M,) are off by normal noise of variance `doubt`, and the counts are as
    `prior_deviance` has them: the squared distance and `doubt` times it are least together.
    Images are given out one by one where they help most, then moved between classes as long as that helps: once as if
    there were no doubt, once as if classes were alike, of which the likelier one is taken.

    Args:
        signals: what one image of each class adds to the target.
        target: the sum over all images.
        images: how many.
        least: whole numbers that add up to no more.
        doubt: in squared units of the target.
    """
    found = [
        _refine_counts(signals, target, _greedy_counts(signals, target, images, least, d), least, doubt)
        for d in {0.0, doubt}
    ]
    return min(
        found, key=lambda counts: float((signals @ counts - target).square().sum()) + doubt * prior_deviance(counts)
    )


def _greedy_counts(signals: Tensor, target: Tensor, images: int, least: Tensor, doubt: float) -> Tensor:
    """Counts (K,) as images are given out one by one."""
    gram, reach = signals.mT @ signals, signals.mT @ target
    counts = least.clone()
    while counts.sum() < images:
        counts[(2 * (gram @ counts - reach) + gram.diagonal() + 2 * doubt * counts.log1p()).argmin()] += 1
    return counts


def _refine_counts(signals: Tensor, target: Tensor, counts: Tensor, least: Tensor, doubt: float) -> Tensor:
    """Counts (K,) with images moved between classes one by one as long as that helps."""
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
