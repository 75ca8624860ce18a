"""Experiments in YAML: read strictly, overridden by dotted keys, written back in full.

```yaml
title: Faces, one image at a time
task: {dataset: faces, model: hyperfl-grey}
federation: {partition: {name: iid, clients: 4}, rounds: 5}
method:                                  # one or several; `as` gives an entry its own label
  - {name: fedavg, lr: 0.05}
  - {name: hyperfl, parametrisation: {name: hypernetwork, init: scaled}}
defense: none                            # every method is trained under every defence
attack:                                  # `against` names the methods it is run on; all by default
  - {name: ig, against: fedavg}
  - peel+ig
threat: {knows_labels: false}            # what the server knows beside the update
observe: {images: 8, batch_size: 1, method: {steps: 1, head_epochs: 0}}
seeds: [0]
score: {lpips: auto}
```
"""

from __future__ import annotations

import copy
import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

import attacks
from attacks.base import Attack, Chain
from defenses import defenses
from eval import yamlfile
from eval.experiment import Entry, Experiment, FederationSpec, Observe, Score, TaskSpec, check_taken
from fl.data import datasets
from fl.data.partition import partitions
from fl.method import methods
from fl.models import models
from fl.registry import Registry, UnknownNameError
from fl.types import ThreatModel

T = TypeVar("T")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9+_-]*")


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a YAML file, with `key=value` overrides (see `override`).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not an experiment; says which key is wrong and what would be right.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no config file {path}")
    try:
        experiment = read(yamlfile.parse(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for text in overrides:
        experiment = override(experiment, text)
    return experiment


def read(data: Any) -> Experiment:
    """The experiment that plain data (a parsed YAML document) describes.

    Raises:
        ValueError: as `load`.
    """
    values = dict(_mapping(data, "the config"))
    _check_keys(Experiment, values, "the config")
    if absent := [key for key in ("task", "method", "attack") if key not in values]:
        raise ValueError(f"expected a value for {', '.join(absent)}, got none")
    built: dict[str, Any] = {
        key: _checked(Experiment, key, values[key], key) for key in ("title", "seeds") if key in values
    }
    for key, kind in _SECTIONS.items():
        if key in values:
            built[key] = _section(kind, values[key], key)
    for key, registry in _LISTS.items():
        if key in values:
            built[key] = _entries(values[key], key, registry)
    return Experiment(**built)


def plain(experiment: Experiment) -> dict[str, Any]:
    """The experiment in plain data with every default written out; `read(plain(x)) == x`."""
    result: dict[str, Any] = {"title": experiment.title}
    for key, registry in {**_SECTIONS, **_LISTS}.items():
        value = getattr(experiment, key)
        result[key] = [_entry_spec(e, registry) for e in value] if key in _LISTS else _section_spec(value)
    return {**result, "seeds": list(experiment.seeds)}


def dump(experiment: Experiment) -> str:
    """The experiment as YAML with every default written out, always the same for equal experiments."""
    return yamlfile.dump(plain(experiment))


def override(experiment: Experiment, text: str) -> Experiment:
    """The experiment with one setting changed: `override(x, "attack.iterations=500")`.

    Under `method`, `defense` and `attack` a setting goes to every entry that has it; a label in between picks one
    entry: `attack.peel+ig.iterations=500`. Values are read as YAML: `seeds=[0, 1]`, `defense=prune`.

    Raises:
        UnknownNameError: nothing has such a setting; says what is close.
        ValueError: not `key=value`, a value that does not fit, or one that another setting overrules.
    """
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"expected key=value such as seeds=[0, 1] or attack.iterations=500, got {text!r}")
    try:
        given, wanted = yamlfile.parse(value), plain(experiment)
        for place in _places(wanted, keys):
            place[keys[-1]] = copy.deepcopy(given)
        after = read(wanted)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    if len(keys) > 1 and keys[:2] != ["observe", "method"]:  # the experiment itself checks the latter
        for place in _places(plain(after), keys):
            check_taken(given, place[keys[-1]], text)
    return after


# ---- reading ---------------------------------------------------------------------------------------------------------
_SECTIONS: dict[str, Any] = {
    "task": TaskSpec,
    "federation": FederationSpec,
    "threat": ThreatModel,
    "observe": Observe,
    "score": Score,
}
_LISTS: dict[str, Registry[Any]] = {"method": methods, "defense": defenses, "attack": attacks.attacks}
_REGISTRIES: dict[str, Registry[Any]] = {"dataset": datasets, "model": models, "partition": partitions}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected settings (key: value), got {value!r}")
    return value


def _check_keys(kind: Any, values: Mapping[str, Any], where: str) -> None:
    known = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise UnknownNameError(f"key of {where}", key, known)


def _section(kind: type[T], values: Any, where: str) -> T:
    _check_keys(kind, _mapping(values, where), where)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    required = [f.name for f in fields if f.default is dataclasses.MISSING is f.default_factory]
    if absent := [key for key in required if key not in values]:
        raise ValueError(f"{where}: expected a value for {', '.join(absent)}, got none")
    return kind(**{key: _checked(kind, key, value, f"{where}.{key}") for key, value in values.items()})


@cache
def _adapter(kind: type, key: str) -> tuple[TypeAdapter[Any], bool]:
    hint = typing.get_type_hints(kind)[key]
    return TypeAdapter(hint), typing.get_origin(hint) is tuple


def _checked(kind: type, key: str, value: Any, where: str) -> Any:
    """`value` as the field `key` of `kind` has it; a single value will do for a list."""
    if key in _REGISTRIES:
        try:
            return _REGISTRIES[key].build(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    adapter, several = _adapter(kind, key)
    if several and not isinstance(value, list | tuple):
        value = [value]
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{where}: {first['msg']}, got {first['input']!r}") from error


def _entries(value: Any, key: str, registry: Registry[Any]) -> tuple[Entry[Any], ...]:
    entries = tuple(_entry(item, key, registry) for item in (value if isinstance(value, list) else [value]))
    if not entries:
        raise ValueError(f"{key}: expected at least one, got none")
    labels = [entry.label for entry in entries]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"{key}: {', '.join(twice)} is there twice; give one of them another label with `as`")
    return entries


def _entry(value: Any, key: str, registry: Registry[Any]) -> Entry[Any]:
    settings = {"name": value} if isinstance(value, str) else dict(_mapping(value, key))
    label = settings.pop("as", None)
    against: Any = settings.pop("against", []) if registry is attacks.attacks else []
    try:
        item = attacks.build(settings) if registry is attacks.attacks else registry.build(settings)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    label = _name(item) if label is None else str(label)
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{key}: expected `as` of letters, digits, '+', '-' and '_', got {label!r}")
    return Entry(label=label, item=item, against=_checked(Entry, "against", against, f"{key}.against"))


def _name(item: Any) -> str:
    return attacks.label(item) if isinstance(item, Attack) else str(item.name)


def _entry_spec(entry: Entry[Any], registry: Registry[Any]) -> dict[str, Any]:
    spec = _attack_spec(entry.item) if isinstance(entry.item, Attack) else registry.spec(entry.item)
    if entry.label != _name(entry.item):
        spec["as"] = entry.label
    return {**spec, "against": list(entry.against)} if entry.against else spec


def _attack_spec(attack: Attack) -> dict[str, Any]:
    """Settings of an attack; of a chain whose first part has its defaults in the short form, `name: peel+ig`."""
    if isinstance(attack, Chain):
        short = {**_attack_spec(attack.then), "name": attacks.label(attack)}
        if attacks.build(short) == attack:
            return short
    return attacks.attacks.spec(attack)


def _section_spec(section: Any) -> dict[str, Any]:
    def value(key: str, item: Any) -> Any:
        if key in _REGISTRIES:
            return _REGISTRIES[key].spec(item)
        return list(item) if isinstance(item, tuple) else copy.deepcopy(item)

    return {f.name: value(f.name, getattr(section, f.name)) for f in dataclasses.fields(section)}


# ---- overriding ------------------------------------------------------------------------------------------------------
def _places(data: dict[str, Any], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The mappings in `data` that hold the last of `keys`, reached through the others."""
    free = list(keys[:2]) == ["observe", "method"] and len(keys) == 3
    found: list[dict[str, Any]] = [data]
    for depth, key in enumerate(keys):
        known = sorted({name for place in found for name in place})
        holders = [place for place in found if key in place]
        last = depth == len(keys) - 1
        if not holders and not (last and free):
            raise UnknownNameError("key", ".".join(keys[: depth + 1]), [".".join([*keys[:depth], k]) for k in known])
        if last:
            return found if free else holders
        found = [item for place in holders for item in _inside(place[key], keys[depth + 1])]
    return found


def _inside(value: Any, key: str) -> list[dict[str, Any]]:
    """The settings one level down; of a list of entries, those labelled `key` as a mapping from that label."""
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        return []
    entries = [entry for entry in value if isinstance(entry, dict)]
    labelled = [{key: entry} for entry in entries if entry.get("as", entry.get("name")) == key]
    return labelled or entries
