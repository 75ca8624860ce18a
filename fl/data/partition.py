"""Which client holds which image: splits that are the same on every machine, hashed, with overlaps counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl.data import Dataset
from fl.registry import Registry
from fl.seeds import derive, stream

partitions: Registry[Partitioner] = Registry("partition", "fl.data")

TRIPLES = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))
"""Dominant classes of HyperFL's clients for 10 classes; client i has group i % 5."""
CHARACTERS = (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62)))
"""For the 62 classes of EMNIST ByClass: digits, upper case, lower case."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The images of every client; compare two by their `digest`.

    Attributes:
        train: for each client, the ascending indices of its images in the training set (n,) int64.
        test: for each client, indices into the test set.
    """

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if len(self.train) != len(self.test):
            raise ValueError(f"expected train and test for every client, got {len(self.train)} and {len(self.test)}")

    def __len__(self) -> int:
        return len(self.train)

    @property
    def digest(self) -> str:
        """SHA-256 of the index lists, in hexadecimal: equal for equal partitions on every machine."""
        lists = [[index.tolist() for index in part] for part in (self.train, self.test)]
        return hashlib.sha256(json.dumps(lists, separators=(",", ":")).encode()).hexdigest()

    @property
    def overlap(self) -> dict[str, int]:
        """How many training and test images more than one client holds: `{"train": 0, "test": 0}` if disjoint."""
        return {name: _shared(part) for name, part in (("train", self.train), ("test", self.test))}


def _shared(part: Sequence[Tensor]) -> int:
    owners = torch.cat(tuple(part)).unique(return_counts=True)[1]
    return int((owners > 1).sum())


class Partitioner:
    """Settings of a partition; a subclass says who gets what."""

    registry: ClassVar[Registry[Partitioner]] = partitions

    def __call__(self, dataset: Dataset) -> Partition:
        """The partition of `dataset`."""
        raise NotImplementedError


@partitions.register("iid")
@dataclass(frozen=True, kw_only=True)
class Iid(Partitioner):
    """Every client's images are drawn alike, without replacement.

    Attributes:
        clients: how many.
        train_size: training images per client; None shares out all of them.
        test_size: test images per client; None shares out all of them.
        seed: of the shuffle.
    """

    clients: int = 20
    train_size: int | None = None
    test_size: int | None = None
    seed: int = 0

    def __call__(self, dataset: Dataset) -> Partition:
        """The partition of `dataset`.

        Raises:
            ValueError: there are too few images; says how many each client can have.
        """
        sizes = (("train", dataset.train, self.train_size), ("test", dataset.test, self.test_size))
        train, test = (
            iid(len(part), clients=self.clients, size=size, seed=derive(self.seed, key)) for key, part, size in sizes
        )
        return Partition(train, test)


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
        seed: of the shuffle within each class.
    """

    clients: int = 20
    groups: tuple[tuple[int, ...], ...] = ()
    share: float = 0.2
    train_size: int = 600
    test_size: int = 300
    disjoint: bool = True
    seed: int = 0

    def __call__(self, dataset: Dataset) -> Partition:
        """The partition of `dataset`.

        Raises:
            ValueError: a class has too few images (says which size fits), or the groups don't fit the classes.
        """
        num_classes = dataset.num_classes
        groups = self.groups or published_groups(num_classes)
        train, test = (
            dominant_groups(
                part.labels,
                num_classes=num_classes,
                groups=groups,
                clients=self.clients,
                size=size,
                share=self.share,
                disjoint=self.disjoint,
                seed=derive(self.seed, key),
                what=f"{key}_size",
            )
            for key, part, size in (("train", dataset.train, self.train_size), ("test", dataset.test, self.test_size))
        )
        return Partition(train, test)

    @classmethod
    def example(cls) -> DominantGroups:
        """Two clients and two classes."""
        return cls(clients=2, groups=((0,), (1,)), train_size=8, test_size=4)


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


def iid(count: int, *, clients: int, size: int | None, seed: int) -> tuple[Tensor, ...]:
    """`count` images dealt at random: `size` to each client, or all of them, as evenly as can be.

    Raises:
        ValueError: there are too few images; says how many each client can have.
    """
    _check_clients(clients)
    largest = count // clients
    if largest < 1 or (size is not None and not 1 <= size <= largest):
        raise ValueError(f"expected 1 to {largest} images for each of {clients} clients, got {size or count}")
    shuffled = torch.randperm(count, generator=stream(seed, "iid"))
    parts = shuffled[: size * clients].chunk(clients) if size is not None else shuffled.tensor_split(clients)
    return tuple(part.sort(stable=True).values for part in parts)


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
    _check_clients(clients)
    _check_groups(groups, num_classes, share)
    if size < 1:
        raise ValueError(f"expected {what} >= 1, got {size}")
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


def _check_clients(clients: int) -> None:
    if clients < 1:
        raise ValueError(f"expected at least 1 client, got {clients}")


def _check_groups(groups: Sequence[Sequence[int]], num_classes: int, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"expected share in [0, 1], got {share}")
    for group in groups:
        if not group or len(set(group)) < len(group) or not all(0 <= k < num_classes for k in group):
            raise ValueError(f"expected groups of different classes in [0, {num_classes}), got {tuple(group)}")
    if not groups:
        raise ValueError("expected at least one group of dominant classes, got none")
