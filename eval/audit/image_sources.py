"""The true images of an audit, by whatever they are given: a data set, a file of arrays, a folder of pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from eval.audit.examples import Examples, check_examples
from eval.audit.input_shape import SCALED, hook_hint
from eval.io import yaml12
from eval.io.errors import DAMAGED
from fl.data import Source, datasets
from fl.data.checked_loading import load_checked
from fl.data.sources.folders import FORMATS, PILLOW_ERRORS, SUFFIXES, Mode, decode_images, list_classes, list_images
from fl.data.sources.npz_files import REQUIRED_ARRAYS, read_batch
from fl.registry import UnknownNameError
from fl.runtime import tensor_archives
from fl.runtime.native_arrays import to_tensor

LABEL_HINT = (
    "a label comes with the folder that a picture is in: put each into PICTURES/CLASS/, where CLASS is the number of "
    "its label, and give --images PICTURES; or write an .npz file (see --help)"
)
PATH_HINT = "a data set's name or settings, an .npz file of images and labels, or a folder of pictures, PICTURES/CLASS/"


def load_images(source: str) -> Examples:
    """Return all images of a data set, an `.npz` file or a folder of pictures.

    Of a file images are uint8 [N, H, W, 1 or 3], or inputs of the model as they are, in a floating-point type. Pictures
    are in a folder for each class, whose name is the label, or which are counted in the order of their names.

    Args:
        source: a name, settings in YAML, or a path.

    Raises:
        UnknownNameError: there is no such data set.
        FileNotFoundError: there is no such file or folder.
        ValueError: a damaged file, one without images or labels, or a setting that is missing or does not fit.
    """
    if not source.strip():
        raise ValueError(f"expected images as {PATH_HINT}, got an empty text")
    if is_settings(source):
        return Examples.of(load_checked(build_dataset(source)).train)
    path = Path(os.path.expanduser(source))
    if source.endswith(".npz"):
        return _load_arrays(path)
    if path.suffix.lower() in SUFFIXES:
        if not path.is_file():
            raise FileNotFoundError(f"no file {source}; expected {PATH_HINT}")
        raise ValueError(f"expected labels beside images, got the picture {source} alone: {LABEL_HINT}")
    if path.is_dir() and source not in datasets.names():
        return _load_folder(path)
    if path.is_file():
        raise ValueError(
            f"expected images as {PATH_HINT}, got the file {source}: numpy.savez('true.npz', images=..., "
            "labels=...) writes one that is read"
        )
    if "/" in source:
        raise FileNotFoundError(f"no file or folder {source}; expected images as {PATH_HINT}")
    return Examples.of(load_checked(build_dataset(source)).train)


def is_settings(source: str) -> bool:
    """Return whether a text holds settings of a data set: they may hold paths, and be longer than one may be."""
    return source.lstrip().startswith("{") or "\n" in source


def build_dataset(text: str) -> Source:
    """Return a data set by its name or as settings: `faces`, `{name: folder, path: pictures}`.

    Raises:
        UnknownNameError: there is no such data set or setting.
        ValueError: a setting that is missing or does not fit.
    """
    settings = yaml12.parse_settings(text)
    try:
        return datasets.build(settings)
    except UnknownNameError:
        raise
    except ValueError as error:
        if len(settings) > 1:
            raise
        raise ValueError(f"{error}; give it as settings: '{{name: {text}, ...}}'") from error


def _load_arrays(path: Path) -> Examples:
    """Return the images of an `.npz` file, or inputs in a floating-point type as they are."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected arrays `images` and `labels` in it (see --help)")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            keys = [*file.files]
    except (AttributeError, TypeError, *DAMAGED):
        keys = [*REQUIRED_ARRAYS]  # what is wrong with the file is said by what reads it
    if absent := [key for key in REQUIRED_ARRAYS if key not in keys]:
        found = ", ".join(map(repr, keys)) or "no arrays"
        raise ValueError(
            f"expected arrays {' and '.join(REQUIRED_ARRAYS)} in {path}, got no {' or '.join(absent)} but {found}"
        )
    try:
        arrays = tensor_archives.read_arrays(path, REQUIRED_ARRAYS)
    except tensor_archives.DamagedError:
        return Examples.of(read_batch(path)[0])  # which says what is wrong
    images, labels = (arrays[name] for name in REQUIRED_ARRAYS)
    if images.dtype.kind == "f":
        return _as_inputs(images, labels, path)
    if images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] in {1, 3} and images.shape[3] not in {1, 3}:
        raise ValueError(
            f"expected images uint8 [N, H, W, 1 or 3] in {path}, got {images.shape}, whose channels come before "
            "height and width: images.transpose(0, 2, 3, 1)"
        )
    return Examples.of(read_batch(path)[0])


def _as_inputs(images: NDArray[Any], labels: NDArray[Any], path: Path) -> Examples:
    """Return inputs of the model as they are, in a floating-point type, and their targets.

    Raises:
        ValueError: they look like pictures whose channels come last, or whose pixels go up to 255.
    """
    if images.ndim == 4 and images.shape[3] in {1, 3} and images.shape[1] not in {1, 3}:
        raise ValueError(
            f"expected inputs [N, C, H, W] in {path}, as the model takes them in {images.dtype}, got {images.shape}, "
            "whose channels come last: images.transpose(0, 3, 1, 2); or, as they are, pixels uint8: "
            "(255 * images).round().astype('uint8')"
        )
    if images.ndim == 4 and images.size and 2 < images.max() <= 255 and images.min() >= 0:
        raise ValueError(
            f"expected pixels in [0, 1] in {path}, since they are {images.dtype}, got up to {images.max():g}: "
            "images / 255; or uint8 [N, H, W, 1 or 3], images.astype('uint8'). Where the model divides by 255 itself: "
            f"{hook_hint(SCALED)}"
        )
    if labels.dtype.kind not in "iuf":
        raise ValueError(f"expected labels as numbers in {path}, got {labels.dtype}")
    wide = labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)
    return check_examples(str(path), to_tensor(images), torch.from_numpy(wide))


def _load_folder(root: Path) -> Examples:
    """Return the pictures of a folder with a folder for each class, by class and by name.

    Raises:
        ValueError: it has no such folders, an image can't be read, or they are of several sizes.
    """
    entries = [entry for entry in root.iterdir() if not entry.name.startswith(".")]
    if not any(entry.is_dir() for entry in entries):
        got = "pictures alone" if any(entry.suffix.lower() in SUFFIXES for entry in entries) else "no folders"
        raise ValueError(f"expected labels beside images, got {got} in the folder {root}: {LABEL_HINT}")
    names = list_classes(root)
    if all(name.isdecimal() for name in names):
        names = tuple(sorted(names, key=int))
    files, places = list_images(root, names)
    numbers = (
        torch.tensor([int(name) for name in names]) if all(map(str.isdecimal, names)) else torch.arange(len(names))
    )
    pixels = torch.from_numpy(decode_images(files, None, _common_mode(files)))
    return Examples(pixels.permute(0, 3, 1, 2).float().div(255).contiguous(), torch.tensor([*numbers])[places])


def _common_mode(files: Sequence[Path]) -> Mode:
    """Return whether all pictures are gray, by their headers; what is wrong with one is said by what decodes it."""
    try:
        for path in files:
            with Image.open(path, formats=FORMATS) as opened:
                if opened.mode not in {"1", "L", "LA"}:
                    return "color"
    except PILLOW_ERRORS:
        return "color"
    return "gray"
