"""A data set split anew: training and test images put together, then the same share of every class held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fl.data import Dataset, Groups, Source, datasets, stratified_split
from fl.ranges import OpenShare, Seed
from fl.types import Batch


@datasets.register("pooled")
@dataclass(frozen=True, kw_only=True)
class Pooled(Source):
    """Pools training and test images of a data set and splits them anew, as HyperFedNet does (Chen et al., 2024, V-A).

    A partition that deals fractions of every class (`dirichlet`, `iid` in expectation) then gives every client about
    that split, too, of the same distribution.

    Attributes:
        source: the data set.
        test_share: share of every class held out, in (0, 1).
        seed: of the split.
    """

    source: Source
    test_share: OpenShare = 0.2
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ValueError(f"expected test_share in (0, 1), got {self.test_share}")

    @classmethod
    def example(cls) -> Pooled:
        """Return the pooled faces that come with scikit-image."""
        return cls(source=datasets.build({"name": "faces", "size": 8}))

    def load(self) -> Dataset:
        """Read the images and split them.

        Raises:
            DatasetMissingError: the data set's file is not there.
            ValueError: a class is too small for the share.
        """
        given = self.source.load()
        inputs = torch.cat([given.train.inputs, given.test.inputs])
        labels = torch.cat([given.train.labels, given.test.labels])
        first, second = stratified_split(labels, self.test_share, self.seed)
        groups = None
        if given.groups is not None:
            every = torch.cat([given.groups.train, given.groups.test])
            groups = Groups(every[first], every[second], given.groups.names)
        return Dataset(
            train=Batch(inputs[first], labels[first]),
            test=Batch(inputs[second], labels[second]),
            name=f"pooled {given.name}",
            class_names=given.class_names,
            source=f"{given.source}; pooled, {self.test_share:g} of every class held out",
            groups=groups,
        )
