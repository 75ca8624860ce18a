"""Configs with one thing wrong in them: refused before training, with the key; and every setting with odd values.

A mutant is a committed config with one change. By the kind of the change it is wrong for certain (a key or a name that
nobody knows, a bool, a text, NaN or a mapping where a number belongs, a section that is needed left out, a key given
twice), or it may be legal (zero, -1, a huge number, null, an optional section left out). What may be legal and is built
counts as legal by the declared range of its setting; the results list these with the range. Nothing is trained.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attacks
from benchmarks.reliability.page import Figure, record
from defenses import defenses
from eval.experiment.serialization import SECTIONS, build
from eval.io import yaml12
from eval.run.plan import prepare
from fl.data import datasets
from fl.data.augment import augmentations
from fl.data.partitions.partition import partitions
from fl.method import methods
from fl.models import models
from fl.parametrization import parametrizations
from fl.registry import Registry
from fl.settings import describe_type, fit_value, type_hints

CONFIGS = Path(__file__).parents[2] / "configs"
WRONG = ("key misspelled", "name unknown", "true", "text", "NaN", "mapping", "section left out", "key twice")
PERHAPS = ("zero", "minus one", "1e30", "10**12", "null", "empty list")
VALUES: dict[str, Any] = {
    "true": True,
    "text": "1",
    "NaN": math.nan,
    "mapping": {},
    "zero": 0,
    "minus one": -1,
    "1e30": 1e30,
    "10**12": 10**12,
    "null": None,
    "empty list": [],
}
REGISTRIES: tuple[Registry[Any], ...] = (
    methods,
    defenses,
    attacks.attacks,
    datasets,
    partitions,
    augmentations,
    models,
    parametrizations,
)
Path_ = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A config with one change.

    Attributes:
        config: what it was made of.
        kind: of the change.
        key: what was changed.
        text: the mutant, in YAML.
    """

    config: str
    kind: str
    key: str
    text: str


def mutants(count: int, seed: int = 0) -> Iterator[Mutant]:
    """`count` mutants of the committed configs, kinds in turn."""
    chance = random.Random(seed)
    configs = sorted(CONFIGS.rglob("*.yaml"))
    kinds = (*WRONG, *PERHAPS)
    made = 0
    while made < count:
        path, kind = chance.choice(configs), kinds[made % len(kinds)]
        text = path.read_text(encoding="utf-8")
        mutant = mutated(yaml12.parse(text), kind, chance)
        if mutant is not None:
            key, changed = mutant
            yield Mutant(str(path.relative_to(CONFIGS)), kind, key, changed)
            made += 1


def mutated(data: dict[str, Any], kind: str, chance: random.Random) -> tuple[str, str] | None:
    """Return the key that was changed and the text with the change, or None where there is nothing to change so."""
    data = {k: v for k, v in data.items() if k not in {"published", "sweep", "title", "imports"}}
    if kind == "section left out":
        key = chance.choice(("task", "method"))
        data.pop(key, None)
        return key, yaml12.dump(data)
    if kind == "key twice":
        key = chance.choice(sorted(data))
        return key, yaml12.dump(data) + yaml12.dump({key: data[key]})
    leaves = list(numbers(data))
    if kind == "name unknown":
        leaves = [leaf for leaf in named(data)]
    if not leaves:
        return None
    changed = copy.deepcopy(data)
    where = chance.choice(leaves)
    place: Any = changed
    for part in where[:-1]:
        place = place[part]
    key = str(where[-1])
    if kind == "key misspelled":
        place[f"{key}_x"] = place.pop(where[-1])
        key = f"{key}_x"
    else:
        place[where[-1]] = "nobody-knows-it" if kind == "name unknown" else VALUES[kind]
    return ("nobody-knows-it" if kind == "name unknown" else key), yaml12.dump(changed)


def numbers(data: Any, where: Path_ = ()) -> Iterator[Path_]:
    """Where single numbers stand, by key."""
    if isinstance(data, dict):
        for key, value in data.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield (*where, key)
            elif key not in {"with", "seeds"}:
                yield from numbers(value, (*where, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            if isinstance(value, dict):
                yield from numbers(value, (*where, i))


def named(data: Any, where: Path_ = ()) -> Iterator[Path_]:
    """Where names of entries stand."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        if key == "name" or (key in {"model", "dataset"} and isinstance(value, str)):
            yield (*where, key)
        yield from named(value, (*where, key))


def outcome(mutant: Mutant) -> str:
    """Return the outcome: "refused", "refused without the key", "built", or the type of an error that is no refusal."""
    try:
        build(yaml12.parse(mutant.text))
    except ValueError as error:
        return "refused" if mutant.key in str(error) else "refused without the key"
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        return type(error).__name__
    return "built"


UNFIT: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("heads", {"name": "hypergenfl", "embedding": size, "heads": 2}) for size in (1, 3, 7)),
    *(("heads", {"name": "hypergenfl", "heads": heads}) for heads in (3, 7, 1000)),
    *(("max_norm", {"name": name, "max_norm": math.inf}) for name in ("fedavg", "feddyn", "hyperfl", "hfedf-latent")),
    ("server_max_norm", {"name": "pfedhn", "server_max_norm": math.inf}),
    ("server_max_norm", {"name": "feddf", "public": "faces", "server_max_norm": math.inf}),
    ("hidden", {"name": "pfedla", "hidden": []}),
    ("epochs", {"name": "hfedf-latent", "epochs": None}),
    *(("public", {"name": n, "public": {"name": "faces", "size": 8}, "images": 1000}) for n in ("fedbe", "fedlaw")),
    ("public", {"name": "feddf", "public": {"name": "faces", "size": 8}, "images": 1000}),
    ("held_out_clients", {"name": "fedavg", "with": {"federation.held_out_clients": 3}}),
)
"""Settings of methods that failed once training had begun, and the key that a refusal names."""


def unfit(method: dict[str, Any]) -> str:
    """Return what is said of a method's settings before training, for three clients with small images."""
    task = {"dataset": {"name": "faces", "size": 8}, "model": "tiny"}
    clients = {"partition": {"name": "iid", "clients": 3, "train_size": 12, "test_size": 6}, "rounds": 3}
    try:
        prepare(build({"task": task, "federation": clients, "method": method, "score": {"lpips": "off"}}), device="cpu")
    except ValueError as error:
        return str(error)
    return ""


def settings() -> Iterator[tuple[str, type, str]]:
    """All settings of all entries and sections: whose, their class, their name."""
    for registry in REGISTRIES:
        for name in registry.names():
            kind = registry.get(name)
            if isinstance(kind, type):
                yield from ((f"{registry.kind} {name}", kind, f.name) for f in dataclasses.fields(kind) if f.init)
    for name, kind in SECTIONS.items():
        yield from ((name, kind, f.name) for f in dataclasses.fields(kind))


def odd_values() -> tuple[int, dict[str, Counter[str]]]:
    """Return how many settings there are; by odd value, what the settings that take it are declared as."""
    taken: dict[str, Counter[str]] = {kind: Counter() for kind in VALUES if kind != "zero"}
    count = 0
    for _, kind, key in settings():
        count += 1
        for name, found in taken.items():
            try:
                fit_value(kind, key, VALUES[name])
            except ValueError:
                continue
            found[describe_type(type_hints(kind)[key], (), math.inf)] += 1
    return count, taken


def main(argv: list[str] | None = None) -> None:
    """Try all and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    count = parser.parse_args(argv).count
    tried = [(mutant, outcome(mutant)) for mutant in mutants(count)]
    refusals = [(key, unfit(method)) for key, method in UNFIT]
    total, taken = odd_values()
    figures = [*_figures_of_mutants(tried), _figure_of_unfit(refusals), _figure_of_odd_values(total, taken)]
    details = {
        "outcomes": {kind: dict(Counter(s for m, s in tried if m.kind == kind)) for kind in (*WRONG, *PERHAPS)},
        "built": [f"{m.config}: {m.key} = {m.kind}" for m, said in tried if m.kind in PERHAPS and said == "built"],
        "otherwise": [f"{m.config}: {m.key} ({m.kind}): {s}" for m, s in tried if s not in {"refused", "built"}],
        "unfit": [words for _, words in refusals],
        "taken": {name: dict(sorted(found.items())) for name, found in taken.items()},
    }
    record("mutants", "python -m benchmarks.reliability.mutants", figures, details)


def _figures_of_mutants(tried: Sequence[tuple[Mutant, str]]) -> list[Figure]:
    """Return what came of configs with one change."""
    wrong = [said for mutant, said in tried if mutant.kind in WRONG]
    perhaps = [said for mutant, said in tried if mutant.kind in PERHAPS]
    refused, legal = wrong.count("refused"), perhaps.count("built")
    odd = len(perhaps) - legal - perhaps.count("refused")
    return [
        Figure(
            "configs with one thing that is wrong for certain",
            len(wrong),
            "all refused before training, the key named",
            f"{refused} refused with the key",
            refused == len(wrong),
        ),
        Figure(
            "configs with one thing that may be legal (zero, -1, huge, null, an empty list)",
            len(perhaps),
            "built where the declared range says so, else refused with the key",
            f"{legal} built, {len(perhaps) - legal - odd} refused with the key, {odd} otherwise",
            not odd,
        ),
    ]


def _figure_of_unfit(refusals: Sequence[tuple[str, str]]) -> Figure:
    """Return what came of settings that do not fit each other; by key, what was said."""
    late = sum(key not in words for key, words in refusals)
    return Figure(
        "settings of a method that are legal by themselves and do not fit each other, the network or the images",
        len(refusals),
        "all refused before training, the key named",
        f"{len(refusals) - late} refused with the key",
        not late,
    )


def _figure_of_odd_values(total: int, taken: Mapping[str, Counter[str]]) -> Figure:
    """Return what came of values of a type that is not the setting's."""
    allowed = {"true": "true or false", "text": "text", "NaN": "anything", "mapping": "settings"}
    astray = sum(n for name, own in allowed.items() for words, n in taken[name].items() if own not in words)
    return Figure(
        "settings given true, '1', NaN and {}, where their type is another",
        len(allowed) * total,
        "0 taken",
        f"{astray} taken",
        not astray,
    )


if __name__ == "__main__":
    main()
