"""Methods that one experiment compares at different defaults, which may have escaped its author.

Each method has the constants of its paper: `fedavg` trains one epoch without momentum, `dp-fedavg` five with 0.5. A
setting that a config writes for all of its methods is meant as it stands, and so is all in one that sets a paper's
figures beside its own: it has the paper's constants.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.experiment.serialization import with_current_names
from eval.experiment.spec import Experiment
from eval.experiment.sweep import parse_override
from eval.io import yaml12
from fl.method import Method
from fl.settings import FormerNameWarning, current_name

TRAINING_SETTINGS = (
    ("epochs", "steps"),
    ("batch_size",),
    ("lr",),
    ("optimizer",),
    ("momentum",),
    ("weight_decay",),
    ("max_norm",),
    ("sampler",),
    ("train_mode",),
)
"""What methods train by under the same keys; those of one tuple take each other's place."""
MAX_NAMED = 3
"""Methods that are named beside a value; of more it says how many."""


def differing_defaults(experiment: Experiment, data: Mapping[str, Any], overrides: Sequence[str] = ()) -> str:
    """Return a line on settings whose defaults differ between methods and that not all of them are given.

    Args:
        experiment: as it is run.
        data: the config that it was read from.
        overrides: `key=value`, applied to it.

    Returns:
        The line; empty where like is compared with like, or every difference was written down.
    """
    if experiment.published:
        return ""
    with warnings.catch_warnings():  # said when the experiment was read
        warnings.simplefilter("ignore", FormerNameWarning)
        written = _written_settings(experiment, with_current_names(data), overrides)
    found = {keys: said for keys in TRAINING_SETTINGS if (said := _difference(experiment, keys, written))}
    if not found:
        return ""
    first = next(iter(found))[0]
    return (
        f"not like with like, as defaults differ: {'; '.join(found.values())}. Write these at each method, or give one "
        f"value to all, such as --set method.{first}={_example(experiment, first)}"
    )


def differences_in_file(experiment: Experiment, path: Path, overrides: Sequence[str] = ()) -> str:
    """Return what `differing_defaults` does, of an experiment that was read from a file."""
    return differing_defaults(experiment, yaml12.parse(yaml12.read(path)), overrides)


def _example(experiment: Experiment, key: str) -> str:
    """Return a value that one of the methods has."""
    values = (getattr(entry.item, key, None) for entry in experiment.method)
    return _shown(next((value for value in values if value is not None), None))


def _difference(experiment: Experiment, keys: Sequence[str], written: Mapping[str, set[str]]) -> str:
    """Return how methods differ in a setting, if they do so by default; else nothing."""
    having = [entry for entry in experiment.method if all(key in _defaults(entry.item) for key in keys)]
    if len(keys) > 1:  # a method that has none of them counts otherwise
        having = [entry for entry in having if any(getattr(entry.item, key) is not None for key in keys)]
    if len({tuple(_defaults(entry.item)[key] for key in keys) for entry in having}) < 2:
        return ""
    if all(written[entry.label] & {*keys} for entry in having):
        return ""
    by_value: dict[tuple[str, str], dict[str, None]] = {}
    for entry in having:
        key = next((key for key in keys if getattr(entry.item, key) is not None), keys[0])
        label = entry.label.partition("@")[0]
        by_value.setdefault((key, _shown(getattr(entry.item, key))), {})[label] = None
    if len(by_value) < 2:
        return ""
    said: list[str] = []
    for i, ((key, value), labels) in enumerate(sorted(by_value.items(), key=lambda item: keys.index(item[0][0]))):
        named = key if i == 0 or key != keys[0] else ""
        said.append(f"{named} {value} ({_named([*labels])})".strip())
    return ", ".join(said)


def _named(labels: Sequence[str]) -> str:
    left = len(labels) - MAX_NAMED
    return ", ".join(labels) if left <= 1 else f"{', '.join(labels[:MAX_NAMED])} and {left} more"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _defaults(method: Method) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(method)}


def _written_settings(experiment: Experiment, data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, set[str]]:
    """Return which settings of each method a config and its overrides write, by label."""
    entries, changes = data["method"], [str(key).split(".") for key in data.get("sweep") or {}]
    for text in overrides:
        keys, value = parse_override(text)
        if keys == ["method"]:
            entries, changes = yaml12.parse(value), []
        elif keys == ["sweep"]:
            changes += [str(key).split(".") for key in yaml12.parse(value) or {}]
        changes.append(keys[1:] if keys[0] == "sweep" else keys)
    own = {_label(entry): entry for entry in (entries if isinstance(entries, list) else [entries])}
    found = {}
    for entry in experiment.method:
        base = entry.label.partition("@")[0]
        settings = own.get(entry.label, own.get(base, {}))
        written = {*settings} if isinstance(settings, Mapping) else set()
        written |= _of_preset(entry.item, settings)
        written |= {keys[-1] for keys in changes if _concerns(keys, {entry.label, base})}
        if experiment.federation.rounds == 0:  # nothing is trained, and the observed round is all there is
            written |= {*experiment.observe.method}
        found[entry.label] = {current_name([type(entry.item)], key) for key in written}
    return found


def _label(entry: Any) -> str:
    return str(entry.get("as") or entry.get("name")) if isinstance(entry, Mapping) else str(entry)


def _of_preset(method: Method, settings: Any) -> set[str]:
    presets = getattr(type(method), "presets", {})
    preset = presets.get(settings.get("preset")) if isinstance(settings, Mapping) else None
    return {*preset.settings} if preset is not None else set()


def _concerns(keys: Sequence[str], labels: Iterable[str]) -> bool:
    """Return whether dotted keys lead to a setting of the method that has one of these labels."""
    return keys[:1] == ["method"] and (len(keys) == 2 or (len(keys) == 3 and keys[1] in labels))
