"""Data sets in `.npz` files: `images` uint8 [N, H, W, C] or, gray, [N, H, W], `labels` [N], `class_names` [K].

Without `class_names` the classes are numbered, from 0 to the largest label. Of a data set to train on each of them then
has to occur: labels that count from 1, or leave numbers out, would make classes without an image.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl.data import Dataset, Source, datasets, stratified_split
from fl.ranges import Count, OpenShare, Seed
from fl.runtime import tensor_archives
from fl.runtime.atomic_files import atomic_write
from fl.runtime.safe_paths import is_accessible_file
from fl.types import Batch

DATA_VARIABLE = "HYPERLEAK_DATA"
DEFAULT_FOLDER = Path("~/.cache/hyperleak/data")
"""The data folder of a user without a home."""
REQUIRED_ARRAYS = ("images", "labels")
CLASS_NAMES = "class_names"
MAX_SHOWN_NAMES = 10
MAX_NUMBERED_CLASSES = 2**16
"""Classes that go by their numbers, at most: a stray label must not make millions of names."""


class DatasetMissingError(FileNotFoundError):
    """A data file is not where it was looked for; the message says how to get it."""


@dataclass(frozen=True)
class Pixels:
    """Images as they are stored, a quarter of the memory that `batch` takes.

    Attributes:
        images: uint8 [N, H, W, 1 or 3].
        labels: integers [N] in [0, K).
        class_names: K strings.
        numbered: whether these are the numbers up to the largest label, since the file names no classes.
    """

    images: NDArray[np.uint8]
    labels: NDArray[Any]
    class_names: tuple[str, ...]
    numbered: bool = False

    def batch(self, index: NDArray[np.int64] | None = None, limit: int | None = None) -> Batch:
        """Return the images at `index`, or all, of them the first `limit`, as float32 (N, C, H, W) in [0, 1].

        Raises:
            ValueError: there are fewer than `limit` images.
        """
        count = len(self.labels) if index is None else len(index)
        if limit is not None and limit > count:
            raise ValueError(f"expected a limit of at most {count} images, got {limit}")
        chosen: Any = slice(limit) if index is None else index[:limit]
        images = torch.from_numpy(self.images[chosen]).permute(0, 3, 1, 2)
        inputs = torch.empty(images.shape, dtype=torch.float32).copy_(images).div_(255)  # no copy but this one
        return Batch(inputs, torch.from_numpy(self.labels[chosen].astype(np.int64)))


@dataclass(frozen=True, kw_only=True)
class LimitedSource(Source):
    """Settings of any data set that may be too large to load whole.

    Attributes:
        limit: keep the first so many training images (they are in random order); None keeps all.
        test_limit: likewise for the test images.
    """

    limit: Count | None = None
    test_limit: Count | None = None

    def __post_init__(self) -> None:
        for key in ("limit", "test_limit"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"expected {key} >= 1 or None, got {value}")


@datasets.register("npz")
@dataclass(frozen=True, kw_only=True)
class Npz(LimitedSource):
    """Your own files.

    Attributes:
        train: path of the training images, or NAME for `NAME_train.npz` and `NAME_test.npz` in the data folder.
        test: path of the test images; None holds out a share of the training file.
        test_share: that share, of every class.
        seed: of that split.
    """

    train: str
    test: str | None = None
    test_share: OpenShare = 0.2
    seed: Seed = 0

    def load(self) -> Dataset:
        """Read the files.

        Raises:
            DatasetMissingError: a file is not there.
            ValueError: a file does not hold what it should; says which key.
        """
        if self.test is None and not self.train.endswith(".npz"):
            return load_pair(self.train, self)
        path = find_file(self.train)
        if self.test is not None:
            return _join_parts(path.stem, path, find_file(self.test), self)
        pixels = read_pixels(path)
        expect_every_class(pixels, path)
        train, test = stratified_split(torch.from_numpy(pixels.labels.astype(np.int64)), self.test_share, self.seed)
        parts = (pixels.batch(train.numpy(), self.limit), pixels.batch(test.numpy(), self.test_limit))
        return Dataset(*parts, path.stem, pixels.class_names, path.name)

    @classmethod
    def example(cls) -> Npz:
        """Return a file made by `save_images`."""
        return cls(train="mine.npz")


def data_folder() -> Path:
    """Return the data folder: `$HYPERLEAK_DATA`, or `hyperleak/data` in the cache (`$XDG_CACHE_HOME`, `~/.cache`).

    Where nothing says what the user's home is, it is a folder that is not there.
    """
    if given := os.environ.get(DATA_VARIABLE):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "hyperleak" / "data"
    except RuntimeError:  # neither HOME nor the user is known
        return DEFAULT_FOLDER


def load_pair(stem: str, settings: LimitedSource, remedy: str = "") -> Dataset:
    """Return the data set in `STEM_train.npz` and `STEM_test.npz`.

    Args:
        stem: of the file names.
        settings: how much of it.
        remedy: how to get the files, for the message if they are not there: "Run ...".

    Raises:
        DatasetMissingError: a file is not there.
        ValueError: a file does not hold what it should, or the two do not belong together.
    """
    train, test = (find_file(f"{stem}_{part}.npz", remedy) for part in ("train", "test"))
    return _join_parts(stem, train, test, settings)


def find_file(name: str, remedy: str = "") -> Path:
    """Return the file at `name` as given, or in the data folder.

    Raises:
        DatasetMissingError: it is in neither; says what is there, and how to get it.
    """
    given, home = Path(name), data_folder()
    places = [given] if given.is_absolute() else [given, home / name]
    for path in places:
        if is_accessible_file(path):
            return path
    others = ", ".join(sorted(path.name for path in home.glob("*.npz"))) or "no .npz file"
    unset = "" if os.environ.get(DATA_VARIABLE) else f" ({DATA_VARIABLE} is not set)"
    first = f"{remedy}, or set" if remedy else "Set"
    raise DatasetMissingError(
        f"no file {name}: looked for {' and '.join(map(str, places))}; that folder has {others}{unset}. "
        f"{first} {DATA_VARIABLE} to the folder that has it, or write it from any copy of the data with "
        "fl.data.sources.npz_files.save_images(path, images, labels, class_names)"
    )


def read_batch(path: Path, limit: int | None = None) -> tuple[Batch, tuple[str, ...]]:
    """Return the first `limit` images, or all, and the class names of one `.npz` file; nothing in it is executed.

    Raises:
        ValueError: not such a file, or a key that is missing or of another shape, type or range; says which.
    """
    pixels = read_pixels(path)
    return pixels.batch(limit=limit), pixels.class_names


def read_pixels(path: Path) -> Pixels:
    """Return what one `.npz` file holds, checked.

    Raises:
        ValueError: not such a file, or a key that is missing or of another shape, type or range; says which.
    """
    try:
        arrays = tensor_archives.read_arrays(path, (*REQUIRED_ARRAYS, CLASS_NAMES))
    except tensor_archives.DamagedError as error:
        raise ValueError(f"expected a .npz file without objects, got {path}: {error}") from error
    if absent := [key for key in REQUIRED_ARRAYS if key not in arrays]:
        raise ValueError(f"expected {', '.join(REQUIRED_ARRAYS)} in {path}, got no {', '.join(absent)}")
    images, labels = (arrays[key] for key in REQUIRED_ARRAYS)
    names = arrays[CLASS_NAMES] if CLASS_NAMES in arrays else _numbered_names(labels)
    if images.dtype == np.uint8 and images.ndim == 3:  # gray
        images = images[..., None]
    _check(images, labels, names, path)
    return Pixels(images, labels, tuple(names.astype(str).tolist()), numbered=CLASS_NAMES not in arrays)


def expect_every_class(pixels: Pixels, path: Path) -> None:
    """Refuse images to train on whose classes go by their numbers, where there is no image of one.

    Raises:
        ValueError: labels count from 1, or leave a number out; says which, and what to write.
    """
    if not pixels.numbered:
        return
    absent = np.flatnonzero(np.bincount(pixels.labels.astype(np.int64)) == 0)
    if not len(absent):
        return
    largest, shown = int(pixels.labels.max()), ", ".join(map(str, absent[:MAX_SHOWN_NAMES]))
    more = f" and {len(absent) - MAX_SHOWN_NAMES} more" if len(absent) > MAX_SHOWN_NAMES else ""
    if absent.tolist() == [*range(int(pixels.labels.min()))]:
        remedy = f"if they count from {len(absent)}, write labels - {len(absent)}"
    else:
        remedy = (
            "numpy.unique(labels, return_inverse=True) gives the names of those there are and labels that count them"
        )
    raise ValueError(
        f"expected labels in {path} that count the classes from 0, each with an image, got none of {shown}{more} up to "
        f"{largest}: {remedy}; if there are such classes without images, write {CLASS_NAMES}, a name for each number"
    )


def save_images(path: Path, images: NDArray[np.uint8], labels: NDArray[Any], class_names: Sequence[str]) -> None:
    """Write a file that `read_batch` takes, whole or not at all.

    Args:
        path: ends in `.npz`.
        images: uint8 [N, H, W, 1 or 3]; may be a view or a memory map, which is written piece by piece.
        labels: integers [N] in [0, K).
        class_names: K strings.

    Raises:
        ValueError: an array is of another shape, type or range; says which.
    """
    names = np.array(class_names, dtype=str)
    _check(images, labels, names, path)
    with atomic_write(path) as file:
        np.savez_compressed(file, images=images, labels=labels, class_names=names)


def _numbered_names(labels: NDArray[Any]) -> NDArray[np.str_]:
    """Return names for classes that have none: the numbers up to the largest label."""
    largest = int(labels.max()) if labels.dtype.kind in "iu" and labels.size else 0
    return np.arange(min(largest + 1, MAX_NUMBERED_CLASSES)).astype(str)


def _check(images: NDArray[Any], labels: NDArray[Any], names: NDArray[Any], path: Path) -> None:
    if images.dtype == np.uint8 and images.ndim == 4 and not len(images):
        raise ValueError(f"expected images in {path}, got none")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in {1, 3}:
        got = f"{images.dtype} {images.shape}{_image_hint(images)}"
        raise ValueError(f"expected images uint8 [N, H, W, 1 or 3] in {path}, got {got}")
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise ValueError(f"expected class_names as a list of strings in {path}, got {names.dtype} {names.shape}")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        hint = _label_hint(labels, len(images))
        raise ValueError(f"expected labels int [{len(images)}] in {path}, got {labels.dtype} {labels.shape}{hint}")
    if labels.min() < 0 or labels.max() >= len(names):
        from_one = labels.min() == 1 and labels.max() == len(names)
        hint = "; they seem to count from 1: write labels - 1" if from_one else ""
        hint = "; leave images without a label (-1, say) out" if labels.min() < 0 else hint
        raise ValueError(f"expected labels in [0, {len(names)}) in {path}, got {labels.min()} to {labels.max()}{hint}")


def _image_hint(images: NDArray[Any]) -> str:
    """Return how what is given as images becomes them; "" where nobody can tell."""
    if images.ndim != 4 or not images.size:
        return ""
    if images.shape[3] == 4:
        return "; if the fourth channel is opacity, write images[..., :3]"
    if images.shape[3] in {1, 3} and images.dtype.kind in "iu" and images.min() >= 0 and images.max() <= 255:
        return "; they fit: write images.astype('uint8')"
    return ""


def _label_hint(labels: NDArray[Any], count: int) -> str:
    """Return how what is given as labels of so many images becomes their classes; "" where nobody can tell."""
    if labels.shape == (count, 1):
        return f"; write labels[:, 0]{' as integers' if labels.dtype.kind not in 'iu' else ''}"
    if labels.ndim == 2 and len(labels) == count and labels.dtype.kind in "biuf":
        one_hot = bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1, dtype=np.float64) == 1).all())
        return "; they are one-hot: write labels.argmax(1)" if one_hot else "; write one class for each image"
    if labels.shape != (count,):
        return ""
    if labels.dtype.kind in "SU":
        return f"; {CLASS_NAMES}, labels = numpy.unique(labels, return_inverse=True) makes both of their names"
    if labels.dtype.kind == "b":
        return "; write labels.astype('int64')"
    if labels.dtype.kind == "f":
        whole = bool((labels == np.round(labels)).all())
        return "; they are whole: write labels.astype('int64')" if whole else "; a data set has classes, not numbers"
    return ""


def _join_parts(name: str, train: Path, test: Path, settings: LimitedSource) -> Dataset:
    given = read_pixels(train)
    expect_every_class(given, train)
    first, class_names = given.batch(limit=settings.limit), given.class_names
    second, others = read_batch(test, settings.test_limit)
    if first.inputs.shape[1:] != second.inputs.shape[1:]:
        shapes = tuple(first.inputs.shape[1:]), tuple(second.inputs.shape[1:])
        raise ValueError(f"expected test images {shapes[0]} as the training images in {test}, got {shapes[1]}")
    if class_names != others:
        raise ValueError(
            f"expected the class_names of the training file in {test}, {_shown_names(class_names)}, got "
            f"{_shown_names(others)}: write the same class_names into both files (without them the classes are the "
            "numbers up to the largest label)"
        )
    return Dataset(first, second, name, class_names, f"{train.name}, {test.name}")


def _shown_names(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= MAX_SHOWN_NAMES else f"{len(names)} from {names[0]} to {names[-1]}"
