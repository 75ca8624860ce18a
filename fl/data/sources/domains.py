"""Data sets of several domains: the same classes as photographs, drawings, sketches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fl.data import Dataset, Groups, datasets, stratified_split
from fl.data.sources.folders import decode_images, list_classes, list_images
from fl.data.sources.npz_files import DatasetMissingError, LimitedSource, Pixels, data_folder, find_file, read_pixels
from fl.ranges import OpenShare, Seed, Width
from fl.runtime.safe_paths import join_inside, printable_name
from fl.types import Batch

Labeled = tuple[list[Path], Tensor, Tensor]
"""Files, and label and domain of each (N,) int64."""


@dataclass(frozen=True, kw_only=True)
class _Domains(LimitedSource):
    """Images in `PATH/DOMAIN/CLASS/*.jpg`, the layout of DomainBed (Gulrajani, Lopez-Paz, ICLR 2021).

    A test part is held out of every class of every domain; partitions by domain share both out.

    Attributes:
        path: of the folder of domains; None looks in the data folder.
        size: height and width: the short side is resized to it, bicubic and antialiased, and the center square taken.
        test_share: share held out.
        seed: of that split, and of the order of the images.
    """

    stem: ClassVar[str]
    """Name of the folder in the data folder."""

    path: str | None = None
    size: Width = 32
    test_share: OpenShare = 0.1
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ValueError(f"expected size >= 1, got {self.size}")

    def load(self) -> Dataset:
        """Read the images.

        Raises:
            DatasetMissingError: there is no such folder.
            ValueError: domains differ in their classes, or an image can't be read; says which.
        """
        root = data_folder() / self.stem if self.path is None else Path(os.path.expanduser(self.path))
        if not root.is_dir():
            raise DatasetMissingError(
                f"no folder {root}: expected one with a folder for each domain, and in it one for each class; set path"
            )
        domains = list_classes(root)
        names = list_classes(join_inside(root, domains[0]))
        files, labels, groups = list_domains(root, domains, names)

        def read(index: Tensor) -> Batch:
            chosen = [files[i] for i in index.tolist()]
            return Pixels(decode_images(chosen, self.size, "color"), labels[index].numpy(), names).batch()

        return self._split(read, labels, groups, names, domains, f"images in {printable_name(root.resolve().name)}")

    def _split(
        self,
        read: Any,
        labels: Tensor,
        groups: Tensor,
        names: tuple[str, ...],
        domains: tuple[str, ...],
        source: str,
    ) -> Dataset:
        """Training and test part with the same share of every class of every domain; `read` gives images by index."""
        parts = stratified_split(groups * len(names) + labels, self.test_share, self.seed)
        kept = []
        for key, part, limit in zip(("", "test_"), parts, (self.limit, self.test_limit), strict=True):
            if limit is not None and limit > len(part):
                raise ValueError(f"expected {key}limit of at most {len(part)} images, got {limit}")
            kept.append(part[:limit])
        train, test = kept
        name: str = type(self).name  # type: ignore[attr-defined]
        return Dataset(read(train), read(test), name, names, source, Groups(groups[train], groups[test], domains))


@datasets.register("domain-folder")
@dataclass(frozen=True, kw_only=True)
class DomainFolder(_Domains):
    """Your own images of several domains: `PATH/DOMAIN/CLASS/*.png` (as DomainBed: Gulrajani, Lopez-Paz, ICLR 2021)."""

    stem: ClassVar[str] = "domains"

    @classmethod
    def example(cls) -> Self:
        """Return a folder of one's own."""
        return cls(path="pictures")


@datasets.register("pacs")
@dataclass(frozen=True, kw_only=True)
class Pacs(_Domains):
    """PACS (Li et al., ICCV 2017): 9,991 images of 7 classes; art painting, cartoon, photo, sketch.

    Without `path` and without a folder `pacs` in the data folder it takes `pacs64.npz` there, a file as `npz` reads it
    with `domains` [N] and `domain_names` beside: 2,240 of the images at 64x64, 80 of each class and domain.
    """

    stem: ClassVar[str] = "pacs"

    def load(self) -> Dataset:
        """Read the images, as `DomainFolder` does, or from the file.

        Raises:
            DatasetMissingError: neither folder nor file is there.
            ValueError: they do not hold what they should; says what.
        """
        if self.path is not None or (data_folder() / self.stem).is_dir():
            return super().load()
        path = find_file(
            "pacs64.npz", "Set path to the folder of PACS, with art_painting, cartoon, photo and sketch in it"
        )
        pixels, (groups, domains) = read_pixels(path), read_domains(path)

        def read(index: Tensor) -> Batch:
            images = np.stack([_resize(image, self.size) for image in pixels.images[index.numpy()]])
            return Pixels(images, pixels.labels[index.numpy()], pixels.class_names).batch()

        labels = torch.from_numpy(pixels.labels.astype(np.int64))
        return self._split(read, labels, groups, pixels.class_names, domains, path.name)


@datasets.register("office-home")
@dataclass(frozen=True, kw_only=True)
class OfficeHome(_Domains):
    """Office-Home (Venkateswara et al., CVPR 2017): 15,500 images of 65 classes; Art, Clipart, Product, Real World."""

    stem: ClassVar[str] = "office_home"


@datasets.register("vlcs")
@dataclass(frozen=True, kw_only=True)
class Vlcs(_Domains):
    """VLCS (Fang et al., ICCV 2013): 10,729 images of 5 classes; Caltech101, LabelMe, SUN09, VOC2007."""

    stem: ClassVar[str] = "VLCS"


def list_domains(root: Path, domains: tuple[str, ...], names: tuple[str, ...]) -> Labeled:
    """Return the images in `root/DOMAIN/CLASS`, domain by domain.

    Raises:
        ValueError: a domain lacks a class, or has another one.
    """
    files: list[Path] = []
    labels, groups = [], []
    for number, domain in enumerate(domains):
        found, mine = list_images(join_inside(root, domain), names)
        files += found
        labels.append(mine)
        groups.append(torch.full_like(mine, number))
    return files, torch.cat(labels), torch.cat(groups)


def read_domains(path: Path) -> tuple[Tensor, tuple[str, ...]]:
    """Return `domains` (N,) and `domain_names` of a `.npz` file; nothing in it is executed.

    Raises:
        ValueError: one is missing, or of another shape, type or range.
    """
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        if absent := {"domains", "domain_names"} - set(file.files):
            raise ValueError(f"expected domains and domain_names in {path}, got no {', '.join(sorted(absent))}")
        domains, names, count = file["domains"], file["domain_names"].astype(str), file["labels"].shape[0]
    fits = domains.dtype.kind in "iu" and domains.shape == (count,)
    if not fits or not 0 <= domains.min() <= domains.max() < len(names):
        raise ValueError(f"expected domains int [{count}] in [0, {len(names)}) in {path}, got {domains.dtype}")
    return torch.from_numpy(domains.astype(np.int64)), tuple(names.tolist())


def _resize(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
