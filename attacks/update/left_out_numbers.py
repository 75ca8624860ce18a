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


def are_smallest_left_out(sent: Sequence[Tensor]) -> bool:
    """Return whether the numbers that were sent of each tensor (n,) begin far from zero, as where small ones were not.

    Of n numbers that were sent by chance, the smallest is about their median over n. Tensors of few numbers don't tell.
    """
    sizes = [part.abs() for part in sent if len(part) >= MANY_SENT]
    far = [float(size.min()) > FAR_FROM_ZERO / len(size) * float(size.median()) for size in sizes]
    return sum(far) > len(far) / 2


def only_leaves_out(view: ServerView, names: Sequence[str]) -> bool:
    """Return whether a known defense leaves tensors' numbers out and changes none, as far as a probe tells.

    Args:
        view: of one client.
        names: of tensors of its update.
    """
    defense, draw = view.client.defense, stream(0, "left out")
    if view.parts or not all(name in view.update for name in names):
        return False
    for size in (1e-6, 1e6):  # below and above any limit
        probe: Tensors = {n: size * torch.randn(view.update[n].shape, generator=draw, dtype=view.dtype) for n in names}
        try:
            sent = defense.transform_update(probe, draw)
        except ValueError:  # numbers that it does not take
            return False
        for name, value in sent.items():
            left = dense(value)
            if not bool(((left == 0) | (left == dense(probe[name]))).all()):
                return False
    return True
