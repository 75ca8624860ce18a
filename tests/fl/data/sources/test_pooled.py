"""Data sets split anew, and HyperFedNet's groups of users."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fl.data import Dataset, Groups, load
from fl.data.partitions.label_skew import ClassGroups, Dirichlet
from fl.data.sources.embedded import Faces
from fl.data.sources.pooled import Pooled
from fl.types import Batch

FACES = Faces(size=8)


def made_up(classes: int, train: int = 40, test: int = 10) -> Dataset:
    first, second = (
        Batch(torch.arange(classes * n).float().view(-1, 1, 1, 1), torch.arange(classes * n) % classes)
        for n in (train, test)
    )
    return Dataset(first, second, "made up", tuple(map(str, range(classes))), "")


def rows(batch: Batch) -> list[tuple[float, ...]]:
    return sorted(tuple(image.flatten().tolist()) for image in batch.inputs)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_every_image_is_kept_once_and_the_share_is_that_of_every_class(share: float) -> None:
    given, pooled = FACES.load(), Pooled(source=FACES, test_share=share).load()
    both = [Batch(torch.cat([d.train.inputs, d.test.inputs]), d.train.labels) for d in (given, pooled)]
    assert rows(both[0]) == rows(both[1])
    for k in range(2):
        assert int((pooled.test.labels == k).sum()) == round(100 * share)
        assert int((pooled.train.labels == k).sum()) == 100 - round(100 * share)
    assert (pooled.name, pooled.class_names) == ("pooled faces", given.class_names)


def test_the_split_follows_its_own_seed_and_not_the_given_parts() -> None:
    first, again, other = (Pooled(source=FACES, seed=seed).load() for seed in (0, 0, 1))
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert rows(first.test) != rows(other.test)
    assert rows(first.test) != rows(FACES.load().test)
    built = load("pooled", source={"name": "faces", "size": 8})
    assert torch.equal(built.train.inputs, first.train.inputs)


def test_groups_go_with_their_images() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Grouped(Faces):
        """Faces whose group is told by their first pixel (made up for this test)."""

        def load(self) -> Dataset:
            found = replace(self, size=8)
            given = Faces.load(found)
            train, test = ((b.inputs[:, 0, 0, 0] > 0.5).long() for b in (given.train, given.test))
            return replace(given, groups=Groups(train, test, ("dark", "bright")))

    pooled = Pooled(source=Grouped(size=8)).load()
    assert pooled.groups is not None
    assert torch.equal(pooled.groups.train, (pooled.train.inputs[:, 0, 0, 0] > 0.5).long())
    assert torch.equal(pooled.groups.test, (pooled.test.inputs[:, 0, 0, 0] > 0.5).long())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_is_checked(share: float) -> None:
    with pytest.raises(ValueError, match=r"test_share: expected a number in \(0, 1\), got"):
        Pooled(source=FACES, test_share=share)


def test_every_user_holds_out_the_share_of_its_own_distribution() -> None:
    dataset = made_up(10, train=400, test=100)
    partition = Dirichlet(alpha=0.5, clients=10)(dataset)
    for train, test in zip(partition.train, partition.test, strict=True):
        first, second = (
            torch.bincount(b.labels[i], minlength=10) for b, i in ((dataset.train, train), (dataset.test, test))
        )
        assert abs(len(test) / (len(train) + len(test)) - 0.2) < 0.02
        assert (first / 4 - second).abs().max() <= 1.5


@pytest.mark.parametrize(("classes", "each"), [(10, 2), (100, 10)])
def test_neighbors_share_their_classes_and_groups_share_none(classes: int, each: int) -> None:
    dataset = made_up(classes)
    partition = ClassGroups(classes=each)(dataset)
    assert len(partition) == 20
    for indices, batch in ((partition.train, dataset.train), (partition.test, dataset.test)):
        for client, index in enumerate(indices):
            group = client // 4
            assert set(batch.labels[index].tolist()) == set(range(group * each, (group + 1) * each))
        assert len(torch.cat(indices).unique()) == sum(map(len, indices))
    assert all(len(index) == each * 10 for index in partition.train)
    assert ClassGroups(classes=each)(dataset).digest == partition.digest
    assert ClassGroups(classes=each, seed=1)(dataset).digest != partition.digest


def test_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="expected clients in 3 equal groups, got 20"):
        ClassGroups(groups=3)
    with pytest.raises(ValueError, match="expected at least 10 classes, 2 for each of 5 groups, got 4"):
        ClassGroups()(made_up(4))
    with pytest.raises(ValueError, match="expected a training and a test image for each of 20 clients"):
        ClassGroups()(made_up(10, test=1))
