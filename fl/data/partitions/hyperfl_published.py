"""HyperFL's split as its authors' code slices it: in file order, wrapping, with images that several clients hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl.data.partitions.dominant_classes import DominantSplit

OFFSETS = {"cifar10": (2000, 500), "cinic10": (2000, 500)}
"""Where the first slice of a class starts in the training and the test set; at 0 for every other data set."""


def sequential_slices(
    labels: Tensor, split: DominantSplit, *, offset: int = 0, rewind: bool = False
) -> tuple[Tensor, ...]:
    """Return each client's next slice of every class, then of each of its dominant classes.

    A class that runs out starts anew.

    The authors sort with numpy's default `argsort`, whose order of ties depends on the processor; this sort is stable.
    They take all classes of MNIST and CIFAR to be equally large (those that they use are); here each has its own size.

    Args:
        labels: (N,) int64 in [0, K).
        split: whose settings they are; what does not divide evenly goes to the last class of each part here.
        offset: where the first slice of every class starts.
        rewind: after a dominant slice, go on where it would end without its remainder, as the code for EMNIST does: the
            next client gets the remainder again.

    Returns:
        Each client's indices into `labels` (`split.size`,), ascending.

    Raises:
        ValueError: a class has fewer images than one client takes, or a client would hold an image twice.
    """
    have = torch.bincount(labels, minlength=split.num_classes)
    pools = labels.argsort(stable=True).split(have.tolist())
    used = [offset] * split.num_classes
    uniform = int(split.size * split.share)
    every = range(split.num_classes)
    result = []
    for client in range(split.clients):
        group = split.groups[client % len(split.groups)]
        taken = []
        for classes, total, again in (
            (every, uniform, False),
            (group, split.size - uniform, rewind),
        ):
            each, left = divmod(total, len(classes))
            for k in classes:
                count = each + left * (k == classes[-1])
                if used[k] + count > len(pools[k]):
                    used[k] = 0
                taken.append(_slice(pools[k], used[k], count, k, split.size_name))
                used[k] += each if again else count
        result.append(_check_ascending(taken, client, split.size_name))
    return tuple(result)


def _slice(pool: Tensor, start: int, count: int, label: int, what: str) -> Tensor:
    if count > len(pool):
        raise ValueError(
            f"expected a smaller {what}: class {label} has {len(pool)} images and one client's slice is {count}"
        )
    return pool[start : start + count]


def _check_ascending(taken: Sequence[Tensor], client: int, what: str) -> Tensor:
    index = torch.cat(tuple(taken)).sort(stable=True).values
    if twice := int((index.diff() == 0).sum()):
        raise ValueError(f"expected a smaller {what}: client {client} would hold {twice} of its images twice")
    return index
