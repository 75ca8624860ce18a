"""Data sets that go by their name: `NAME_train.npz` and `NAME_test.npz` in the data folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fl.data import Dataset, datasets
from fl.data.sources.download import MANUAL_DOWNLOADS, downloadable_sets
from fl.data.sources.npz_files import LimitedSource, data_folder, load_pair
from fl.runtime.safe_paths import is_accessible_file


@dataclass(frozen=True, kw_only=True)
class _BenchmarkSet(LimitedSource):
    stem: ClassVar[str]

    def load(self) -> Dataset:
        """Read `STEM_train.npz` and `STEM_test.npz` in the data folder.

        Raises:
            DatasetMissingError: a file is not there.
            ValueError: a file does not hold what it should; says which key.
        """
        found = download_hint(type(self).name)  # type: ignore[attr-defined]
        return load_pair(self.stem, self, found[:1].upper() + found[1:])


@datasets.register("cifar10")
@dataclass(frozen=True, kw_only=True)
class Cifar10(_BenchmarkSet):
    """CIFAR-10 (Krizhevsky, 2009): 32x32 color, 10 classes."""

    stem: ClassVar[str] = "cifar10"


@datasets.register("cifar100")
@dataclass(frozen=True, kw_only=True)
class Cifar100(_BenchmarkSet):
    """CIFAR-100 (Krizhevsky, 2009): 32x32 color, 100 classes."""

    stem: ClassVar[str] = "cifar100"


@datasets.register("cinic10")
@dataclass(frozen=True, kw_only=True)
class Cinic10(_BenchmarkSet):
    """CINIC-10 (Darlow et al., 2018): 32x32 color, CIFAR-10's classes, from CIFAR-10 and ImageNet; train and test."""

    stem: ClassVar[str] = "cinic10"


@datasets.register("emnist")
@dataclass(frozen=True, kw_only=True)
class Emnist(_BenchmarkSet):
    """EMNIST ByClass (Cohen et al., 2017): 28x28 gray, upright, 62 digits and letters; all of it takes 3 GB to load."""

    stem: ClassVar[str] = "emnist"


@datasets.register("fashion_mnist")
@dataclass(frozen=True, kw_only=True)
class FashionMnist(_BenchmarkSet):
    """Fashion-MNIST (Xiao et al., 2017): 28x28 gray, 10 kinds of clothes."""

    stem: ClassVar[str] = "fashion_mnist"


@datasets.register("handwritten62")
@dataclass(frozen=True, kw_only=True)
class Handwritten62(_BenchmarkSet):
    """Handwritten digits and letters, 28x28 gray, in the 62 classes and the order of EMNIST ByClass (not EMNIST)."""

    stem: ClassVar[str] = "handwritten62"


@datasets.register("mnist")
@dataclass(frozen=True, kw_only=True)
class Mnist(_BenchmarkSet):
    """MNIST (LeCun et al., 1998): 28x28 gray, 10 digits."""

    stem: ClassVar[str] = "mnist"


@datasets.register("svhn")
@dataclass(frozen=True, kw_only=True)
class Svhn(_BenchmarkSet):
    """Street View House Numbers, cropped (Netzer et al., 2011): 32x32 color, 10 digits."""

    stem: ClassVar[str] = "svhn"


@datasets.register("tiny-imagenet")
@dataclass(frozen=True, kw_only=True)
class TinyImagenet(_BenchmarkSet):
    """Tiny-ImageNet (Le and Yang, 2015): 64x64 color, 200 classes; its labeled validation images are the test set."""

    stem: ClassVar[str] = "tiny-imagenet"


def download_hint(name: str) -> str:
    """Return how to get the files of a data set; an empty string for one that can't be fetched."""
    if name in MANUAL_DOWNLOADS:
        return (
            f"{MANUAL_DOWNLOADS[name]}, and run `hyperleak doctor --download {name} --source FOLDER` with that folder"
        )
    return f"run `hyperleak doctor --download {name}`" if name in downloadable_sets() else ""


def available_sets() -> dict[str, Path | None]:
    """Return every data set that goes by its name, with its training file if both files are in the data folder."""
    result: dict[str, Path | None] = {}
    for name in datasets.names():
        kind = datasets.get(name)
        if isinstance(kind, type) and issubclass(kind, _BenchmarkSet):
            train, test = (data_folder() / f"{kind.stem}_{part}.npz" for part in ("train", "test"))
            result[name] = train if is_accessible_file(train) and is_accessible_file(test) else None
    return result
