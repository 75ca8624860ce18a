"""What there is to choose from among data sets, partitions and augmentations."""

from fl.data import datasets
from fl.data.augment import augmentations
from fl.data.partitions.partition import partitions


def test_nothing_is_missing() -> None:
    assert datasets.names() == [
        "cifar10", "cifar100", "cinic10", "domain-folder", "emnist", "faces", "fashion_mnist", "folder",
        "handwritten62", "mnist", "npz", "office-home", "pacs", "photos", "pooled", "svhn", "tiny-imagenet", "vlcs",
    ]  # fmt: skip
    assert partitions.names() == ["class-groups", "dirichlet", "domains", "dominant", "iid", "shards"]
    assert augmentations.names() == ["crop-flip", "none"]
