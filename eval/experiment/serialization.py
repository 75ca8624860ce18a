"""Experiments as plain data: read strictly, written in full, some settings replaced."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attacks
from attacks.base import Attack, Chain
from defenses import defenses
from eval.experiment.capture_spec import CaptureSpec
from eval.experiment.spec import Entry, Experiment, FederationSpec, ObserveSpec, Published, ScoreSpec, TaskSpec
from eval.io.sanitize import shorten
from fl.method import methods
from fl.registry import Registry, UnknownNameError
from fl.settings import (
    ListError,
    SettingError,
    current_name,
    current_settings,
    fit_value,
    format_value,
    oldest_name,
    oldest_value,
    type_hints,
)
from fl.view import ThreatModel

T = TypeVar("T")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9+_.=@-]{0,199}")
"""What a method, a defense or an attack may be called in results: files are named by it."""
LABEL_WORDS = "at most 200 letters, digits, '+', '-', '_', '.', '=' and '@'"

SECTIONS: dict[str, Any] = {
    "task": TaskSpec,
    "federation": FederationSpec,
    "threat": ThreatModel,
    "observe": ObserveSpec,
    "score": ScoreSpec,
}
LISTS: dict[str, Registry[Any]] = {"method": methods, "defense": defenses, "attack": attacks.attacks}
CHANGES = {"method": ("task", "federation"), "attack": ("observe",)}
"""Sections that single entries of a list may have settings of their own in (`with`)."""


def build(data: Any) -> Experiment:
    """Return the experiment that plain data describes.

    Raises:
        ValueError: not an experiment; says which key is wrong and what would be right.
    """
    try:
        return _built(data)
    except ListError as error:
        raise SettingError(error.path, f"{error.reason}{_grid_hint(error)}") from error


def with_current_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with every setting by its name of today (`fl.settings`); warns of former ones.

    Raises:
        ValueError: a setting is given twice, by two of its names.
    """
    found = dict(data)
    for key in found:
        if key in LISTS:
            found[key] = _each(partial(_entry_with_current_names, key), found[key])
        elif key == "published":
            found[key] = _each(partial(current_settings, Published, owner=key), found[key])
        elif key in SECTIONS:
            found[key] = current_settings(SECTIONS[key], found[key], key)
    return found


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    return [change(item) for item in value] if isinstance(value, list) else change(value)


def _entry_with_current_names(key: str, value: Any) -> Any:
    """Return settings of an entry by today's names; those of a chain of attacks are its last part's."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return value
    last = value["name"].rpartition("+")[2]
    kind = LISTS[key].find(last)
    if not isinstance(kind, type):
        return value
    return {**current_settings(kind, {**value, "name": last}, value["name"]), "name": value["name"]}


def current_keys(experiment: Experiment, keys: Sequence[str]) -> list[str]:
    """Return the keys that lead to a setting, by their names of today: `attack`, `ig`, `order_candidates`."""
    holders: list[Any] = [experiment]
    found: list[str] = []
    for key in keys:
        entries = [holder for holder in holders if isinstance(holder, Entry)]
        own = [entry for entry in entries if key in {entry.label, entry.label.partition("@")[0]}]
        if own:
            found.append(key)
            holders = [entry.item for entry in own]
            continue
        holders = [part for holder in holders for part in _with_parts(holder)]
        if found == ["observe", "method"]:
            holders = [entry.item for entry in experiment.method]
        found.append(current_name(map(type, holders), key))
        values = [getattr(holder, found[-1], ()) for holder in holders]
        holders = [item for value in values for item in (value if isinstance(value, tuple) else [value])]
    return found


def _with_parts(holder: Any) -> list[Any]:
    """Return what settings under one key go to: an entry's object; of a chain of attacks its last part, too."""
    if isinstance(holder, Entry):
        return _with_parts(holder.item)
    return [holder, *_with_parts(holder.then)] if isinstance(holder, Chain) else [holder]


def _built(data: Any) -> Experiment:
    values = with_current_names(check_mapping(data, "the config"))
    check_keys(
        [*(f.name for f in dataclasses.fields(Experiment)), "sweep", "scales"], values, "the config"
    )  # these taken out before
    if absent := [key for key in ("task", "method") if key not in values]:
        raise ValueError(f"expected a value for {', '.join(absent)}, got none")
    built: dict[str, Any] = {
        key: _checked(Experiment, key, values[key], key) for key in ("title", "imports", "seeds") if key in values
    }
    for key, kind in SECTIONS.items():
        if key in values:
            built[key] = _section(kind, values[key], key)
    for key, registry in LISTS.items():
        if key in values:
            built[key] = _entries(values[key], key, registry)
    if "published" in values:
        given = values["published"] if isinstance(values["published"], list) else [values["published"]]
        built["published"] = tuple(_section(Published, item, "published") for item in given)
    experiment = Experiment(**built)
    for key in CHANGES:
        for entry in getattr(experiment, key):
            with_changes(experiment, entry.changes, f"{key} {entry.label!r}, with")
    return experiment


def _grid_hint(error: ListError) -> str:
    """Return how the list would make a grid, where the setting can be given several values one by one."""
    spread = {*LISTS, *(section for sections in CHANGES.values() for section in sections)}
    unnamed = any("." in key or key in {"first", "then"} for key in error.path)  # odd labels, parts of a chain
    if error.path[0] not in spread or unnamed:
        return ""
    key, values = ".".join(error.path), json.dumps(error.values)
    return f"; for a grid write `sweep: {{{key}: {values}}}` in the file, or `--set {key}={values.replace(', ', ',')}`"


def to_plain(experiment: Experiment | CaptureSpec, *, oldest_names: bool = False) -> dict[str, Any]:
    """Return the experiment in plain data with every default written out; `build(plain(x)) == x`.

    Args:
        experiment: any.
        oldest_names: whether settings have the first names that they ever had (`fl.settings`).
    """
    if isinstance(experiment, CaptureSpec):
        return _capture_to_plain(experiment, oldest_names=oldest_names)
    result: dict[str, Any] = {"title": experiment.title}
    if experiment.imports:
        result["imports"] = list(experiment.imports)
    for key, registry in {**SECTIONS, **LISTS}.items():
        value = getattr(experiment, key)
        if key in LISTS:
            result[key] = [_entry_spec(experiment, entry, registry, oldest_names) for entry in value]
        else:
            result[key] = section_spec(value, oldest_names=oldest_names)
    if oldest_names:
        own = experiment.observe.method.items()
        result["observe"]["method"] = dict(_first_of_methods(experiment, key, value) for key, value in own)
    published = [section_spec(figures, oldest_names=oldest_names) for figures in experiment.published]
    return {**result, "seeds": list(experiment.seeds), **({"published": published} if published else {})}


def _capture_to_plain(spec: CaptureSpec, *, oldest_names: bool) -> dict[str, Any]:
    """Return what an audit without a federation is of, in plain data: for readers, no config that could be run."""
    return {
        "title": spec.title,
        "audit": dict(spec.source),
        **({"imports": list(spec.imports)} if spec.imports else {}),
        "task": spec.task,
        "threat": section_spec(spec.threat, oldest_names=oldest_names),
        "observe": {"images": spec.images, "batch_size": spec.batch_size},
        "score": section_spec(spec.score, oldest_names=oldest_names),
        **{
            key: [_entry_spec(spec, entry, registry, oldest_names) for entry in getattr(spec, key)]
            for key, registry in LISTS.items()
        },
        "seeds": list(spec.seeds),
    }


def with_changes(experiment: Experiment, changes: Mapping[str, Any], where: str) -> Experiment:
    """Return the experiment with other values in its sections, by dotted key: `{"federation.rounds": 10}`.

    Raises:
        UnknownNameError: there is no such setting; says what is close.
        ValueError: a value that does not fit.
    """
    sections: dict[str, Any] = {}
    try:
        for key, value in changes.items():
            keys = current_keys(experiment, key.split("."))
            named = [keys[0]] if keys[0] in SECTIONS else SECTIONS  # all, for what is close to an unknown name
            data = {name: section_spec(sections.get(name, getattr(experiment, name))) for name in named}
            for place in resolve_paths(data, keys):
                place[keys[-1]] = copy.deepcopy(value)
            sections[keys[0]] = _section(SECTIONS[keys[0]], data[keys[0]], keys[0])
        return dataclasses.replace(experiment, **sections) if sections else experiment
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def resolve_paths(data: dict[str, Any], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the mappings in `data` that hold the last of `keys`, reached through the others.

    Raises:
        UnknownNameError: there are none; says which key is close.
        ValueError: what should hold the next key is a single value, or empty.
    """
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
        if not found:
            whole, value = ".".join(keys[: depth + 1]), holders[0][key]
            raise ValueError(
                f"{whole} is {format_value(value)}, with no {keys[depth + 1]!r} in it; set {whole} as a whole"
            )
    return found


def attack_spec(attack: Attack, *, oldest_names: bool = False) -> dict[str, Any]:
    """Return settings of an attack; a chain whose first part has its defaults in short, `name: peel+ig`.

    Args:
        attack: any.
        oldest_names: whether settings have the first names that they ever had (`fl.settings`).
    """
    if isinstance(attack, Chain):
        name = {"name": attacks.label(attack)}
        if attacks.build(attack_spec(attack.then) | name) == attack:
            return attack_spec(attack.then, oldest_names=oldest_names) | name
    return attacks.attacks.spec(attack, oldest_names=oldest_names)


def section_spec(section: Any, *, oldest_names: bool = False) -> dict[str, Any]:
    """Return settings of a section, every default written out.

    Args:
        section: any.
        oldest_names: whether settings have the first names that they ever had (`fl.settings`).
    """
    kind: type = type(section)
    found: dict[str, Any] = {}
    for key in (f.name for f in dataclasses.fields(section)):
        value: Any = getattr(section, key)
        if (registry := _registry(kind, key)) is not None:
            value = registry.spec(value, oldest_names=oldest_names)
        else:
            value = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
        if oldest_names:
            key, value = oldest_name(kind, key), oldest_value(kind, key, value)
        found[key] = value
    return found


def check_mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Return `value`, which must be settings.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, Mapping):
        raise SettingError(where.split("."), f"expected settings (key: value), got {shorten(repr(value), 200)}")
    return value


def check_keys(known: Sequence[str], values: Mapping[str, Any], where: str) -> None:
    """Check that all keys of `values` are known.

    Raises:
        UnknownNameError: one is not; says what is close.
    """
    for key in values:
        if key not in known:
            raise UnknownNameError(f"key of {where}", key, known)


def _section(kind: type[T], values: Any, where: str) -> T:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    check_keys([f.name for f in fields], check_mapping(values, where), where)
    required = [f.name for f in fields if f.default is dataclasses.MISSING is f.default_factory]
    if absent := [key for key in required if key not in values]:
        raise SettingError((where,), f"expected a value for {', '.join(absent)}, got none")
    return kind(**{key: _checked(kind, key, value, f"{where}.{key}") for key, value in values.items()})


def _registry(kind: type, key: str) -> Registry[Any] | None:
    return getattr(type_hints(kind)[key], "registry", None)


def _checked(kind: type, key: str, value: Any, where: str) -> Any:
    """Return `value` as the field `key` of `kind` has it; a single value will do for a list."""
    hint = type_hints(kind)[key]
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is tuple and not isinstance(value, list | tuple):
        value = [value]
    keys = where.split(".")
    registry = _registry(kind, key)
    try:
        if registry is not None and not dataclasses.is_dataclass(value):
            return registry.build(_with_names(value))
        return fit_value(kind, key, value)
    except SettingError as error:
        raise error.with_prefix(*keys, instead=1) from error
    except ValueError as error:
        raise SettingError(keys, str(error)) from error


def _entries(value: Any, key: str, registry: Registry[Any]) -> tuple[Entry[Any], ...]:
    entries = tuple(_parse_entry(item, key, registry) for item in (value if isinstance(value, list) else [value]))
    if not entries and key != "attack":  # accuracy and cost can be had without
        raise SettingError((key,), "expected at least one, got none")
    labels = [entry.label for entry in entries]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise SettingError((key,), f"{', '.join(twice)} is there twice; give one of them another label with `as`")
    return entries


def _parse_entry(value: Any, key: str, registry: Registry[Any]) -> Entry[Any]:
    settings = {"name": value} if isinstance(value, str) else dict(check_mapping(value, key))
    own: dict[str, Any] = {"as": None}
    own |= {"against": []} if key == "attack" else {}
    own |= {"with": {}} if key in CHANGES else {}
    given = {name: settings.pop(name, default) for name, default in own.items()}
    try:
        _check_settings(_with_names(settings), list(own), registry)
        item = registry.build(settings)
    except SettingError as error:
        label = str(given["as"] or settings["name"])
        raise error.with_prefix(key, label, instead=1) from error
    except ValueError as error:
        raise SettingError((key,), str(error)) from error
    label = _name(item) if given["as"] is None else str(given["as"])
    if not LABEL.fullmatch(label):
        raise SettingError((key,), f"expected `as` of {LABEL_WORDS}, got {shorten(repr(label), 200)}")
    against = _checked(Entry, "against", given.get("against", []), f"{key}.against")
    changes = dict(check_mapping(given.get("with", {}), f"{key}.with"))
    for name in changes:
        if "." not in name:
            raise SettingError(
                (key, "with"), f"expected keys such as {CHANGES[key][-1]}.rounds, got {format_value(name)}"
            )
        if (section := name.partition(".")[0]) not in CHANGES[key]:
            raise UnknownNameError(f"section in {key}.with", section, CHANGES[key])
    return Entry(label=label, item=item, against=against, changes=changes)


def _check_settings(settings: Mapping[str, Any], own: Sequence[str], registry: Registry[Any]) -> None:
    """Check that all keys are known; errors name the keys that every entry has, too."""
    entry = registry.get(str(settings.get("name", "")).rpartition("+")[2]) if "name" in settings else None
    known = [f.name for f in dataclasses.fields(entry)] if isinstance(entry, type) else []
    known += ["preset"] if getattr(entry, "presets", None) else []
    for key in settings:
        if key not in {"name", *known}:
            what = f"setting of {registry.kind} {settings['name']!r}" if entry else f"key of a {registry.kind}"
            raise UnknownNameError(what, key, ["name", *known, *own])


def _with_names(value: Any) -> Any:
    """Return `value` with everything that is called `name` as text."""
    if isinstance(value, Mapping):
        if not isinstance(value.get("name", ""), str):
            raise ValueError(f"expected a name, got {format_value(value['name'])}")
        for inner in value.values():
            _with_names(inner)
    return value


def _name(item: Any) -> str:
    return attacks.label(item) if isinstance(item, Attack) else str(item.name)


def _entry_spec(
    experiment: Experiment | CaptureSpec, entry: Entry[Any], registry: Registry[Any], oldest_names: bool
) -> dict[str, Any]:
    if isinstance(entry.item, Attack):
        spec = attack_spec(entry.item, oldest_names=oldest_names)
    else:
        spec = registry.spec(entry.item, oldest_names=oldest_names)
    if entry.label != _name(entry.item):
        spec["as"] = entry.label
    if entry.against:
        spec["against"] = list(entry.against)
    changes = copy.deepcopy(entry.changes)
    if oldest_names:
        changes = dict(_first_of_change(experiment, key, value) for key, value in changes.items())
    return {**spec, "with": changes} if changes else spec


def _first_of_change(experiment: Experiment | CaptureSpec, dotted: str, value: Any) -> tuple[str, Any]:
    """Return a setting of another section by its first names, and its value by that which this had."""
    holder: Any = experiment
    found = []
    for key in dotted.split("."):
        if dataclasses.is_dataclass(holder):
            key, value = oldest_name(type(holder), key), oldest_value(type(holder), key, value)
        found.append(key)
        holder = getattr(holder, key, None)
    return ".".join(found), value


def _first_of_methods(experiment: Experiment, key: str, value: Any) -> tuple[str, Any]:
    """Return a setting of methods by its first name, and its value by that which this had."""
    for kind in (type(entry.item) for entry in experiment.method):
        if any(f.name == key for f in dataclasses.fields(kind)):
            return oldest_name(kind, key), oldest_value(kind, key, value)
    return key, value


def _inside(value: Any, key: str) -> list[dict[str, Any]]:
    """Return the settings one level down; of a list of entries, those labeled `key` or made of it, by `key`."""
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        return []
    entries = [entry for entry in value if isinstance(entry, dict)]
    labels = [str(entry.get("as", entry.get("name"))) for entry in entries]
    own = [{key: e} for e, label in zip(entries, labels, strict=True) if key in {label, label.partition("@")[0]}]
    return own or entries
