"""Whole numbers of images per class that a gradient speaks for."""

from __future__ import annotations

import torch
from torch import Tensor


def surprise(counts: Tensor) -> float:
    """Minus twice the logarithm of a multinomial's chance of `counts` (K,), all classes alike, up to a constant."""
    return 2 * float(torch.lgamma(counts + 1).sum())


def nearest(signals: Tensor, target: Tensor, images: int, least: Tensor, doubt: float = 0.0) -> Tensor:
    """The likeliest whole counts >= `least` (K,), `images` in all, if `signals` (M, K) times them is about `target`.

    Likeliest if entries of the target (M,) are off by normal noise of variance `doubt`, and images of every class with
    equal chance: the squared distance and `doubt` times `surprise` are least together. Without doubt it is the nearest.
    Images are given out one by one where they help most, then moved between classes as long as that helps.

    Args:
        signals: what one image of each class adds to the target.
        target: the sum over all images.
        images: how many.
        least: whole numbers that add up to no more.
        doubt: in squared units of the target.
    """
    gram, reach = signals.mT @ signals, signals.mT @ target
    own, counts = gram.diagonal(), least.clone()
    while counts.sum() < images:
        counts[(2 * (gram @ counts - reach) + own + 2 * doubt * counts.log1p()).argmin()] += 1
    pairs = own + own[:, None] - 2 * gram
    floor = 1e-9 * float(target @ target)
    while True:
        slope = 2 * (gram @ counts - reach)
        rarer = 2 * doubt * (counts.log1p() - counts.clamp_min(1).log()[:, None])
        change = (slope - slope[:, None] + pairs + rarer).masked_fill((counts <= least)[:, None], float("inf"))
        if not float(change.min()) < -floor:
            return counts
        a, b = divmod(int(change.argmin()), len(counts))
        counts[a] -= 1
        counts[b] += 1
