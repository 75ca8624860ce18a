"""Which client holds which image: splits that are the same on every machine, hashed, saved, with overlaps counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl.data import Dataset
from fl.ranges import Count, Seed
from fl.registry import Registry
from fl.runtime.atomic_files import atomic_write
from fl.runtime.safe_paths import require_regular_file
from fl.seeds import derive_seed, stream

partitions: Registry[Partitioner] = Registry("partition", "fl.data")


@dataclass(frozen=True, eq=False)
class Partition:
    """The images of every client; compare two by their `digest`.

    Attributes:
        train: for each client, the ascending indices of its images in the training set (n,) int64.
        test: for each client, indices into the test set.

    Raises:
        ValueError: either is no sequence of clients, or they are of different length.
    """

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            clients: object = getattr(self, part)
            if isinstance(clients, Iterator):
                object.__setattr__(self, part, tuple(clients))
            elif isinstance(clients, Mapping | Set | str | bytes) or not hasattr(clients, "__len__"):
                kind = type(clients).__name__
                raise ValueError(f"expected {part} as a tuple with the indices of every client's images, got {kind}")
        if len(self.train) != len(self.test):
            raise ValueError(f"expected train and test for every client, got {len(self.train)} and {len(self.test)}")

    def __len__(self) -> int:
        return len(self.train)

    @property
    def digest(self) -> str:
        """SHA-256 of the index lists, in hexadecimal: equal for equal partitions on every machine."""
        return hashlib.sha256(json.dumps(self._lists(), separators=(",", ":")).encode()).hexdigest()

    @property
    def overlap(self) -> dict[str, int]:
        """How many training and test images more than one client holds: `{"train": 0, "test": 0}` if disjoint.

        `fl.data.partitions.overlap.describe_partition` says which clients, and what else they hold.
        """
        return {name: _count_shared(part) for name, part in (("train", self.train), ("test", self.test))}

    def save(self, path: Path, dataset: Dataset, about: Mapping[str, Any] | None = None) -> None:
        """Write the index lists as JSON, whole or not at all, with their digest and what tells `dataset` apart.

        Args:
            path: of the file.
            dataset: that is split.
            about: what else to write, for readers; `load` pays no attention to it.
        """
        train, test = self._lists()
        content = {**(about or {}), "digest": self.digest, **_identity(dataset), "train": train, "test": test}
        with atomic_write(Path(path)) as file:
            file.write(json.dumps(content, separators=(",", ":")).encode() + b"\n")

    @classmethod
    def load(cls, path: Path, dataset: Dataset) -> Partition:
        """Return the partition that `save` wrote.

        Raises:
            ValueError: the file is damaged, or belongs to a data set of other sizes or labels.
        """
        try:
            content = json.loads(require_regular_file(Path(path)).read_text(encoding="utf-8"))
            train, test = (tuple(_index_tensor(row) for row in content[key]) for key in ("train", "test"))
            result, digest = cls(train, test), content["digest"]
            found = {key: content[key] for key in _identity(dataset)}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"expected a partition as Partition.save writes it, got {path}: {error!r}") from error
        if result.digest != digest:
            raise ValueError(f"expected a partition with digest {digest}, got {result.digest}: {path} is damaged")
        for key, value in _identity(dataset).items():
            if found[key] != value:
                raise ValueError(f"expected a partition of {key} {value} in {path}, got one of {found[key]}")
        return result

    def _lists(self) -> list[list[list[int]]]:
        return [[index.tolist() for index in part] for part in (self.train, self.test)]


def _identity(dataset: Dataset) -> dict[str, Any]:
    groups = dataset.groups
    found = {
        "train_size": len(dataset.train),
        "test_size": len(dataset.test),
        "labels": _hash(dataset.train.labels, dataset.test.labels),
    }
    return found if groups is None else found | {"groups": _hash(groups.train, groups.test)}


def _hash(*parts: Tensor) -> str:
    return hashlib.sha256(torch.cat(parts).cpu().numpy().astype("<i8").tobytes()).hexdigest()


def _index_tensor(row: object) -> Tensor:
    if not isinstance(row, list) or not all(type(number) is int and 0 <= number < 2**48 for number in row):
        raise ValueError("expected lists of image numbers")
    return torch.tensor(row, dtype=torch.int64)


def _count_shared(part: Sequence[Tensor]) -> int:
    owners = torch.cat(tuple(part)).unique(return_counts=True)[1]
    return int((owners > 1).sum())


class Partitioner:
    """Settings of a partition; a subclass says who gets what."""

    registry: ClassVar[Registry[Partitioner]] = partitions

    def __call__(self, dataset: Dataset) -> Partition:
        """Return the partition of `dataset`."""
        raise NotImplementedError


@partitions.register("iid")
@dataclass(frozen=True, kw_only=True)
class Iid(Partitioner):
    """Every client's images are drawn alike, without replacement (McMahan et al., 2017, "IID").

    Attributes:
        clients: how many.
        train_size: training images per client; None shares out all of them.
        test_size: test images per client; None shares out all of them.
        seed: of the shuffle.
    """

    clients: Count = 20
    train_size: Count | None = None
    test_size: Count | None = None
    seed: Seed = 0

    def __call__(self, dataset: Dataset) -> Partition:
        """Return the partition of `dataset`.

        Raises:
            ValueError: there are too few images; says how many each client can have.
        """
        sizes = (
            ("train", "training image", dataset.train, self.train_size),
            ("test", "test image", dataset.test, self.test_size),
        )
        train, test = (
            deal_iid(len(part), clients=self.clients, size=size, seed=derive_seed(self.seed, key), kind=kind)
            for key, kind, part, size in sizes
        )
        return Partition(train, test)


def deal_iid(count: int, *, clients: int, size: int | None, seed: int, kind: str = "image") -> tuple[Tensor, ...]:
    """Deal `count` images at random: `size` to each client, or all of them, as evenly as can be.

    Args:
        count: of all images.
        clients: how many.
        size: of each client's part; None shares out all of them.
        seed: of the shuffle.
        kind: of image, for messages.

    Raises:
        ValueError: there are too few images; says how many each client can have.
    """
    if clients < 1:
        raise ValueError(f"expected at least 1 client, got {clients}")
    largest = count // clients
    if largest < 1:
        raise ValueError(
            f"expected one {kind} for each of {clients} clients, got {count}: take fewer clients or more {kind}s"
        )
    if size is not None and not 1 <= size <= largest:
        raise ValueError(f"expected 1 to {largest} {kind}s for each of {clients} clients, got {size}")
    shuffled = torch.randperm(count, generator=stream(seed, "iid"))
    parts = shuffled[: size * clients].chunk(clients) if size is not None else shuffled.tensor_split(clients)
    return tuple(part.sort(stable=True).values for part in parts)
