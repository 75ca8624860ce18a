"""Data sets in `.npz` files: `images` uint8 [N, H, W, C], `labels` [N], `class_names` [K]."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fl.data import Dataset, Source, datasets, stratified
from fl.types import Batch

VARIABLE = "HYPERLEAK_DATA"
KEYS = ("images", "labels", "class_names")


class DatasetMissingError(FileNotFoundError):
    """A data file is not where it was looked for; the message says how to get it."""


@dataclass(frozen=True, kw_only=True)
class _Stored(Source):
    """Settings of any stored data set.

    Attributes:
        limit: keep the first so many training images (the files' rows are in random order); None keeps all.
        test_limit: likewise for the test images.
    """

    limit: int | None = None
    test_limit: int | None = None

    def __post_init__(self) -> None:
        for key in ("limit", "test_limit"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"expected {key} >= 1 or None, got {value}")

    def _dataset(self, name: str, train: Batch, test: Batch, class_names: tuple[str, ...], source: str) -> Dataset:
        train, test = (_first(part, n) for part, n in ((train, self.limit), (test, self.test_limit)))
        return Dataset(train, test, name, class_names, source)


@datasets.register("npz")
@dataclass(frozen=True, kw_only=True)
class Npz(_Stored):
    """Your own files.

    Attributes:
        train: path of the training images, or NAME for `NAME_train.npz` and `NAME_test.npz` in `$HYPERLEAK_DATA`.
        test: path of the test images; None holds out a share of the training file.
        test_share: that share, of every class.
        seed: of that split.
    """

    train: str
    test: str | None = None
    test_share: float = 0.2
    seed: int = 0

    def load(self) -> Dataset:
        """Read the files.

        Raises:
            DatasetMissingError: a file is not there.
            ValueError: a file does not hold what it should; says which key.
        """
        if self.test is None and not self.train.endswith(".npz"):
            return _pair(self, self.train)
        path = _find(self.train)
        train, class_names = read(path)
        if self.test is None:
            parts = stratified(train.labels, self.test_share, self.seed)
            train, test = (train.take(index) for index in parts)
        else:
            test, others = read(_find(self.test))
            _check_alike(train, test, class_names, others, self.test)
        return self._dataset(path.stem, train, test, class_names, path.name)

    @classmethod
    def example(cls) -> Npz:
        """A file made by `save`."""
        return cls(train="mine.npz")


@dataclass(frozen=True, kw_only=True)
class _Named(_Stored):
    stem: ClassVar[str]

    def load(self) -> Dataset:
        """Read `STEM_train.npz` and `STEM_test.npz` in `$HYPERLEAK_DATA`.

        Raises:
            DatasetMissingError: a file is not there.
            ValueError: a file does not hold what it should; says which key.
        """
        return _pair(self, self.stem)


@datasets.register("cifar10")
@dataclass(frozen=True, kw_only=True)
class Cifar10(_Named):
    """CIFAR-10 (Krizhevsky, 2009): 32x32 colour, 10 classes."""

    stem: ClassVar[str] = "cifar10"


@datasets.register("cifar100")
@dataclass(frozen=True, kw_only=True)
class Cifar100(_Named):
    """CIFAR-100 (Krizhevsky, 2009): 32x32 colour, 100 classes."""

    stem: ClassVar[str] = "cifar100"


@datasets.register("mnist")
@dataclass(frozen=True, kw_only=True)
class Mnist(_Named):
    """MNIST (LeCun et al., 1998): 28x28 grey, 10 digits."""

    stem: ClassVar[str] = "mnist"


@datasets.register("fashion_mnist")
@dataclass(frozen=True, kw_only=True)
class FashionMnist(_Named):
    """Fashion-MNIST (Xiao et al., 2017): 28x28 grey, 10 kinds of clothes."""

    stem: ClassVar[str] = "fashion_mnist"


@datasets.register("handwritten62")
@dataclass(frozen=True, kw_only=True)
class Handwritten62(_Named):
    """Handwritten digits and letters, 28x28 grey, in the 62 classes and the order of EMNIST ByClass (not EMNIST)."""

    stem: ClassVar[str] = "handwritten62"


def read(path: Path) -> tuple[Batch, tuple[str, ...]]:
    """Images and class names of one `.npz` file; nothing in it is executed.

    Raises:
        ValueError: not such a file, or a key that is missing or of another shape, type or range; says which.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in KEYS if key in file.files}
    except (ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"expected a .npz file without objects, got {path}: {error}") from error
    if absent := [key for key in KEYS if key not in arrays]:
        raise ValueError(f"expected {', '.join(KEYS)} in {path}, got no {', '.join(absent)}")
    images, labels, names = (arrays[key] for key in KEYS)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in {1, 3} or not len(images):
        raise ValueError(f"expected images uint8 [N, H, W, 1 or 3] in {path}, got {images.dtype} {images.shape}")
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise ValueError(f"expected class_names as a list of strings in {path}, got {names.dtype} {names.shape}")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise ValueError(f"expected labels int [{len(images)}] in {path}, got {labels.dtype} {labels.shape}")
    if labels.min() < 0 or labels.max() >= len(names):
        raise ValueError(f"expected labels in [0, {len(names)}) in {path}, got {labels.min()} to {labels.max()}")
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float().div_(255)
    return Batch(inputs, torch.from_numpy(labels.astype(np.int64))), tuple(names.astype(str).tolist())


def save(path: Path, images: NDArray[np.uint8], labels: NDArray[Any], class_names: Sequence[str]) -> None:
    """Write a file that `read` takes, whole or not at all.

    Args:
        path: ends in `.npz`.
        images: uint8 [N, H, W, 1 or 3].
        labels: integers [N] in [0, K).
        class_names: K strings.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / "part.npz"
        np.savez_compressed(part, images=images, labels=labels, class_names=np.array(class_names, dtype=str))
        read(part)
        os.replace(part, path)


def _pair(settings: _Stored, stem: str) -> Dataset:
    first, second = (f"{stem}_{part}.npz" for part in ("train", "test"))
    train, class_names = read(_find(first))
    test, others = read(_find(second))
    _check_alike(train, test, class_names, others, second)
    return settings._dataset(stem, train, test, class_names, f"{first}, {second}")


def _find(name: str) -> Path:
    """The file at `name` as given, or in `$HYPERLEAK_DATA`."""
    given, folder = Path(name), os.environ.get(VARIABLE)
    places = [given] if given.is_absolute() or not folder else [given, Path(folder) / name]
    for path in places:
        if path.is_file():
            return path
    there = sorted(path.name for path in Path(folder).glob("*.npz")) if folder else []
    content = f"that folder has {', '.join(there) or 'no .npz file'}" if folder else f"{VARIABLE} is not set"
    raise DatasetMissingError(
        f"no file {name}: looked for {' and '.join(map(str, places))}; {content}. Set {VARIABLE} to the folder that "
        "has it, or write it from any copy of the data with fl.data.stored.save(path, images, labels, class_names)"
    )


def _check_alike(train: Batch, test: Batch, names: tuple[str, ...], others: tuple[str, ...], path: str) -> None:
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        shapes = tuple(train.inputs.shape[1:]), tuple(test.inputs.shape[1:])
        raise ValueError(f"expected test images {shapes[0]} as the training images in {path}, got {shapes[1]}")
    if names != others:
        raise ValueError(f"expected the class_names of the training file in {path}, got {others}")


def _first(batch: Batch, count: int | None) -> Batch:
    if count is None:
        return batch
    if count > len(batch):
        raise ValueError(f"expected a limit of at most {len(batch)} images, got {count}")
    return Batch(batch.inputs[:count].clone(), batch.labels[:count].clone())
