"""Real images that come with scikit-image: nothing to download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fl.data import Dataset, Source, datasets, stratified_split
from fl.data.sources.folders import FORMER_MODES, Mode
from fl.ranges import OpenShare, Seed, Width
from fl.registry import UnknownNameError
from fl.types import Batch

PHOTOS = {
    "motorcycle": "motorcycle_left.png",
    "astronaut": "astronaut.png",
    "hubble": "hubble_deep_field.jpg",
    "chelsea": "chelsea.png",
    "tissue": "ihc.png",
    "coffee": "coffee.png",
    "retina": "retina.jpg",
    "rocket": "rocket.jpg",
    "camera": "camera.png",
    "coins": "coins.png",
}
"""Name to file; the label of a photograph is its place here. The last two are gray."""


def _photo_path(name: str) -> Traversable:
    file = resources.files("skimage") / "data" / name
    if not file.is_file():
        raise FileNotFoundError(f"expected {name} among scikit-image's own data; reinstall scikit-image")
    return file


@datasets.register("faces")
@dataclass(frozen=True, kw_only=True)
class Faces(Source):
    """100 faces and 100 other crops of Labeled Faces in the Wild (Huang et al., 2007), gray, 25x25 in the original.

    Attributes:
        size: height and width; the crops are resized bicubically (25 leaves them as they are).
        test_share: share of either class held out.
        seed: of the split.
    """

    size: Width = 28
    test_share: OpenShare = 0.2
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"expected size >= 1, got {self.size}")

    def load(self) -> Dataset:
        """Load 80 + 80 crops to train and 20 + 20 to test, at the default share."""
        images = _face_crops(self.size)
        labels = torch.arange(len(images)) // 100  # the file holds the faces first
        train, test = (Batch(images[i], labels[i]) for i in stratified_split(labels, self.test_share, self.seed))
        return Dataset(train, test, "faces", ("face", "not a face"), "LFW crops of scikit-image (lfw_subset)")


@lru_cache(maxsize=1)
def _face_crops(size: int) -> Tensor:
    """Return all crops (N, 1, size, size), kept for the next cell of a run: not to be changed."""
    with _photo_path("lfw_subset.npy").open("rb") as stream:
        crops = np.load(stream, allow_pickle=False)
    return torch.stack([_resize(torch.from_numpy(crop).float(), size) for crop in crops])[:, None]


def _resize(image: Tensor, size: int) -> Tensor:
    if tuple(image.shape) == (size, size):
        return image
    resized = Image.fromarray(image.numpy()).resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized)).clamp(0, 1)


@datasets.register("photos")
@dataclass(frozen=True, kw_only=True)
class Photos(Source):
    """Photographs of scikit-image: the center square, resized bicubically; ten classes of one image each.

    Attributes:
        names: the images to attack, in this order; labels are their places in `PHOTOS` (1, 3, 5, 7 by default).
        size: height and width.
        mode: "color" (3 channels) or "gray" (1 channel, ITU-R 601 luma of the resized image).
    """

    former_values: ClassVar[Mapping[str, Mapping[Any, Any]]] = FORMER_MODES

    names: tuple[str, ...] = ("astronaut", "chelsea", "coffee", "rocket")
    size: Width = 32
    mode: Mode = "color"

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in PHOTOS:
                raise UnknownNameError("photograph", name, list(PHOTOS))
        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError(f"expected names of different photographs, got {self.names}")
        if self.size < 1:
            raise ValueError(f"expected size >= 1, got {self.size}")

    def load(self) -> Dataset:
        """Return the named photographs as `train`, the others as `test` (nobody trains on them; not for skill)."""
        others = tuple(name for name in PHOTOS if name not in self.names)
        train, test = (self._batch(names) for names in (self.names, others))
        return Dataset(train, test, "photos", tuple(PHOTOS), "photographs of scikit-image")

    def _batch(self, names: tuple[str, ...]) -> Batch:
        classes = list(PHOTOS)
        channels = 3 if self.mode == "color" else 1
        inputs = torch.empty(len(names), channels, self.size, self.size)
        for row, name in zip(inputs, names, strict=True):
            row.copy_(self._image(name))
        return Batch(inputs, torch.tensor([classes.index(name) for name in names], dtype=torch.int64))

    def _image(self, name: str) -> Tensor:
        with _photo_path(PHOTOS[name]).open("rb") as stream, Image.open(stream) as opened:
            image = opened.convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.crop((left, top, left + side, top + side))
        small = square.resize((self.size, self.size), Image.Resampling.BICUBIC)
        pixels = np.array(small if self.mode == "color" else small.convert("L"), dtype=np.float32) / 255
        return torch.from_numpy(pixels).reshape(self.size, self.size, -1).permute(2, 0, 1)
