"""HyperFL's split: a share of each client's images comes from all classes, the rest from dominant ones.

Images are dealt as the paper says, or sliced as the authors' code does: in file order, some to several clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl.data import Dataset
from fl.data.partitions.partition import Partition, Partitioner, partitions
from fl.ranges import Count, CountFrom0, Seed, Share
from fl.seeds import derive_seed, stream

TRIPLES = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))
"""Dominant classes of HyperFL's clients for 10 classes; client i has group i % 5."""
CHARACTER_GROUPS = (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62)))
"""For the 62 classes of EMNIST ByClass: digits, upper case, lower case."""
OFFSETS = {"cifar10": (2000, 500), "cinic10": (2000, 500)}
"""Where the first slice of a class starts in the training and the test set; at 0 for every other data set."""


def published_groups(num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Return HyperFL's dominant classes.

    Raises:
        ValueError: there are none for this number of classes.
    """
    if num_classes == 10:
        return TRIPLES
    if num_classes == 62:
        return CHARACTER_GROUPS
    raise ValueError(f"expected groups for {num_classes} classes, e.g. ((0,), (1,)): published for 10 and 62 only")


@partitions.register("dominant")
@dataclass(frozen=True, kw_only=True)
class DominantGroups(Partitioner):
    """HyperFL's split: a share of each client's images from all classes alike, the rest from its dominant ones.

    Attributes:
        clients: how many; client i has group i modulo the number of groups.
        groups: dominant classes; `()` takes the published ones for 10 and for 62 classes.
        share: part of a client's images spread over all classes.
        train_size: training images per client.
        test_size: test images per client.
        disjoint: no image goes to two clients; otherwise the images of a class that runs out are dealt again.
        compat: slice as the authors' code does, in file order and wrapping, from image 2000 (test: 500) of every class
            of CIFAR-10 and CINIC-10; `disjoint` and `seed` then have no effect.
        seed: of the shuffle within each class.
    """

    clients: Count = 20
    groups: tuple[tuple[CountFrom0, ...], ...] = ()
    share: Share = 0.2
    train_size: Count = 600
    test_size: Count = 300
    disjoint: bool = True
    compat: bool = False
    seed: Seed = 0

    def __call__(self, dataset: Dataset) -> Partition:
        """Return the partition of `dataset`.

        Raises:
            ValueError: a class has too few images (says which size fits), or the groups don't fit the classes.
        """
        parts = ((dataset.train, self.train_size, "train"), (dataset.test, self.test_size, "test"))
        train, test = (self._deal(dataset, part.labels, size, key) for part, size, key in parts)
        return Partition(train, test)

    def _deal(self, dataset: Dataset, labels: Tensor, size: int, key: str) -> tuple[Tensor, ...]:
        split = DominantSplit(
            num_classes=dataset.num_classes,
            groups=self.groups or published_groups(dataset.num_classes),
            clients=self.clients,
            size=size,
            share=self.share,
            size_name=f"{key}_size",
        )
        if self.compat:
            offset = OFFSETS.get(dataset.name, (0, 0))[key == "test"]
            # 62 classes: the authors' code for EMNIST counts on without the remainder
            return sequential_slices(labels, split, offset=offset, rewind=dataset.num_classes == 62)
        return dominant_groups(labels, split, disjoint=self.disjoint, seed=derive_seed(self.seed, key))

    @classmethod
    def example(cls) -> DominantGroups:
        """Return a split of two clients and two classes."""
        return cls(clients=2, groups=((0,), (1,)), train_size=8, test_size=4)


@dataclass(frozen=True, kw_only=True)
class DominantSplit:
    """How many images of each class each client gets: a share of them over all classes, the rest of dominant ones.

    Attributes:
        num_classes: K.
        groups: dominant classes, each in [0, K); client i has group i modulo their number.
        clients: how many, at least 1.
        size: images per client, at least 1.
        share: part of a client's images that is spread over all classes, in [0, 1].
        size_name: what `size` is called in messages.

    Raises:
        ValueError: settings that describe no split; says which, and what was expected.
    """

    num_classes: int
    groups: Sequence[Sequence[int]]
    clients: int
    size: int
    share: float = 0.2
    size_name: str = "size"

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"expected at least 1 client, got {self.clients}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"expected share in [0, 1], got {self.share}")
        for group in self.groups:
            if not group or len(set(group)) < len(group) or not all(0 <= k < self.num_classes for k in group):
                raise ValueError(f"expected groups of different classes in [0, {self.num_classes}), got {tuple(group)}")
        if not self.groups:
            raise ValueError("expected at least one group of dominant classes, got none")
        if self.size < 1:
            raise ValueError(f"expected {self.size_name} >= 1, got {self.size}")

    def class_counts(self) -> NDArray[np.int64]:
        """Return how many images of each class each client gets (clients, K); every row sums to `size`.

        What doesn't divide evenly is dealt in turn: neither the even part nor a group asks a class for more than one
        image beyond its exact part.
        """
        uniform = round(self.share * self.size)
        counts = np.zeros((self.clients, self.num_classes), dtype=np.int64)
        turns = dict.fromkeys([-1, *range(len(self.groups))], 0)
        for client in range(self.clients):
            number = client % len(self.groups)
            for key, classes, total in (
                (-1, range(self.num_classes), uniform),
                (number, self.groups[number], self.size - uniform),
            ):
                each, left = divmod(total, len(classes))
                counts[client, list(classes)] += each
                for _ in range(left):
                    counts[client, classes[turns[key] % len(classes)]] += 1
                    turns[key] += 1
        return counts


def dominant_groups(
    labels: Tensor, split: DominantSplit, *, disjoint: bool = True, seed: int = 0
) -> tuple[Tensor, ...]:
    """Deal images class by class in slices, as many as the split says.

    Args:
        labels: (N,) int64 in [0, K).
        split: how many images of each class each client gets.
        disjoint: refuse to give an image to two clients.
        seed: of the shuffle within each class.

    Returns:
        Each client's indices into `labels` (`split.size`,), ascending.

    Raises:
        ValueError: a class has too few images; says the largest size that fits.
    """
    have = torch.bincount(labels, minlength=split.num_classes).numpy()
    need = split.class_counts()
    short = need.sum(0) > have if disjoint else need.max(0) > have
    if short.any():
        raise ValueError(_too_few_images_error(have, split, disjoint))
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


def _too_few_images_error(have: NDArray[np.int64], split: DominantSplit, disjoint: bool) -> str:
    """Return which class has too few of the images (K,) there are, and the largest size that fits."""

    def asked(size: int) -> NDArray[np.int64]:
        counts = replace(split, size=size).class_counts()
        total: NDArray[np.int64] = counts.sum(0) if disjoint else counts.max(0)
        return total

    wanted = asked(split.size)
    worst = int((wanted - have).argmax())
    low, high = 0, split.size  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (asked(middle) <= have).all() else (low, middle)
    # rounding makes the need rise unevenly: a few sizes above the first that fails may fit again
    near = range(low, min(low + 2 * len(have), split.size))
    largest = max(n for n in near if n == low or (asked(n) <= have).all())
    share_out = "; or disjoint=False, which lets clients share images" if disjoint else ""
    return (
        f"expected {split.size_name} of at most {largest} for {split.clients} clients, got {split.size}: class {worst} "
        f"has {have[worst]} images and {wanted[worst]} are needed{share_out}"
    )


# ---- slices in file order, as the authors' code takes them -----------------------------------------------------------
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
