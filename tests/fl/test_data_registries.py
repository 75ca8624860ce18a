"""Data sets, partitions and augmentations are their own configuration, and say what each setting means."""

import dataclasses
import re

import pytest
import yaml

from fl.data import datasets
from fl.data.augment import augmentations
from fl.data.partition import partitions
from fl.registry import Registry

ENTRIES = [(registry, name) for registry in (datasets, partitions, augmentations) for name in registry.names()]
EVERY = pytest.mark.parametrize(("registry", "name"), ENTRIES, ids=[f"{r.kind}-{name}" for r, name in ENTRIES])
NO_PAPER = {"folder", "none", "npz", "photos", "handwritten62"}
"""A user's own images, images as they are, and sets that no paper is about."""


def test_nothing_is_missing() -> None:
    assert datasets.names() == [
        "cifar10", "cifar100", "cinic10", "emnist", "faces", "fashion_mnist", "folder", "handwritten62", "mnist", "npz",
        "photos", "svhn", "tiny-imagenet",
    ]  # fmt: skip
    assert partitions.names() == ["dirichlet", "dominant", "iid", "shards"]
    assert augmentations.names() == ["crop-flip", "none"]
    for registry in (datasets, partitions, augmentations):
        assert registry.skips() == {}


@EVERY
def test_yaml_round_trip(registry: Registry, name: str) -> None:
    entry = dict(registry.examples())[name]
    again = registry.build(yaml.safe_load(yaml.safe_dump(registry.spec(entry))))
    assert again == entry
    assert type(again) is type(entry)


@EVERY
def test_docstrings_name_source_and_settings(registry: Registry, name: str) -> None:
    entry = registry.get(name)
    assert not entry.__doc__.startswith(f"{entry.__name__}(")  # what dataclass writes when there is none
    assert name in NO_PAPER or re.search(r"\b(19|20)\d\d\b|\bHyperFL\b", entry.__doc__)
    texts = "\n".join(base.__doc__ or "" for base in entry.__mro__)
    for setting in (field.name for field in dataclasses.fields(entry)):
        assert re.search(rf"^\s+{setting}: ", texts, re.MULTILINE), f"{name}: setting {setting!r} is not documented"
