"""Label counts by trying all of them."""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch


def best_counts(bias: torch.Tensor, predictions: torch.Tensor, images: int) -> torch.Tensor:
    """The counts (K,) of `images` labels whose sum of p_c - e_c, over images, is nearest to the bias gradient (K,)."""
    classes = len(bias)
    found, least = torch.zeros(classes), float("inf")
    for labels in combinations_with_replacement(range(classes), images):
        total = torch.zeros_like(bias)
        for label in labels:
            total += predictions[label] / images
            total[label] -= 1 / images
        distance = float((total - bias).square().sum())
        if distance < least:
            found, least = torch.bincount(torch.tensor(labels), minlength=classes), distance
    return found
