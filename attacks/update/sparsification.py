"""What is told of numbers that a defense left out of an update: by which rule, and whether others are as they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.view import ServerView

MANY_SENT, FAR_FROM_ZERO = 256, 30.0
"""Numbers of a tensor by which it is told whether its smallest were left out, and how many times as large as by chance
the smallest one sent must be for that."""

MOST_ROWS = 512
"""Rows of a matrix of which it is asked how many outer products make them."""


def are_smallest_left_out(sent: Sequence[Tensor]) -> bool:
    """Return whether the numbers that were sent of each tensor (n,) begin far from zero, as where small ones were not.

    Of n numbers that were sent by chance, the smallest is about their median over n. Tensors of few numbers don't tell.
    """
    sizes = [part.abs() for part in sent if len(part) >= MANY_SENT]
    far = [float(size.min()) > FAR_FROM_ZERO / len(size) * float(size.median()) for size in sizes]
    return sum(far) > len(far) / 2


def least_products(sent: Tensor, enough: int) -> int:
    """Return how many outer products it takes at least that zeros are where they are, none of which cancel.

    Two places, of which one's row and the other's column meet at a zero, belong to no one product: it would move
    that place, too. So there are as many products as there are places any two of which are so.

    Args:
        sent: which numbers of a matrix (m, n) are not zero.
        enough: so many products, of which one more is not exceeded.
    """
    most = sent[sent.sum(1).argsort()][:MOST_ROWS]
    counts, chosen = sent.sum(0), list[int]()  # a column for each row that was chosen
    rows = list[Tensor]()
    for row in most:
        free = row.clone()
        for other, column in zip(rows, chosen, strict=True):
            if bool(row[column]):
                free &= ~other
        if bool(free.any()):
            chosen.append(int(torch.where(free, counts, len(sent) + 1).argmin()))
            rows.append(row)
        if len(chosen) > enough:
            break
    return len(chosen)


def only_leaves_out(view: ServerView, names: Sequence[str]) -> bool:
    """Return whether a known defense leaves tensors' numbers out and changes none, as far as a probe tells.

    Args:
        view: of one client.
        names: of tensors of its update.
    """
    pairs = _probe(view, names)
    return pairs is not None and all(bool(((sent == 0) | (sent == probe)).all()) for probe, sent in pairs)


def leaves_out_at_random(view: ServerView, names: Sequence[str]) -> bool:
    """Return whether it does so whatever their sizes, and not the smallest, nor none.

    Args:
        view: of one client.
        names: of tensors of its update.
    """
    if not only_leaves_out(view, names):
        return False
    pairs = [(probe.abs()[sent == 0], probe.abs()[sent != 0]) for probe, sent in _probe(view, names) or ()]
    return all(len(left) and len(kept) and float(left.max()) > float(kept.min()) for left, kept in pairs)


def _probe(view: ServerView, names: Sequence[str]) -> list[tuple[Tensor, Tensor]] | None:
    """Return random numbers in place of tensors, and what a known defense sends of them; None where it takes none."""
    defense, draw, pairs = view.client.defense, stream(0, "left out"), []
    if view.parts or not all(name in view.update for name in names):
        return None
    for size in (1e-6, 1e6):  # below and above any limit
        probe: Tensors = {n: size * torch.randn(view.update[n].shape, generator=draw, dtype=view.dtype) for n in names}
        try:
            sent = defense.transform_update(probe, draw)
        except ValueError:  # numbers that it does not take
            return None
        pairs += [(dense(probe[name]), dense(value)) for name, value in sent.items()]
    return pairs
