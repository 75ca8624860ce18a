"""What every registered entry keeps to: it is its own configuration, and says where it comes from."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest
import yaml

from attacks import attacks
from defenses import defenses
from eval.experiment.docstrings import citations
from fl.data import datasets
from fl.data.augment import augmentations
from fl.data.partitions.partition import partitions
from fl.losses import losses
from fl.method import methods
from fl.models import models
from fl.parametrization import parametrizations
from fl.registry import Registry

REGISTRIES: list[Registry] = [
    methods,
    attacks,
    defenses,
    parametrizations,
    models,
    datasets,
    partitions,
    augmentations,
    losses,
]
ENTRIES = [(registry, name) for registry in REGISTRIES for name in registry.names()]
EVERY = pytest.mark.parametrize(
    ("registry", "name"), ENTRIES, ids=[f"{registry.kind}-{name}" for registry, name in ENTRIES]
)
NO_PAPER = {
    "none": "no defense",
    "chain": "combines two attacks",
    "direct": "no generator",
    "headless": "ours",
    "backsolve": "ours",
    "linear": "for tests and demonstrations",
    "tiny": "for tests and demonstrations",
    "function": "a user's own network",
    "folder": "a user's own images",
    "npz": "a user's own images",
    "photos": "no paper is about them",
    "handwritten62": "no paper is about them",
}


@EVERY
def test_yaml_round_trip(registry: Registry, name: str) -> None:
    entry = dict(registry.examples())[name]
    again = registry.build(yaml.safe_load(yaml.safe_dump(registry.spec(entry))))
    assert again == entry
    assert type(again) is type(entry)
    assert registry.spec(again) == registry.spec(entry)


@EVERY
def test_docstrings_name_their_source(registry: Registry, name: str) -> None:
    text = registry.get(name).__doc__ or ""
    assert len(text.split()) >= 3
    assert not text.startswith(f"{registry.get(name).__name__}(")  # what dataclass writes when there is none
    text += sys.modules[registry.get(name).__module__].__doc__ or ""
    if name not in NO_PAPER:
        assert re.search(r"\b(19|20)\d\d\b|\bHyperFL\b", text), f"{name}: expected a source, got {text!r}"


@pytest.mark.parametrize("name", sorted(set(methods.names()) - {"local"}))
def test_methods_cite_a_paper_of_their_own(name: str) -> None:
    described = type("Described", (), {"__doc__": methods.get(name).__doc__})  # without what it builds on
    assert citations(described), f"{name}: expected (Authors, VENUE YEAR) in its docstring"


@EVERY
def test_every_setting_is_documented(registry: Registry, name: str) -> None:
    entry = registry.get(name)
    if not isinstance(entry, type):
        return
    texts = "\n".join(base.__doc__ or "" for base in entry.__mro__)
    for setting in (field.name for field in dataclasses.fields(entry)):
        assert re.search(rf"^\s+{setting}: ", texts, re.MULTILINE), f"{name}: setting {setting!r} is not documented"


def test_nothing_is_left_out() -> None:
    for registry in REGISTRIES:
        assert registry.skipped_modules() == {}


@pytest.mark.parametrize("kind", ["method", "attack", "defense"])
def test_every_entry_says_in_plain_words_what_it_does(kind: str) -> None:
    registry = {"method": methods, "attack": attacks, "defense": defenses}[kind]
    seen: dict[str, str] = {}
    for name in registry.names():
        if name == "chain":  # says what its two parts say
            continue
        words = registry.get(name).plain
        assert words.endswith("."), f"{kind} {name} has no plain words"
        assert words not in seen, f"{kind} {name} has the words of {seen[words]}"
        seen[words] = name


@pytest.mark.parametrize("name", attacks.names())
def test_an_attack_says_what_its_server_knows(name: str) -> None:
    assert "Threat model: " in str(attacks.get(name).__doc__)
