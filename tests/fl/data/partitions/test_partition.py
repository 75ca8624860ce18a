import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl.data import Dataset, load
from fl.data.partitions.dominant_classes import (
    CHARACTER_GROUPS,
    TRIPLES,
    DominantGroups,
    DominantSplit,
    dominant_groups,
    published_groups,
)
from fl.data.partitions.partition import Iid, Partition, deal_iid, partitions
from fl.registry import UnknownNameError
from fl.seeds import stream
from fl.types import Batch

FOLDER = os.environ.get("HYPERLEAK_DATA", "")
needs_files = pytest.mark.skipif(not Path(FOLDER, "cifar10_train.npz").is_file(), reason="HYPERLEAK_DATA has no files")


def _labels(num_classes: int, each: int, seed: int = 0) -> Tensor:
    labels = torch.arange(num_classes * each) % num_classes
    return labels[torch.randperm(len(labels), generator=stream(seed, "labels"))]


def _dataset(num_classes: int, train: int, test: int) -> Dataset:
    parts = [
        Batch(torch.zeros(num_classes * n, 1, 1, 1), _labels(num_classes, n, seed))
        for seed, n in enumerate((train, test))
    ]
    return Dataset(*parts, "made up", tuple(map(str, range(num_classes))), "")


def _disjoint(parts: tuple[Tensor, ...]) -> bool:
    owned = torch.cat(parts)
    return len(owned.unique()) == len(owned)


def test_iid_deals_everything_evenly() -> None:
    parts = deal_iid(103, clients=10, size=None, seed=0)
    assert sorted(len(part) for part in parts) == [10] * 7 + [11] * 3
    assert sorted(torch.cat(parts).tolist()) == list(range(103))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert not torch.equal(parts[0], torch.arange(11))
    assert not torch.equal(parts[0], deal_iid(103, clients=10, size=None, seed=1)[0])


def test_iid_deals_a_given_size() -> None:
    parts = deal_iid(100, clients=3, size=33, seed=0)
    assert [len(part) for part in parts] == [33, 33, 33]
    assert _disjoint(parts)
    with pytest.raises(ValueError, match="expected 1 to 33 images for each of 3 clients, got 34"):
        deal_iid(100, clients=3, size=34, seed=0)
    with pytest.raises(ValueError, match="one image for each of 200 clients, got 100: take fewer clients"):
        deal_iid(100, clients=200, size=None, seed=0)
    with pytest.raises(ValueError, match="at least 1 client, got 0"):
        deal_iid(100, clients=0, size=None, seed=0)


@pytest.mark.parametrize(
    ("size", "uniform", "dominant"),
    [(600, 12, 172), (300, 6, 86)],  # what HyperFL's code deals for CIFAR-10
)
def test_dominant_counts_are_the_published_ones(size: int, uniform: int, dominant: int) -> None:
    counts = DominantSplit(num_classes=10, groups=TRIPLES, clients=20, size=size, share=0.2).class_counts()
    for client, row in enumerate(counts.tolist()):
        group = TRIPLES[client % 5]
        assert row == [dominant if k in group else uniform for k in range(10)]


@pytest.mark.parametrize("size", [1, 7, 197, 592, 601])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_counts_add_up_and_remainders_are_dealt_in_turn(size: int, share: float) -> None:
    counts = DominantSplit(num_classes=10, groups=TRIPLES, clients=20, size=size, share=share).class_counts()
    assert (counts.sum(1) == size).all()
    uniform = round(share * size)
    for k in range(10):
        exact = 20 * uniform / 10 + sum(4 * (size - uniform) / 3 for group in TRIPLES if k in group)
        assert abs(counts[:, k].sum() - exact) <= 3


def test_groups_of_characters() -> None:
    assert published_groups(62) == CHARACTER_GROUPS
    assert [len(group) for group in CHARACTER_GROUPS] == [10, 26, 26]
    labels = _labels(62, 40)
    parts = dominant_groups(labels, DominantSplit(num_classes=62, groups=CHARACTER_GROUPS, clients=3, size=200), seed=0)
    for part, group in zip(parts, CHARACTER_GROUPS, strict=True):
        inside = sum((labels[part] == k).sum().item() for k in group)
        assert inside >= 160
    with pytest.raises(ValueError, match=r"expected groups for 2 classes, e\.g\. \(\(0,\), \(1,\)\)"):
        published_groups(2)


def test_clients_get_what_the_counts_say_and_nothing_twice() -> None:
    labels = _labels(10, 152)
    split = DominantSplit(num_classes=10, groups=TRIPLES, clients=20, size=60, share=0.2)
    parts = dominant_groups(labels, split, seed=5)
    counts = split.class_counts()
    for part, row in zip(parts, counts, strict=True):
        assert labels[part].bincount(minlength=10).tolist() == row.tolist()
    assert _disjoint(parts)  # to the last image of the even classes
    again = dominant_groups(labels, split, seed=5)
    other = dominant_groups(labels, split, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(parts, other, strict=True))


def test_too_few_images_say_what_fits() -> None:
    dataset = _dataset(10, 1500, 500)
    with pytest.raises(
        ValueError, match=r"expected train_size of at most 592 for 20 clients, got 600: class 0 has 1500 .* 1520 are"
    ):
        DominantGroups()(dataset)
    with pytest.raises(ValueError, match="expected test_size of at most 197 for 20 clients, got 198"):
        DominantGroups(train_size=592, test_size=198)(dataset)
    assert DominantGroups(train_size=592, test_size=197)(dataset).overlap == {"train": 0, "test": 0}


def test_shared_images_are_counted() -> None:
    partition = DominantGroups(disjoint=False)(_dataset(10, 1500, 500))
    # even classes are asked for 20 of 1500 and 260 of 500 images more than there are
    assert partition.overlap == {"train": 5 * 20, "test": 5 * 260}
    for part in (*partition.train, *partition.test):
        assert len(part.unique()) == len(part)
    with pytest.raises(ValueError, match="train_size of at most"):  # no client owns an image twice
        DominantGroups(disjoint=False)(_dataset(10, 100, 500))


def test_a_partition_is_hashed() -> None:
    partition = Partition((torch.tensor([0, 1]), torch.tensor([2])), (torch.tensor([0]), torch.tensor([0])))
    assert len(partition) == 2
    assert partition.overlap == {"train": 0, "test": 1}
    # SHA-256 of the text [[[0,1],[2]],[[0],[0]]]
    assert partition.digest == "60b9576040b0bc42f5166c46f4e586336b675a4cb21afe3912779e13fd5aa966"
    moved = Partition((torch.tensor([0]), torch.tensor([1, 2])), partition.test)
    assert moved.digest != partition.digest
    with pytest.raises(ValueError, match="expected train and test for every client, got 2 and 1"):
        Partition(partition.train, partition.test[:1])


def test_a_saved_partition_comes_back(tmp_path: Path) -> None:
    dataset = _dataset(10, 152, 50)
    partition = DominantGroups(train_size=60, test_size=15)(dataset)
    path = tmp_path / "partition.json"
    partition.save(path, dataset)
    again = Partition.load(path, dataset)
    assert again.digest == partition.digest
    assert all(
        torch.equal(a, b) for a, b in zip(again.train + again.test, partition.train + partition.test, strict=True)
    )
    Iid(clients=3)(dataset).save(path, dataset)  # replaces the first one
    assert len(Partition.load(path, dataset)) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["partition.json"]


def test_a_partition_that_can_not_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = _dataset(10, 20, 20)
    path = tmp_path / "partition.json"
    Iid(clients=3)(dataset).save(path, dataset)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            Iid(clients=4)(dataset).save(path, dataset)
    assert len(Partition.load(path, dataset)) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["partition.json"]


def test_a_damaged_partition_is_refused(tmp_path: Path) -> None:
    dataset = _dataset(10, 20, 20)
    path = tmp_path / "partition.json"
    Iid(clients=3)(dataset).save(path, dataset)
    text = path.read_text()
    good = json.loads(text)
    moved = json.loads(text)
    moved["train"][0][0], moved["train"][1][0] = moved["train"][1][0], moved["train"][0][0]
    for content, message in [
        (text[: len(text) // 2], "expected a partition as Partition.save writes it"),
        ("", "expected a partition as"),
        ("[1, 2]", "expected a partition as"),
        (json.dumps(good | {"train": 3}), "expected a partition as"),
        (json.dumps(good | {"train": [[0.5], [1], [2]]}), "expected lists of image numbers"),
        (json.dumps(good | {"train": [[True], [1], [2]]}), "expected lists of image numbers"),
        (json.dumps(good | {"train": [[-1], [1], [2]]}), "expected lists of image numbers"),
        (json.dumps(good | {"train": [[2**80], [1], [2]]}), "expected lists of image numbers"),
        (json.dumps({key: value for key, value in good.items() if key != "digest"}), "KeyError"),
        (json.dumps(good | {"train": good["train"][:2]}), "train and test for every client, got 2 and 3"),
        (json.dumps(moved), "expected a partition with digest .* is damaged"),
        (json.dumps(good | {"digest": "0"}), "expected a partition with digest 0, got"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            Partition.load(path, dataset)
    with pytest.raises(FileNotFoundError):
        Partition.load(tmp_path / "other.json", dataset)


def test_a_partition_of_another_data_set_is_refused(tmp_path: Path) -> None:
    dataset = _dataset(10, 20, 20)
    Iid(clients=3)(dataset).save(tmp_path / "partition.json", dataset)
    with pytest.raises(ValueError, match=r"expected a partition of train_size 300 in .*, got one of 200"):
        Partition.load(tmp_path / "partition.json", _dataset(10, 30, 20))
    with pytest.raises(ValueError, match=r"expected a partition of test_size 100 in .*, got one of 200"):
        Partition.load(tmp_path / "partition.json", _dataset(10, 20, 10))
    other = Dataset(
        Batch(dataset.train.inputs, dataset.train.labels.flip(0)), dataset.test, "x", dataset.class_names, ""
    )
    with pytest.raises(ValueError, match="expected a partition of labels"):
        Partition.load(tmp_path / "partition.json", other)


def test_partitions_never_change() -> None:
    dataset = _dataset(10, 152, 50)
    assert (
        DominantGroups(train_size=60, test_size=15)(dataset).digest
        == "6211307059fc2ec1c7a026ca2d65af03b3a48d5e2983b0166fa422fca6b41cb3"
    )
    assert Iid(clients=7)(dataset).digest == "5d3c7e7a02a0b5d5bd34eb6463878b3d6adf4df5de0989b8963ee31f4593c651"


def test_two_classes_of_faces_work_with_groups() -> None:
    dataset = load("faces")
    partitioner = partitions.build(
        {"name": "dominant", "clients": 4, "groups": [[0], [1]], "train_size": 40, "test_size": 10}
    )
    partition = partitioner(dataset)
    assert dataset.train.labels[partition.train[0]].bincount().tolist() == [36, 4]
    assert dataset.train.labels[partition.train[1]].bincount().tolist() == [4, 36]
    assert partition.overlap == {"train": 0, "test": 0}


def test_settings_that_do_not_fit_are_refused() -> None:
    for groups, message in [
        (((0, 10),), r"different classes in \[0, 10\), got \(0, 10\)"),
        (((1, 1),), "different classes"),
        (((),), "different classes"),
        ((), "at least one group"),
    ]:
        with pytest.raises(ValueError, match=message):
            DominantSplit(num_classes=10, groups=groups, clients=2, size=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"share in \[0, 1\], got 1.2"):
        DominantSplit(num_classes=10, groups=TRIPLES, clients=2, size=5, share=1.2)
    with pytest.raises(ValueError, match="size >= 1, got 0"):
        DominantSplit(num_classes=10, groups=TRIPLES, clients=2, size=0)
    with pytest.raises(UnknownNameError, match="unknown partition 'dominand'; did you mean 'dominant'"):
        partitions.build("dominand")


def test_specs_of_partitions_round_trip() -> None:
    for _, partitioner in partitions.examples():
        assert partitions.build(partitions.spec(partitioner)) == partitioner


@needs_files
def test_real_cifar10_fits_592_and_197() -> None:
    dataset = load("cifar10")
    partition = DominantGroups(train_size=592, test_size=197)(dataset)
    assert partition.overlap == {"train": 0, "test": 0}
    assert {len(part) for part in partition.train} == {592}
    assert {len(part) for part in partition.test} == {197}
    with pytest.raises(ValueError, match=r"train_size of at most 592 for 20 clients, got 600: .* 1520 are needed"):
        DominantGroups()(dataset)


@needs_files
def test_real_fashion_mnist_fits_the_published_600() -> None:
    partition = DominantGroups(train_size=600, test_size=197)(load("fashion_mnist"))
    assert partition.overlap["train"] == 0
