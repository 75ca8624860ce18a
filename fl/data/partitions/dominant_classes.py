"""The arithmetic of HyperFL's split: a share of each client's images from all classes, the rest from dominant ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl.seeds import stream

TRIPLES = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))
"""Dominant classes of HyperFL's clients for 10 classes; client i has group i % 5."""
CHARACTERS = (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62)))
"""For the 62 classes of EMNIST ByClass: digits, upper case, lower case."""


def published_groups(num_classes: int) -> tuple[tuple[int, ...], ...]:
    """HyperFL's dominant classes.

    Raises:
        ValueError: there are none for this number of classes.
    """
    if num_classes == 10:
        return TRIPLES
    if num_classes == 62:
        return CHARACTERS
    raise ValueError(f"expected groups for {num_classes} classes, e.g. ((0,), (1,)): published for 10 and 62 only")


def dominant_groups(
    labels: Tensor,
    *,
    num_classes: int,
    groups: Sequence[Sequence[int]],
    clients: int,
    size: int,
    share: float = 0.2,
    disjoint: bool = True,
    seed: int = 0,
    what: str = "size",
) -> tuple[Tensor, ...]:
    """Images dealt class by class in slices: `size` to each client, `share` of them over all classes.

    Args:
        labels: (N,) int64 in [0, num_classes).
        num_classes: K.
        groups: dominant classes; client i has group i modulo their number.
        clients: how many.
        size: images per client.
        share: part spread over all classes.
        disjoint: refuse to give an image to two clients.
        seed: of the shuffle within each class.
        what: name of `size` in messages.

    Raises:
        ValueError: a class has too few images; says the largest size that fits.
    """
    check(groups, num_classes, clients, size, share, what)
    have = torch.bincount(labels, minlength=num_classes).numpy()
    need = class_counts(num_classes=num_classes, groups=groups, clients=clients, size=size, share=share)
    short = need.sum(0) > have if disjoint else need.max(0) > have
    if short.any():
        raise ValueError(_too_few(have, need, groups, size, share, disjoint, what))
    order = labels.argsort(stable=True)
    pools = [
        pool[torch.randperm(len(pool), generator=stream(seed, "class", k))]
        for k, pool in enumerate(order.split(have.tolist()))
    ]
    starts = need.cumsum(0) - need
    result = []
    for row, begin in zip(need.tolist(), starts.tolist(), strict=True):
        taken = [
            pool[torch.arange(b, b + n) % len(pool)] for pool, n, b in zip(pools, row, begin, strict=True) if n > 0
        ]
        result.append(torch.cat(taken).sort(stable=True).values)
    return tuple(result)


def class_counts(
    *, num_classes: int, groups: Sequence[Sequence[int]], clients: int, size: int, share: float
) -> NDArray[np.int64]:
    """How many images of each class each client gets (clients, K); every row sums to `size`.

    What doesn't divide evenly is dealt in turn: neither the even part nor a group asks a class for more than one image
    beyond its exact part.
    """
    uniform = round(share * size)
    counts = np.zeros((clients, num_classes), dtype=np.int64)
    turns = dict.fromkeys([-1, *range(len(groups))], 0)
    for client in range(clients):
        number = client % len(groups)
        for key, classes, total in (
            (-1, range(num_classes), uniform),
            (number, groups[number], size - uniform),
        ):
            each, left = divmod(total, len(classes))
            counts[client, list(classes)] += each
            for _ in range(left):
                counts[client, classes[turns[key] % len(classes)]] += 1
                turns[key] += 1
    return counts


def check(
    groups: Sequence[Sequence[int]], num_classes: int, clients: int, size: int, share: float, what: str = "size"
) -> None:
    """Refuse settings that describe no split.

    Raises:
        ValueError: says which setting, and what was expected.
    """
    if clients < 1:
        raise ValueError(f"expected at least 1 client, got {clients}")
    if not 0 <= share <= 1:
        raise ValueError(f"expected share in [0, 1], got {share}")
    for group in groups:
        if not group or len(set(group)) < len(group) or not all(0 <= k < num_classes for k in group):
            raise ValueError(f"expected groups of different classes in [0, {num_classes}), got {tuple(group)}")
    if not groups:
        raise ValueError("expected at least one group of dominant classes, got none")
    if size < 1:
        raise ValueError(f"expected {what} >= 1, got {size}")


def _too_few(
    have: NDArray[np.int64],
    need: NDArray[np.int64],
    groups: Sequence[Sequence[int]],
    size: int,
    share: float,
    disjoint: bool,
    what: str,
) -> str:
    def asked(n: int) -> NDArray[np.int64]:
        counts = class_counts(num_classes=len(have), groups=groups, clients=len(need), size=n, share=share)
        total: NDArray[np.int64] = counts.sum(0) if disjoint else counts.max(0)
        return total

    wanted = asked(size)
    worst = int((wanted - have).argmax())
    low, high = 0, size  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (asked(middle) <= have).all() else (low, middle)
    # rounding makes the need rise unevenly: a few sizes above the first that fails may fit again
    near = range(low, min(low + 2 * len(have), size))
    largest = max(n for n in near if n == low or (asked(n) <= have).all())
    share_out = "; or disjoint=False, which lets clients share images" if disjoint else ""
    return (
        f"expected {what} of at most {largest} for {len(need)} clients, got {size}: class {worst} has {have[worst]} "
        f"images and {wanted[worst]} are needed{share_out}"
    )
