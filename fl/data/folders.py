"""Folders of images: a data set of your own, one folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fl.data import Dataset, datasets, stratified
from fl.data.stored import DatasetMissingError, Limited, Pixels
from fl.seeds import stream
from fl.types import Batch

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
Mode = Literal["colour", "grey"]
Listed = tuple[list[Path], torch.Tensor]
"""Files, and the label of each (N,) int64."""


@datasets.register("folder")
@dataclass(frozen=True, kw_only=True)
class Folder(Limited):
    """Your own images: `PATH/CLASS/*.png`, or `PATH/train/CLASS/*.png` beside `PATH/test/CLASS/*.png`.

    Only files of the usual image types are looked at, by their suffix. Only those within the limits are read.

    Attributes:
        path: of the folder.
        size: height and width: the short side is resized to it, antialiased, and the centre square taken; None takes
            the images as they are, which must then be of one size.
        mode: "colour" (3 channels) or "grey" (1 channel, ITU-R 601 luma).
        test_share: share of every class held out if there is no folder `test`.
        seed: of that split, and of the order of the images.
    """

    path: str
    size: int | None = 32
    mode: Mode = "colour"
    test_share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and self.size < 1:
            raise ValueError(f"expected size >= 1 or None, got {self.size}")

    def load(self) -> Dataset:
        """Read the images.

        Raises:
            DatasetMissingError: there is no such folder.
            ValueError: it has no classes or no images, or an image can't be read; says which.
        """
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise DatasetMissingError(f"no folder {self.path}: expected one with a folder of images for each class")
        top = root / "train" if (root / "train").is_dir() else root
        names = classes(top)
        files, labels = listed(top, names)
        if (root / "train").is_dir() and (root / "test").is_dir():
            train = self._shuffled((files, labels), "train")
            test = self._shuffled(listed(root / "test", names), "test")
        else:
            train, test = (
                ([files[i] for i in part.tolist()], labels[part])
                for part in stratified(labels, self.test_share, self.seed)
            )
        parts = (self._read(train, self.limit, names), self._read(test, self.test_limit, names))
        shapes = [tuple(part.inputs.shape[1:]) for part in parts]
        if shapes[0] != shapes[1]:
            raise ValueError(f"expected test images {shapes[0]} as the training images, got {shapes[1]}; set size")
        return Dataset(*parts, root.resolve().name, names, f"images in {root.resolve().name}")

    def _shuffled(self, part: Listed, key: str) -> Listed:
        order = torch.randperm(len(part[0]), generator=stream(self.seed, "order", key))
        return [part[0][i] for i in order.tolist()], part[1][order]

    def _read(self, part: Listed, limit: int | None, names: tuple[str, ...]) -> Batch:
        files, labels = part
        if limit is not None and limit > len(files):
            raise ValueError(f"expected a limit of at most {len(files)} images, got {limit}")
        files, labels = files[:limit], labels[:limit]
        return Pixels(decode(files, self.size, self.mode), labels.numpy(), names).batch()

    @classmethod
    def example(cls) -> Folder:
        """A folder of one's own."""
        return cls(path="pictures")


def classes(folder: Path) -> tuple[str, ...]:
    """Names of the folders in `folder`, sorted; hidden ones don't count.

    Raises:
        ValueError: there are none.
    """
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise ValueError(f"expected a folder for each class in {folder}, got none")
    return tuple(found)


def listed(folder: Path, names: Sequence[str]) -> Listed:
    """The images in `folder/NAME`, by name of class and of file.

    Raises:
        ValueError: a class has no images, or there is a folder of another class.
    """
    if extra := set(classes(folder)) - set(names):
        raise ValueError(
            f"expected only the classes of the training images in {folder}, got {', '.join(sorted(extra))}"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        inside = (folder / name).rglob("*") if (folder / name).is_dir() else ()
        found = sorted(path for path in inside if path.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"expected images in {folder / name}, got none with {', '.join(sorted(SUFFIXES))}")
        files += found
        labels += [label] * len(found)
    return files, torch.tensor(labels, dtype=torch.int64)


def decode(
    files: Sequence[Path], size: int | None, mode: Mode, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """The pixels of image files, uint8 [N, H, W, 1 or 3].

    Args:
        files: at least one.
        size: as `Folder.size`.
        mode: as `Folder.mode`.
        out: where to write them (a memory map for many); a new array by default.

    Raises:
        ValueError: a file is no image, or of another size than the first; says which.
    """
    for i, path in enumerate(files):
        pixels = _pixels(path, size, mode)
        if out is None:
            out = np.empty((len(files), *pixels.shape), dtype=np.uint8)
        if pixels.shape != out.shape[1:]:
            raise ValueError(
                f"expected images of one size {out.shape[1:3]}, got {pixels.shape[:2]} in {path}; set size"
            )
        out[i] = pixels
    if out is None:
        raise ValueError("expected at least 1 image, got none")
    return out


def _pixels(path: Path, size: int | None, mode: Mode) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"expected 8 bits per channel in {path}, got an image of mode {image.mode}")
            image = image.convert("RGB" if mode == "colour" else "L")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: Pillow's for broken PNG
        raise ValueError(f"expected an image in {path}: {error}") from error
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(image.height, image.width, -1)
