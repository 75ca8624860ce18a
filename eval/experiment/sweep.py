"""Settings changed by dotted keys: one value (`--set attack.tv_weight=1e-2`), or several that make a grid.

A list for a setting that takes one value spreads the entries that have it: `attack.ig.tv_weight=[1e-4, 1e-2]` makes
of `ig` the entries `ig@tv_weight=0.0001` and `ig@tv_weight=0.01`. Settings of `task` and `federation` spread the
methods, as in `fedavg@rounds=10`, settings of `observe` the attacks; the others are one for a whole table. Labels have
today's name of the setting, also where it was given by a former one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eval.experiment.serialization import CHANGES, LISTS, build, current_keys, resolve_paths, to_plain, with_changes
from eval.experiment.spec import Entry, Experiment, check_not_overruled, check_published
from eval.io import yaml12
from fl.settings import SettingError

MAX_ENTRIES = 2000
"""Entries that a grid may come to: each is checked as a whole, and trained or run."""
Scalar = str | int | float | bool | None


def override(experiment: Experiment, text: str) -> Experiment:
    """Return the experiment with one setting changed: `override(x, "attack.iterations=500")`.

    Under `method`, `defense` and `attack` a setting goes to every entry that has it; a label in between picks one
    entry: `attack.peel+ig.iterations=500`. Values are read as YAML: `seeds=[0, 1]`, `defense=prune`.

    Raises:
        UnknownNameError: nothing has such a setting; says what is close.
        ValueError: not `key=value`, a value that does not fit, or one that another setting overrules.
    """
    keys, value = parse_override(text)
    try:
        return _set(experiment, keys, yaml12.parse(value))
    except ValueError as error:
        raise _named_once(text, keys, error) from error


def sweep_override(experiment: Experiment, text: str) -> dict[str, Any] | None:
    """Return key and values of an override that gives several to a setting that takes one; None for any other.

    Raises:
        ValueError: as `override`.
    """
    keys, value = parse_override(text)
    try:
        given = yaml12.parse(value)
        if not isinstance(given, list) or len(keys) == 1 or not given:
            return None
        data, current = to_plain(experiment), current_keys(experiment, keys)
        if any(isinstance(place.get(current[-1]), list | dict) for place in resolve_paths(data, current)):
            return None
    except ValueError as error:
        raise _named_once(text, keys, error) from error
    try:
        _set(experiment, keys, given)
    except ValueError:  # it takes one value, then
        return {".".join(keys): given}
    return None


def expand_sweep(experiment: Experiment, sweep: Mapping[str, Any]) -> Experiment:
    """Return the experiment with an entry for every value of every key, in the order of the keys.

    Raises:
        UnknownNameError: there is no such setting, or no label that published figures are of; says what is close.
        ValueError: values that can't be told apart in a label, or a setting that is one for the whole table.
    """
    meant = {key: current_keys(experiment, str(key).split(".")) for key in sweep}
    for key, values in sweep.items():
        if twice := next((k for k in meant if k != key and meant[k] == meant[key]), None):
            raise ValueError(f"sweep: expected it once, got it as {key} and as {twice}, which name the same setting")
        many = len(values) if isinstance(values, list) else 1
        if many * sum(len(getattr(experiment, kind)) for kind in LISTS) > MAX_ENTRIES:
            raise ValueError(
                f"sweep, {key}: expected a grid of at most {MAX_ENTRIES} methods, defenses and attacks, got more"
            )
        try:
            experiment = _expand_key(experiment, str(key), values)
        except ValueError as error:
            raise _named_once(f"sweep, {key}", str(key).split("."), error) from error
    check_published(experiment)
    return experiment


def with_current_labels(experiment: Experiment, sweep: Mapping[str, Any]) -> Experiment:
    """Return the experiment with published figures of `ig@tv=1` as those of `ig@tv_weight=1`, as sweeps call it."""
    current = {(keys := key.split("."))[-1]: current_keys(experiment, keys)[-1] for key in map(str, sweep)}
    former = {key: now for key, now in current.items() if key != now}
    if not former:
        return experiment
    named = re.compile(rf"@({'|'.join(map(re.escape, former))})=")

    def renamed(label: str) -> str:
        return named.sub(lambda found: f"@{former[found[1]]}=", label)

    published = tuple(
        replace(
            figures,
            method=renamed(figures.method),
            attack=None if figures.attack is None else renamed(figures.attack),
            reference_method=renamed(figures.reference_method),
        )
        for figures in experiment.published
    )
    return replace(experiment, published=published)


def experiment_of(experiment: Experiment, method: Entry[Any], attack: Entry[Any] | None) -> Experiment:
    """Return the experiment as one method and one attack have it: with the settings that are theirs alone.

    Raises:
        ValueError: these do not fit each other.
    """
    changes = {**method.changes, **(attack.changes if attack else {})}
    return with_changes(experiment, changes, f"{method.label} under {attack.label}" if attack else method.label)


def parse_override(text: str) -> tuple[list[str], str]:
    """Return the keys and the value, still text, of `key=value`.

    Raises:
        ValueError: it is no such thing.
    """
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"expected key=value such as seeds=[0, 1] or attack.iterations=500, got {text!r}")
    return keys, value


def _named_once(text: str, keys: Sequence[str], error: ValueError) -> ValueError:
    """Return an error about the setting that `text` is of, which it names once."""
    once = isinstance(error, SettingError) and list(error.path) == list(keys)
    return ValueError(f"{text}: {error.reason if once else error}")  # type: ignore[attr-defined]


def _set(experiment: Experiment, keys: Sequence[str], value: Any) -> Experiment:
    keys = current_keys(experiment, keys)
    data = {"published": [], **to_plain(experiment)}
    for place in resolve_paths(data, keys):
        if len(keys) == 2 and any(place.get(keys[1]) is entry for entry in _listed(data, keys[0])):
            raise ValueError(
                f"{keys[1]!r} is an entry, not a setting: --without {keys[1]} leaves it out, "
                f"{'.'.join(keys)}.KEY=VALUE changes a setting of it"
            )
        place[keys[-1]] = copy.deepcopy(value)
    after = build(data)
    if len(keys) > 1 and list(keys[:2]) != ["observe", "method"]:  # the experiment itself checks the latter
        for place in resolve_paths(to_plain(after), keys):
            check_not_overruled(value, place[keys[-1]], keys[-1])
    return after


def _listed(data: Mapping[str, Any], key: str) -> list[Any]:
    return data[key] if key in LISTS else []


def _expand_key(experiment: Experiment, key: str, values: Any) -> Experiment:
    keys = current_keys(experiment, key.split("."))
    if not isinstance(values, list) or not values or not all(isinstance(value, Scalar) for value in values):
        raise ValueError(f"expected a list of single values, got {values!r}")
    resolve_paths(to_plain(experiment), keys)  # says what is close where there is no such setting
    words = [_value_label(value) for value in values]
    if len(set(words)) < len(words):
        raise ValueError(f"expected different values, got {values}")
    owner = next((kind for kind, sections in CHANGES.items() if keys[0] in sections), None)
    if len(keys) == 1 or (keys[0] not in LISTS and owner is None):
        allowed = "method, defense, attack, task, federation or observe"
        raise ValueError(
            f"expected a single setting of {allowed}: this one is the same for a whole table; run the experiment once "
            "for each value and set the results side by side with `hyperleak compare`"
        )
    versions = [_set(experiment, keys, value) for value in values]  # each must do on its own
    if owner is None:
        kind, choices = keys[0], [getattr(version, keys[0]) for version in versions]
    else:
        kind = owner
        given = [{".".join(keys): value} for value in values]
        choices = [tuple(replace(e, changes={**e.changes, **new}) for e in getattr(experiment, kind)) for new in given]
    made: dict[str, list[Entry[Any]]] = {}
    for entry, *found in zip(getattr(experiment, kind), *choices, strict=True):
        if all(other == entry for other in found):  # it has no such setting
            made[entry.label] = [entry]
        else:
            named = zip(found, words, strict=True)
            made[entry.label] = [replace(new, label=f"{entry.label}@{keys[-1]}={word}") for new, word in named]
    entries = tuple(entry for new in made.values() for entry in new)
    if kind != "method":
        changes: dict[str, Any] = {kind: entries}
        return build(to_plain(replace(experiment, **changes)))
    return build(to_plain(replace(experiment, method=entries, attack=_retarget_attacks(experiment.attack, made))))


def _retarget_attacks(
    attacks: Sequence[Entry[Any]], made: Mapping[str, Sequence[Entry[Any]]]
) -> tuple[Entry[Any], ...]:
    """Return the attacks, with attacks on a method as attacks on all that a sweep made of it."""
    return tuple(
        replace(attack, against=tuple(new.label for label in attack.against for new in made[label]))
        for attack in attacks
    )


def _value_label(value: Scalar) -> str:
    """Return a value as labels have it: the shortest text that tells it apart."""
    if isinstance(value, bool) or value is None:
        return str(yaml12.dump(value)).split()[0]
    return f"{value:g}" if isinstance(value, float) else str(value)
