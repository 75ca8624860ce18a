"""Partitions of one's own: what is none is refused with words that say what to do."""

from dataclasses import dataclass

import pytest
import torch
from torch import tensor

from fl.data import Dataset
from fl.data.partitions.checked_split import split_checked
from fl.data.partitions.partition import Iid, Partition, Partitioner
from fl.types import Batch

SET = Dataset(
    train=Batch(torch.zeros(6, 1, 2, 2), torch.zeros(6, dtype=torch.int64)),
    test=Batch(torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)),
    name="zeros",
    class_names=("a", "b"),
    source="made up",
)
TEST = tensor([0]), tensor([1])


@dataclass(frozen=True, kw_only=True)
class Mine(Partitioner):
    """One of whatever is given."""

    made: object

    def __call__(self, dataset):
        return self.made() if callable(self.made) else self.made


@pytest.fixture(autouse=True)
def named(monkeypatch):
    monkeypatch.setattr("fl.data.partitions.checked_split.partitions.spec", lambda own: {"name": "mine"})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, r"'mine': expected a Partition\(train=.*got NoneType"),
        (Partition((), ()), "at least one client"),
        (Partition((tensor([0]), tensor([6])), TEST), r"train images of client 1: expected indices in \[0, 6\).*got 6"),
        (Partition((tensor([0]), tensor([-1])), TEST), r"got -1 to -1"),
        (Partition((tensor([0.0]), tensor([1])), TEST), r"client 0: expected indices int64 \(n,\), got torch.float32"),
        (Partition((tensor([[0]]), tensor([1])), TEST), r"int64 \(n,\), got torch.int64 \(1, 1\)"),
        (Partition((tensor([True]), tensor([1])), TEST), r"mask.nonzero\(\).flatten\(\)"),
        (Partition(([0], [1]), TEST), r"got list; torch.as_tensor"),
        (Partition((tensor([0]), tensor([1])[:0]), TEST), "training images for every client, got none for 1"),
        (Partition((tensor([0]), tensor([1])), (tensor([0])[:0],) * 2), "test images for some client"),
        (lambda: [][0], r"raised IndexError: list index out of range \(test_checked_split.py, line"),
    ],
)
def test_what_is_no_partition_of_the_images_is_refused(made, said):
    with pytest.raises(ValueError, match=said):
        split_checked(Mine(made=made), SET)


def test_indices_of_another_integer_type_become_int64():
    found = split_checked(Mine(made=Partition((tensor([0], dtype=torch.int32), tensor([1])), TEST)), SET)
    assert [index.dtype for index in found.train] == [torch.int64] * 2
    assert split_checked(Iid(clients=2), SET).digest == Iid(clients=2)(SET).digest
