"""Which reconstruction stands for which true image, and which images are equal: both are told here and nowhere else.

The order of a batch is not in its gradient, so reconstructions are matched to the truth before scoring. The match
minimizes the mean MSE over one-to-one assignments, and every metric is then taken in that order. Matching looks at the
truth; it belongs to scoring and no attack may call it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def assign(reconstruction: Tensor, truth: Tensor) -> list[int | None]:
    """Match a reconstruction to each true image by the Hungarian algorithm on MSE after clamping to [0, 1].

    Reconstructions with a pixel that is not finite match nothing. With fewer reconstructions than true images, the
    true images left over get None; with more, the reconstructions left over are unused (`score` records how many there
    were, because a choice among many is an advantage).

    Args:
        reconstruction: (N, C, H, W).
        truth: (M, C, H, W).

    Returns:
        M indices into the reconstructions, or None.

    Raises:
        ValueError: the images have different shapes.
    """
    if reconstruction.ndim != 4 or reconstruction.shape[1:] != truth.shape[1:]:
        raise ValueError(
            f"expected reconstructions (N, C, H, W) of the truth's shape {tuple(truth.shape[1:])}, "
            f"got {tuple(reconstruction.shape)}"
        )
    usable = reconstruction.isfinite().flatten(1).all(1).nonzero().flatten()
    matched: list[int | None] = [None] * len(truth)
    if len(usable) and len(truth):
        rows, columns = linear_sum_assignment(pairwise_mse(truth, reconstruction[usable]).cpu().numpy())
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            matched[row] = int(usable[column])
    return matched


def first_equal(images: Iterable[Tensor]) -> list[int]:
    """Return for each image (C, H, W) the place of the first one that equals it, its own where none before does."""
    met: dict[bytes, int] = {}
    keys = (hashlib.sha256(image.detach().double().cpu().numpy().tobytes()).digest() for image in images)
    return [met.setdefault(key, place) for place, key in enumerate(keys)]


def exchange_copies(
    matched: Sequence[int | None], truth: Tensor, recovered: Sequence[int], labels: Sequence[int]
) -> list[int | None]:
    """Return a match in which copies of one image have traded reconstructions so that most have their own label.

    Pixels leave open which of several equal images a reconstruction stands for, and no figure of them changes.

    Args:
        matched: of every true image, from `assign`.
        truth: (M, C, H, W).
        recovered: label of every reconstruction.
        labels: of every true image.
    """
    groups: dict[int, list[int]] = {}
    for i, first in enumerate(first_equal(truth)):
        groups.setdefault(first, []).append(i)
    found = list(matched)
    for group in groups.values():
        if len({labels[i] for i in group}) < 2:
            continue
        left = [matched[i] for i in group]
        unmatched = []
        for i in group:
            own = next((j for j in left if j is not None and recovered[j] == labels[i]), None)
            if own is None:
                unmatched.append(i)
            else:
                left.remove(own)
                found[i] = own
        for i, j in zip(unmatched, left, strict=True):
            found[i] = j
    return found


def pairwise_mse(a: Tensor, b: Tensor) -> Tensor:
    """Return MSE (N, M) float64 of every pair of `a` (N, ...) and `b` (M, ...) after clamping to [0, 1].

    Computed where `a` is, and left there.
    """
    flat = [x.detach().to(a.device, torch.float64).clamp(0, 1).flatten(1) for x in (a, b)]
    # the matrix-product form of cdist loses the small distances that matter most here
    distance = torch.cdist(flat[0], flat[1], compute_mode="donot_use_mm_for_euclid_dist")
    return distance.square() / flat[0].shape[1]
