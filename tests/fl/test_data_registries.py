"""What there is to choose from among data sets, partitions and augmentations."""

from fl.data import datasets
from fl.data.augment import augmentations
from fl.data.partition import partitions


def test_nothing_is_missing() -> None:
    assert datasets.names() == [
        "cifar10", "cifar100", "cinic10", "emnist", "faces", "fashion_mnist", "folder", "handwritten62", "mnist", "npz",
        "photos", "svhn", "tiny-imagenet",
    ]  # fmt: skip
    assert partitions.names() == ["dirichlet", "dominant", "iid", "shards"]
    assert augmentations.names() == ["crop-flip", "none"]
