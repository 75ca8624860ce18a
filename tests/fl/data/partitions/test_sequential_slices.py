"""The official slices, and the sharing between clients that was measured in the official code's index lists."""

import collections
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fl.data import Dataset
from fl.data.partitions.dominant_classes import (
    CHARACTER_GROUPS,
    TRIPLES,
    DominantGroups,
    DominantSplit,
    sequential_slices,
)
from fl.data.partitions.overlap import describe_partition, format_report
from fl.data.partitions.partition import Iid, Partition
from fl.seeds import stream
from fl.types import Batch


def _labels(counts: list[int], seed: int = 0) -> Tensor:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return labels[torch.randperm(len(labels), generator=stream(seed, "labels"))]


def _dataset(name: str, train: list[int], test: list[int]) -> Dataset:
    parts = [Batch(torch.zeros(sum(counts), 0, 1, 1), _labels(counts, s)) for s, counts in enumerate((train, test))]
    return Dataset(*parts, name, tuple(map(str, range(len(train)))), "")


CIFAR10 = _dataset("cifar10", [5000] * 10, [1000] * 10)
FASHION = _dataset("fashion_mnist", [6000] * 10, [1000] * 10)


def _owners(parts: tuple[Tensor, ...]) -> dict[int, int]:
    """How many images have so many owners."""
    images = collections.Counter(i for part in parts for i in part.tolist())
    return dict(collections.Counter(images.values()))


def test_20_clients_of_cifar_and_fashion_mnist_share_no_training_image() -> None:
    for dataset in (CIFAR10, FASHION):
        partition = DominantGroups(compat=True)(dataset)
        assert partition.overlap["train"] == 0
        counts = torch.bincount(dataset.train.labels[partition.train[7]], minlength=10).tolist()
        assert counts == [172 if k in (4, 5, 6) else 12 for k in range(10)]
    # the first client's slices start at image 2000 of each class, in file order
    first = DominantGroups(compat=True)(CIFAR10).train[0]
    third = first[CIFAR10.train.labels[first] == 3]
    assert third.tolist() == (CIFAR10.train.labels == 3).nonzero().flatten()[2000:2012].tolist()


def test_100_clients_of_cifar_share_what_was_measured() -> None:
    partition = DominantGroups(clients=100, compat=True)(CIFAR10)
    assert _owners(partition.train) == {1: 46_328 - 13_672, 2: 13_672}
    test = _owners(partition.test)
    assert sum(count for n, count in test.items() if n > 1) == 9_540
    assert max(test) == 4
    assert partition.overlap == {"train": 13_672, "test": 9_540}


def test_20_clients_of_fashion_mnist_share_test_images() -> None:
    partition = DominantGroups(test_size=600, compat=True)(FASHION)
    assert partition.overlap == {"train": 0, "test": 2_772}


def test_emnist_counts_on_without_the_remainder() -> None:
    emnist = _dataset("emnist", [3000] * 62, [500] * 62)
    partition = DominantGroups(train_size=1000, test_size=600, compat=True)(emnist)
    assert partition.overlap["train"] == 240
    for client, part in enumerate(partition.train):
        counts = torch.bincount(emnist.train.labels[part], minlength=62)
        group = CHARACTER_GROUPS[client % 3]
        inside = counts[list(group)] - torch.tensor([17 if k == 61 else 3 for k in group])
        assert inside.tolist() == ([80] * 10 if client % 3 == 0 else [30] * 25 + [50])
    split = DominantSplit(num_classes=62, groups=CHARACTER_GROUPS, clients=20, size=1000)
    plain = sequential_slices(emnist.train.labels, split)
    assert _owners(plain) == {1: 20_000}
    assert _owners(sequential_slices(emnist.train.labels, split, rewind=True)) == {1: 19_520, 2: 240}


def test_a_class_that_runs_out_starts_anew() -> None:
    labels = torch.tensor([0] * 10 + [1] * 10)
    split = DominantSplit(num_classes=2, groups=((0,), (1,)), clients=5, size=4, share=0.5)
    parts = sequential_slices(labels, split, offset=3)
    assert [part.tolist() for part in parts] == [
        [3, 4, 5, 13],  # one of each class, then two of class 0
        [6, 14, 15, 16],
        [7, 8, 9, 17],
        [0, 10, 11, 18],  # class 0 is used up; of class 1 one image is left and two are needed: it is left out
        [1, 2, 3, 12],
    ]
    late = sequential_slices(labels, replace(split, clients=1), offset=2000)
    assert late[0].tolist() == [0, 1, 2, 10]  # a class smaller than the offset starts at its first image


def test_slices_that_do_not_fit_are_refused() -> None:
    labels = torch.tensor([0] * 10 + [1] * 10)
    split = DominantSplit(num_classes=2, groups=((0,), (1,)), clients=2, size=10)
    with pytest.raises(ValueError, match="smaller train_size: class 0 has 10 images and one client's slice is 12"):
        sequential_slices(labels, replace(split, size=15, size_name="train_size"))
    with pytest.raises(ValueError, match="smaller size: client 0 would hold 1 of its images twice"):
        sequential_slices(labels, split, offset=2)
    with pytest.raises(ValueError, match=r"share in \[0, 1\], got 2"):
        replace(split, share=2.0)


def test_unequal_classes_keep_to_their_own_images() -> None:
    labels = _labels([700, 300, 900, 400, 500, 800, 450, 350, 600, 550])
    for part in sequential_slices(labels, DominantSplit(num_classes=10, groups=TRIPLES, clients=20, size=300)):
        assert torch.bincount(labels[part], minlength=10).sort().values.tolist() == [6] * 7 + [86] * 3


def test_a_report_says_who_shares_what() -> None:
    dataset = _dataset("made up", [3, 2], [1, 1])
    partition = Partition(
        (torch.tensor([0, 1, 2]), torch.tensor([1, 2]), torch.tensor([2])), tuple(torch.tensor([0]) for _ in range(3))
    )
    found = describe_partition(partition, dataset)
    assert found["digest"] == partition.digest
    assert found["clients"] == 3
    labels = dataset.train.labels
    assert found["train"] == {
        "images": 5,
        "owners": [2, 1, 1, 1],
        "shared": 2,
        "pairs": [[0, 1, 2], [0, 2, 1], [1, 2, 1]],
        "sizes": [3, 2, 1],
        "counts": [[int((labels[part] == k).sum()) for k in range(2)] for part in partition.train],
    }
    assert found["test"]["owners"] == [1, 0, 0, 1]
    text = "\n".join(format_report(found))
    assert "training: 3 of 5 images, 1 to 3 per client\n  2 images have more than one owner: 1 have 2, 1 have 3" in text
    assert "  clients 0 and 1 share 2, 0 and 2 share 1, 1 and 2 share 1\n" in text
    assert "test: 1 of 2 images, 1 per client" in text


def test_a_report_of_the_published_slices() -> None:
    partition = DominantGroups(clients=100, compat=True)(CIFAR10)
    found = describe_partition(partition, CIFAR10)
    assert found["train"]["shared"] == 13_672
    assert found["test"]["owners"][2:] == [3_530, 1_424, 4_586]
    a, b, count = found["test"]["pairs"][17]
    assert count == len(set(partition.test[a].tolist()) & set(partition.test[b].tolist()))
    # an image of two owners is in one pair, one of three in three, one of four in six
    assert sum(row[2] for row in found["test"]["pairs"]) == 3_530 + 3 * 1_424 + 6 * 4_586
    text = format_report(found)
    assert text[2] == "  13672 images have more than one owner: 13672 have 2"
    assert text[-100] == "client 0 trains on 0: 172, 1: 172, 2: 172, 3: 12, 4: 12, 5 more: 60"
    plain = format_report(describe_partition(Iid(clients=4)(CIFAR10), CIFAR10))
    assert plain[1:3] == ["training: 50000 of 50000 images, 12500 per client", "  no image has more than one owner"]
