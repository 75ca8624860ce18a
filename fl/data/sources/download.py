"""The named data sets from where they are published, as `.npz` files in the data folder."""

from __future__ import annotations

import string
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl.data.sources import npz_files
from fl.data.sources.folders import decode_images, list_classes, list_images
from fl.data.sources.npz_files import DatasetMissingError
from fl.registry import UnknownNameError
from fl.runtime.safe_paths import join_inside, require_regular_file
from fl.seeds import stream

DIGITS = tuple(string.digits)
CHARACTERS = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
MANUAL_DOWNLOADS = {
    "cinic10": "unpack CINIC-10.tar.gz of https://datashare.ed.ac.uk/handle/10283/3192 (train/CLASS/*.png, test/...)",
    "tiny-imagenet": "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip (train/, val/, words.txt)",
}
"""How to get the sets that torchvision does not have."""
PUBLISHED_SIZES = {
    "mnist": (60_000, 10_000),
    "fashion_mnist": (60_000, 10_000),
    "emnist": (697_932, 116_323),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "svhn": (73_257, 26_032),
    "cinic10": (90_000, 90_000),
    "tiny-imagenet": (100_000, 10_000),
}
"""Images for training and testing, as published. Torchvision checks the files of CIFAR and SVHN by their MD5, and those
that it downloads; unpacked files of MNIST's kind, and folders of images, have no digest to be checked by."""
MNIST_CLASSES = (
    (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
)
"""Images of each digit (LeCun et al., 1998)."""
Arrays = tuple[NDArray[np.uint8], NDArray[Any], Sequence[str]]


def download(name: str, folder: Path | None = None, *, source: Path | None = None) -> list[Path]:
    """Write `NAME_train.npz` and `NAME_test.npz`, each whole or not at all; returns their paths.

    Args:
        name: of the data set: see `downloadable_sets()`.
        folder: where to; the data folder by default.
        source: a folder that has the files as published: for CINIC-10 and Tiny-ImageNet the unpacked folder, for the
            others what torchvision takes as `root`. None downloads them, checked by torchvision, and leaves no copy.

    Raises:
        UnknownNameError: there is no such set to download.
        DatasetMissingError: the files can't be downloaded or are not in `source`; says what to do.
        ValueError: files in `source` are damaged, or are not the published ones as far as counts tell.
    """
    if name not in downloadable_sets():
        raise UnknownNameError("data set to download", name, downloadable_sets())
    folder = npz_files.data_folder() if folder is None else Path(folder)
    if folder == npz_files.DEFAULT_FOLDER:
        raise DatasetMissingError(
            f"there is no home folder to write {name} to; set {npz_files.DATA_VARIABLE} to a folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = {part: folder / f"{name}_{part}.npz" for part in ("train", "test")}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        for part, path in paths.items():
            if name in MANUAL_DOWNLOADS:
                _from_folder(name, part, path, source, Path(scratch))
            else:
                pixels, labels, class_names = _from_torchvision(name, part, source, Path(scratch))
                _check_published(name, part, np.asarray(labels), source)
                npz_files.save_images(path, pixels, labels, class_names)
    return list(paths.values())


def _check_published(name: str, part: str, labels: NDArray[Any], source: Path | None) -> None:
    """Whether there are as many images as were published, and of each digit, so that no other set goes by the name.

    Raises:
        ValueError: there are not.
    """
    if source is None:
        return  # torchvision has checked what it downloaded
    column = 0 if part == "train" else 1
    expected = PUBLISHED_SIZES[name][column]
    own = "it is another set: store images of your own under a name of their own, as a folder or an .npz file"
    if len(labels) != expected:
        raise ValueError(
            f"expected the {expected} images of {name}'s {part} part in {source}, got {len(labels)}; {own}"
        )
    counts = tuple(np.bincount(labels.astype(np.int64), minlength=10).tolist())
    if name == "mnist" and counts != MNIST_CLASSES[column]:
        raise ValueError(f"expected MNIST's images of each digit in {source}, got {counts}; {own}")


def downloadable_sets() -> list[str]:
    """Return the data sets that `download` knows."""
    return sorted([*_TORCHVISION, *MANUAL_DOWNLOADS])


def _from_torchvision(name: str, part: str, source: Path | None, scratch: Path) -> Arrays:
    root = str(scratch if source is None else source)
    try:
        return _TORCHVISION[name](root, part == "train", source is None)
    except (RuntimeError, OSError) as error:  # torchvision: RuntimeError for a missing or damaged file
        got = f"could not be downloaded ({error})" if source is None else f"is not in {source} ({error})"
        raise DatasetMissingError(
            f"{name} {got}. Get torchvision's files for it on any machine and give their folder as the source, or copy "
            f"{name}_train.npz and {name}_test.npz into the data folder"
        ) from error


def _mnist(root: str, train: bool, fetch: bool) -> Arrays:
    from torchvision.datasets import MNIST

    found = MNIST(root, train=train, download=fetch)
    return found.data.numpy()[..., None], found.targets.numpy(), DIGITS


def _fashion_mnist(root: str, train: bool, fetch: bool) -> Arrays:
    from torchvision.datasets import FashionMNIST

    found = FashionMNIST(root, train=train, download=fetch)
    return found.data.numpy()[..., None], found.targets.numpy(), found.classes


def _emnist(root: str, train: bool, fetch: bool) -> Arrays:
    from torchvision.datasets import EMNIST

    found = EMNIST(root, split="byclass", train=train, download=fetch)
    upright = found.data.numpy().transpose(0, 2, 1)  # the files hold columns first
    return upright[..., None], found.targets.numpy(), CHARACTERS


def _cifar(kind: str) -> Callable[[str, bool, bool], Arrays]:
    def convert(root: str, train: bool, fetch: bool) -> Arrays:
        from torchvision import datasets

        found = getattr(datasets, kind)(root, train=train, download=fetch)
        return found.data, np.asarray(found.targets), found.classes

    return convert


def _svhn(root: str, train: bool, fetch: bool) -> Arrays:
    from torchvision.datasets import SVHN

    found = SVHN(root, split="train" if train else "test", download=fetch)
    return found.data.transpose(0, 2, 3, 1), found.labels, DIGITS


_TORCHVISION: dict[str, Callable[[str, bool, bool], Arrays]] = {
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
    "emnist": _emnist,
    "cifar10": _cifar("CIFAR10"),
    "cifar100": _cifar("CIFAR100"),
    "svhn": _svhn,
}


def _from_folder(name: str, part: str, path: Path, source: Path | None, scratch: Path) -> None:
    """Convert a folder of image files, shuffled, through a memory map: no more than one image is held in memory."""
    if source is None:
        raise DatasetMissingError(
            f"{name} has to be fetched by hand: {MANUAL_DOWNLOADS[name]} and give that folder as the source"
        )
    try:
        find, size = (_cinic10, 32) if name == "cinic10" else (_tiny_imagenet, 64)
        files, labels, class_names = find(Path(source), part)
    except OSError as error:
        raise DatasetMissingError(f"{name} is not in {source} ({error}): {MANUAL_DOWNLOADS[name]}") from error
    _check_published(name, part, labels.numpy(), source)
    order = torch.randperm(len(files), generator=stream(0, "order", name, part))
    pixels = np.memmap(scratch / f"{part}.raw", dtype=np.uint8, mode="w+", shape=(len(files), size, size, 3))
    decode_images([files[i] for i in order.tolist()], None, "color", out=pixels)
    npz_files.save_images(path, pixels, labels[order].numpy(), class_names)


def _cinic10(source: Path, part: str) -> tuple[list[Path], torch.Tensor, Sequence[str]]:
    """Return `train` or `test`; `valid` is left out, as HyperFL's authors leave it out."""
    class_names = list_classes(source / "train")
    return *list_images(source / part, class_names), class_names


def _tiny_imagenet(source: Path, part: str) -> tuple[list[Path], torch.Tensor, Sequence[str]]:
    """Return `train`, or as `test` the labeled images of `val`; its own `test` has no labels."""
    wnids = list_classes(source / "train")
    class_names = _class_words(source / "words.txt", wnids)
    if part == "train":
        return *list_images(source / "train", wnids), class_names
    annotations = require_regular_file(source / "val" / "val_annotations.txt").read_text("utf-8")
    rows = [line.split("\t") for line in annotations.splitlines()]
    numbers = {wnid: label for label, wnid in enumerate(wnids)}
    if unknown := [row for row in rows if len(row) < 2 or row[1] not in numbers]:
        raise ValueError(f"expected a file and one of the training classes in val_annotations.txt, got {unknown[0]}")
    images = source / "val" / "images"
    files = [join_inside(images, row[0]) for row in rows]
    return files, torch.tensor([numbers[row[1]] for row in rows], dtype=torch.int64), class_names


def _class_words(path: Path, wnids: Sequence[str]) -> list[str]:
    """Return the first word for each WordNet number; where two have the same, with the number."""
    words = dict(
        line.split("\t", 1) for line in require_regular_file(path).read_text("utf-8").splitlines() if "\t" in line
    )
    first = [words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids]
    often = Counter(first)
    return [word if often[word] == 1 else f"{word} ({wnid})" for word, wnid in zip(first, wnids, strict=True)]
