"""Partitions of one's own: what is none is refused with words that say what to do."""

from dataclasses import dataclass

import numpy as np
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
MASK = [False, True, False, True, False, False]
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
        (Partition((tensor([True]), tensor([1])), TEST), "mask with a value for each of 6 images, got torch.bool"),
        (Partition((tensor([0, 1]).to_sparse(), tensor([1])), TEST), r"client 0.*sparse_coo; give index.to_dense\(\)"),
        (Partition((tensor([0]).to("meta"), tensor([1])), TEST), "meta, which has no numbers"),
        (Partition(tensor([0, 1]), TEST), "a number alone; train and test are tuples"),
        (Partition(([0.0], [1]), TEST), "float64 .*give index.long"),
        (Partition(([0, True], [1]), TEST), "got list that is no array of whole numbers"),
        (Partition((["a"], [1]), TEST), "got list that is no array of whole numbers"),
        (Partition((np.ma.array([0, 1], mask=[0, 1]), [1]), TEST), r"give index.compressed\(\)"),
        (Partition(({0}, [1]), TEST), r"got set; sorted\(...\)"),
        (Partition((None, [1]), TEST), "got NoneType"),
        (Partition(([0], ([][0] for _ in "a")), TEST), r"its indices raised IndexError.*line \d+"),
        (lambda: Partition(None, TEST), "expected train as a tuple.*got NoneType"),
        (lambda: Partition({"a": [0], "b": [1]}, TEST), "expected train as a tuple.*got dict"),
        (Partition((tensor([0]), tensor([1])[:0]), TEST), "training images for every client, got none for 1"),
        (Partition((tensor([0]), tensor([1])), (tensor([0])[:0],) * 2), "test images for some client"),
        (lambda: [][0], r"raised IndexError: list index out of range \(test_checked_split.py, line"),
    ],
)
def test_what_is_no_partition_of_the_images_is_refused(made, said):
    with pytest.raises(ValueError, match=said):
        split_checked(Mine(made=made), SET)


@pytest.mark.parametrize(
    "index",
    [
        [1, 3],
        (1, 3),
        range(1, 4, 2),
        np.array([1, 3], dtype=np.uint16),
        tensor([1, 3], dtype=torch.uint32),
        np.array([1, 3], dtype=">i2"),
        [np.int32(1), tensor(3)],
        MASK,
        np.array(MASK),
        tensor(MASK),
    ],
    ids=repr,
)
def test_indices_are_taken_in_any_form_that_means_one_thing(index):
    found = split_checked(Mine(made=Partition((index, (i for i in [0])), iter(TEST))), SET)
    assert [part.tolist() for part in found.train] == [[1, 3], [0]]


def test_indices_of_another_integer_type_become_int64():
    found = split_checked(Mine(made=Partition((tensor([0], dtype=torch.int32), tensor([1])), TEST)), SET)
    assert [index.dtype for index in found.train] == [torch.int64] * 2
    assert split_checked(Iid(clients=2), SET).digest == Iid(clients=2)(SET).digest
