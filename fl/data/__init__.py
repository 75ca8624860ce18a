"""Data sets, by name: `load("faces")`, `load("cifar10", limit=1000)`, `load("npz", train="mine.npz")`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl.registry import Registry
from fl.seeds import stream
from fl.types import Batch

datasets: Registry[Source] = Registry("dataset", "fl.data")


@dataclass(frozen=True)
class Groups:
    """Which group every image belongs to: its domain (photo, sketch, ...), say.

    Attributes:
        train: of the training images (N,) int64.
        test: of the test images, likewise.
        names: one for each group.
    """

    train: Tensor
    test: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """Labeled images for training and testing.

    Attributes:
        train: inputs (N, C, H, W) float32 in [0, 1], labels (N,) int64.
        test: likewise.
        name: of the data set.
        class_names: one for each label.
        source: where the images come from, for reports.
        groups: of the images, where the data set has any; partitions may go by them.
    """

    train: Batch
    test: Batch
    name: str
    class_names: tuple[str, ...]
    source: str
    groups: Groups | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images."""
        channels, height, width = self.train.inputs.shape[1:]
        return channels, height, width


class Source:
    """Settings of a data set; a subclass says how it is read."""

    registry: ClassVar[Registry[Source]] = datasets

    def load(self) -> Dataset:
        """Read the images."""
        raise ValueError(f"{type(self).__name__} does not say how its images are read: define load()")


def build(spec: str | Mapping[str, Any] | Source) -> Source:
    """Return where a data set's images come from: by a name, or by `{"name": name, setting: value, ...}`.

    Raises:
        UnknownNameError: unknown data set or setting; says what is close.
    """
    return datasets.build(spec)


def load(name: str, **settings: Any) -> Dataset:
    """Return the data set `name`.

    Raises:
        UnknownNameError: unknown data set or setting; says what is close.
        DatasetMissingError: its file is not there; says where it was looked for and how to get it.
    """
    return datasets.build({"name": name, **settings}).load()


def stratified_split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return indices of a training and a test part that hold the same share of every class, each in random order.

    Raises:
        ValueError: `share` is not in (0, 1), or leaves a class out of a part.
    """
    if not 0 < share < 1:
        raise ValueError(f"expected test_share in (0, 1), got {share}")
    train, test = [], []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=stream(seed, "split", label))]
        count = round(share * len(members))
        if not 0 < count < len(members):
            raise ValueError(
                f"expected images of class {label} on both sides, got {count} of {len(members)} for test: take another "
                "test_share, more images of that class, or a test file"
            )
        test.append(members[:count])
        train.append(members[count:])
    parts = (torch.cat(train), torch.cat(test))
    first, second = (p[torch.randperm(len(p), generator=stream(seed, "order", i))] for i, p in enumerate(parts))
    return first, second
