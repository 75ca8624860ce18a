"""Folders of images: a data set of your own, one folder for each class."""

from __future__ import annotations

import math
import os
import struct
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fl.data import Dataset, datasets, stratified_split
from fl.data.sources.npz_files import DatasetMissingError, LimitedSource, Pixels
from fl.ranges import OpenShare, Seed, Width
from fl.runtime.safe_paths import join_inside, printable_name, require_inside, require_regular_file
from fl.seeds import stream
from fl.types import Batch

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What those suffixes stand for: a file of another kind under such a name is not opened (EPS would run a program)."""
MAX_PIXELS = 2**26
"""Pixels of one image, by its header, at most: a small file must not fill the memory."""
PILLOW_ERRORS = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError),
    *(OSError, SyntaxError, TypeError, struct.error, zlib.error),
)
"""What Pillow raises of damaged files, in their metadata too."""
Mode = Literal["color", "gray"]
FORMER_MODES: Mapping[str, Mapping[Any, Any]] = {"mode": {"colour": "color", "grey": "gray"}}
Listed = tuple[list[Path], torch.Tensor]
"""Files, and the label of each (N,) int64."""


@datasets.register("folder")
@dataclass(frozen=True, kw_only=True)
class Folder(LimitedSource):
    """Your own images: `PATH/CLASS/*.png`, or `PATH/train/CLASS/*.png` beside `PATH/test/CLASS/*.png`.

    Only files of the usual image types are looked at, by their suffix. Only those within the limits are read.

    Attributes:
        path: of the folder.
        size: height and width: the short side is resized to it, antialiased, and the center square taken; None takes
            the images as they are, which must then be of one size.
        mode: "color" (3 channels) or "gray" (1 channel, ITU-R 601 luma).
        test_share: share of every class held out if there is no folder `test`.
        seed: of that split, and of the order of the images.
    """

    former_values: ClassVar[Mapping[str, Mapping[Any, Any]]] = FORMER_MODES

    path: str
    size: Width | None = 32
    mode: Mode = "color"
    test_share: OpenShare = 0.2
    seed: Seed = 0

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
        root = Path(os.path.expanduser(self.path))
        if not root.is_dir():
            raise DatasetMissingError(f"no folder {self.path}: expected one with a folder of images for each class")
        top = root / "train" if (root / "train").is_dir() else root
        names = list_classes(top)
        files, labels = list_images(top, names)
        if (root / "train").is_dir() and (root / "test").is_dir():
            train = self._shuffled((files, labels), "train")
            test = self._shuffled(list_images(root / "test", names), "test")
        else:
            train, test = (
                ([files[i] for i in part.tolist()], labels[part])
                for part in stratified_split(labels, self.test_share, self.seed)
            )
        parts = (self._read(train, self.limit, names), self._read(test, self.test_limit, names))
        shapes = [tuple(part.inputs.shape[1:]) for part in parts]
        if shapes[0] != shapes[1]:
            raise ValueError(f"expected test images {shapes[0]} as the training images, got {shapes[1]}; set size")
        return Dataset(
            *parts, printable_name(root.resolve().name), names, f"images in {printable_name(root.resolve().name)}"
        )

    def _shuffled(self, part: Listed, key: str) -> Listed:
        order = torch.randperm(len(part[0]), generator=stream(self.seed, "order", key))
        return [part[0][i] for i in order.tolist()], part[1][order]

    def _read(self, part: Listed, limit: int | None, names: tuple[str, ...]) -> Batch:
        files, labels = part
        if limit is not None and limit > len(files):
            raise ValueError(f"expected a limit of at most {len(files)} images, got {limit}")
        files, labels = files[:limit], labels[:limit]
        return Pixels(decode_images(files, self.size, self.mode), labels.numpy(), names).batch()

    @classmethod
    def example(cls) -> Folder:
        """Return a folder of one's own."""
        return cls(path="pictures")


def list_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in `folder`, sorted; hidden ones don't count.

    Raises:
        ValueError: there are none, one's name is not UTF-8, or one is a link that leads elsewhere.
    """
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    found = sorted(require_inside(entry, folder).name for entry in entries if entry.is_dir())
    for name in found:
        if printable_name(name) != name:
            raise ValueError(
                f"expected a folder in {folder} whose name is UTF-8, got {printable_name(name)!r}; rename it"
            )
    if not found:
        raise ValueError(f"expected a folder for each class in {folder}, got none")
    return tuple(found)


def list_images(folder: Path, names: Sequence[str]) -> Listed:
    """Return the images in `folder/NAME`, by name of class and of file.

    Raises:
        ValueError: a class has no images, there is a folder of another class, or a link leads elsewhere.
    """
    if extra := set(list_classes(folder)) - set(names):
        raise ValueError(
            f"expected only the classes of the training images in {folder}, got {', '.join(sorted(extra))}"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        own = join_inside(folder, name)
        entries = own.rglob("*") if own.is_dir() else ()
        found = sorted(require_inside(path, folder) for path in entries if path.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"expected images in {folder / name}, got none with {', '.join(sorted(SUFFIXES))}")
        files += found
        labels += [label] * len(found)
    return files, torch.tensor(labels, dtype=torch.int64)


def decode_images(
    files: Sequence[Path], size: int | None, mode: Mode, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Return the pixels of image files, uint8 [N, H, W, 1 or 3].

    Args:
        files: at least one.
        size: as `Folder.size`.
        mode: as `Folder.mode`.
        out: where to write them (a memory map for many); a new array by default.

    Raises:
        ValueError: a file is no image, or of another size than the first; says which.
    """
    for i, path in enumerate(files):
        pixels = _read_pixels(path, size, mode)
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


def _convert_mode(opened: Image.Image, path: Path, mode: Mode) -> Image.Image:
    """Return the image upright, of 8 bits per channel."""
    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"expected 8 bits per channel in {path}, got an image of mode {image.mode}")
    return image.convert("RGB" if mode == "color" else "L")


def _read_pixels(path: Path, size: int | None, mode: Mode) -> NDArray[np.uint8]:
    shape: tuple[int, ...] = ()
    try:
        # what is wrong with a file is an error, or nothing: no warning
        with (
            warnings.catch_warnings(action="ignore"),
            Image.open(require_regular_file(path), formats=FORMATS) as opened,
        ):
            shape = opened.size
            if opened.width * opened.height <= MAX_PIXELS:
                image = _convert_mode(opened, path, mode)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"expected at most {MAX_PIXELS:,} pixels in {path}, got more; make it smaller") from error
    except PILLOW_ERRORS as error:
        raise ValueError(f"expected an image in {path}: {error}") from error
    if math.prod(shape) > MAX_PIXELS:
        raise ValueError(
            f"expected at most {MAX_PIXELS:,} pixels in {path}, got {shape[0]} x {shape[1]}; make it smaller"
        )
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(image.height, image.width, -1)
