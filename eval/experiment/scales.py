"""Experiments at less than their own size: what a paper did, cut by declared rules.

A config may say itself what differs at a scale, by dotted keys as `--set` has them; they come after the rules. One that
is itself smaller than the paper says so, and what the paper has, if there is no other config for that:

```yaml
scales:
  config: small                          # what the config is as it stands; without it, the paper's
  paper: {federation.rounds: 200}
  smoke: {task.dataset.limit: 500}
```
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.experiment.overrides import ConfigDraft, apply_overrides
from eval.experiment.scale_names import SCALES, Scale
from eval.experiment.serialization import build, check_keys, check_mapping, to_plain
from eval.experiment.spec import Experiment
from eval.io import yaml12
from fl.registry import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A limit on a number of a paper's experiment, which is never enlarged.

    Attributes:
        share: what is left of it, in (0, 1], rounded up.
        least: what is left at least, where the paper has as much.
        most: what is left at most.
    """

    share: float = 1.0
    least: int = 1
    most: float = math.inf

    def of(self, number: int) -> int:
        """Return what is left of a number."""
        cut = min(max(math.ceil(self.share * number - 1e-9), self.least), self.most)
        return int(min(number, cut))


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is cut at a scale; everything else is as the paper has it.

    Attributes:
        rounds: of training, a method's own warm-up included.
        clients: that take part; of a federation over domains they stay. The share asked in a round is the paper's.
        held_out: clients that never take part.
        train_images: of each client; where the partition does not set them, the data set is cut to as many as all
            clients may have then.
        test_images: likewise.
        images: attacked of each watched client.
        iterations: of searches.
        seeds: the first so many.
    """

    rounds: Cut
    clients: Cut
    held_out: Cut
    train_images: Cut
    test_images: Cut
    images: Cut
    iterations: Cut
    seeds: Cut


RULES: Mapping[Scale, Rules] = {
    "smoke": Rules(
        rounds=Cut(most=1),
        clients=Cut(most=2),
        held_out=Cut(most=1),
        train_images=Cut(most=100),
        test_images=Cut(most=20),
        images=Cut(most=1),
        iterations=Cut(most=5),
        seeds=Cut(most=1),
    ),
    "small": Rules(
        rounds=Cut(share=0.1, least=2),
        clients=Cut(share=0.5, least=2, most=20),
        held_out=Cut(most=2),
        train_images=Cut(most=200),
        test_images=Cut(most=100),
        images=Cut(most=8),
        iterations=Cut(share=0.1, least=100),
        seeds=Cut(most=1),
    ),
}
"""The rules of every scale below the paper's."""
DOMAINS = "domains"
"""The partition whose clients are what a data set has domains of."""
PARTS = 4
"""Clients for whose images a data set is cut where the partition names no number of them."""
WARM_UP = "warmup"
"""Setting of methods that counts rounds. Those that noise is calibrated on stay: fewer rounds then spend less."""
SECTION = "scales"
"""Key of a config."""
OWN_SCALE = "config"
"""Key under `scales` that says what the config is as it stands."""


@dataclass(frozen=True, kw_only=True)
class OwnScales:
    """What a config says of scales itself.

    Attributes:
        config: the scale that it has as it stands.
        changes: settings by dotted key, by scale.
    """

    config: Scale = "paper"
    changes: Mapping[Scale, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def scales(self) -> tuple[Scale, ...]:
        """Return the scales there are: no paper's where the config is smaller and does not say what differs."""
        known = self.config == "paper" or "paper" in self.changes
        return SCALES if known else tuple(scale for scale in SCALES if scale != "paper")


def read_scales(path: Path) -> OwnScales:
    """Return what a config says of scales itself.

    Raises:
        ValueError: something else than settings of a known scale; says which.
    """
    text = yaml12.read(path)
    if SECTION not in text:  # most configs say nothing, and reading the whole takes a tenth of a second
        return OwnScales()
    data = yaml12.parse(text)
    try:
        return parse_scales(check_mapping(data, "the config").get(SECTION, {}))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_scales(data: Any) -> OwnScales:
    """Return what the section `scales` of a config says.

    Raises:
        ValueError: something else than settings of a known scale; says which.
    """
    given = dict(check_mapping(data, "scales"))
    own = given.pop(OWN_SCALE, "paper")
    if own not in SCALES:
        raise UnknownNameError("scale in scales.config", str(own), SCALES)
    check_keys([*SCALES, OWN_SCALE], given, "scales")
    return OwnScales(
        config=own,
        changes={scale: dict(check_mapping(given[scale], f"scales.{scale}")) for scale in SCALES if scale in given},
    )


def at_scale(experiment: Experiment, scale: Scale, own: OwnScales | None = None) -> Experiment:
    """Return an experiment as large as a scale has it.

    Args:
        experiment: as its config stands.
        scale: which; the config's own changes nothing but what the config says of it.
        own: what its config says of scales.

    Raises:
        ValueError: the config is smaller than the paper and does not say what differs, or what it says does not fit.
    """
    own = own or OwnScales()
    if scale not in own.scales:
        raise ValueError(f"this config is of scale {own.config} and has none as large as the paper's")
    if SCALES.index(scale) < SCALES.index(own.config):
        printed = experiment.published  # checked at every step of building; no label changes
        bare = replace(experiment, published=())
        experiment = replace(build(_cut(to_plain(bare), RULES[scale])), published=printed)
    words = [f"{key}={json.dumps(value)}" for key, value in own.changes.get(scale, {}).items()]
    if not words:
        return experiment
    return apply_overrides(ConfigDraft(experiment, {}, experiment.published), words).experiment


def _cut(data: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """Return plain data of an experiment with less of everything."""
    data = copy.deepcopy(data)
    federation = data["federation"]
    data["seeds"] = data["seeds"][: rules.seeds.of(len(data["seeds"]))]
    paper = copy.deepcopy(federation)
    _cut_federation(federation, rules)
    parts = (federation["partition"].get("clients") or PARTS) + federation["held_out_clients"]
    for entry in data["method"]:
        _cut_changes(entry.get("with", {}), paper, parts, rules)
        if isinstance(entry.get(WARM_UP), int):
            entry[WARM_UP] = _cut_rounds(entry[WARM_UP], rules)
    rounds = {_label(entry): entry.get("with", {}).get("federation.rounds") for entry in data["method"]}
    rounds = {label: federation["rounds"] if own is None else own for label, own in rounds.items()}
    observe = data["observe"]
    for attack in data["attack"]:
        _cut_iterations(attack, rules)
        own = attack.get("with", {})
        if "observe.batch_size" in own:  # the images are whole batches of its own then, and are set before their size
            attack["with"] = own = {"observe.images": own.get("observe.images", observe["images"]), **own}
        last = min(rounds[label] for label in attack.get("against") or rounds)
        _cut_observation(own, "observe.", observe["batch_size"], last, rules)
    _cut_observation(observe, "", observe["batch_size"], min(rounds.values()), rules)
    observe["clients"] = [0]
    _cut_dataset(data["task"]["dataset"], federation["partition"], parts, rules)
    return data


def _label(entry: Mapping[str, Any]) -> str:
    return str(entry.get("as", entry["name"]))


def _cut_rounds(number: int, rules: Rules) -> int:
    return rules.rounds.of(number) if number else 0


def _cut_federation(federation: dict[str, Any], rules: Rules) -> None:
    """Cut the federation of an experiment, with its partition."""
    federation["rounds"] = _cut_rounds(federation["rounds"], rules)
    federation["evaluate_every"] = min(federation["evaluate_every"], max(federation["rounds"], 1))
    federation["held_out_clients"] = _cut_partition(federation["partition"], federation["held_out_clients"], rules)


def _cut_partition(partition: dict[str, Any], held_out: int, rules: Rules) -> int:
    """Cut the clients of a partition and their images; returns how many of the clients never take part."""
    for key, cut in (("train_size", rules.train_images), ("test_size", rules.test_images)):
        if partition.get(key):
            partition[key] = cut.of(partition[key])
    if partition["name"] == DOMAINS or not partition.get("clients"):
        return held_out
    partition["clients"], held_out = _cut_clients(partition["clients"], held_out, rules)
    if isinstance(groups := partition.get("groups"), int):  # of clients, all as large
        partition["clients"] = groups * math.ceil(partition["clients"] / groups)
    return held_out


def _cut_clients(clients: int, held_out: int, rules: Rules) -> tuple[int, int]:
    """Return how many clients are left, and how many of them never take part."""
    left = rules.held_out.of(held_out) if held_out else 0
    return rules.clients.of(clients - held_out) + left, left


def _cut_changes(changes: dict[str, Any], paper: Mapping[str, Any], parts: int, rules: Rules) -> None:
    """Cut what a method has of its own in `with`.

    Args:
        changes: its settings, by dotted key.
        paper: the federation of the others, not cut.
        parts: clients among whom a data set is split.
        rules: of the scale.
    """
    whole, clients, held_out = (f"federation.{key}" for key in ("partition", "partition.clients", "held_out_clients"))
    before = changes.get(held_out, paper["held_out_clients"])
    for key, cut in (("train_size", rules.train_images), ("test_size", rules.test_images)):
        if f"{whole}.{key}" in changes:
            changes[f"{whole}.{key}"] = cut.of(changes[f"{whole}.{key}"])
    for key, most in _limits(parts, rules).items():
        for name in (f"task.dataset.{key}", f"task.dataset.source.{key}"):
            if changes.get(name):
                changes[name] = min(changes[name], most)
    if "federation.rounds" in changes:
        changes["federation.rounds"] = _cut_rounds(changes["federation.rounds"], rules)
    if isinstance(changes.get(whole), dict):
        _cut_partition(changes[whole], before, rules)
    elif (clients in changes or held_out in changes) and paper["partition"]["name"] != DOMAINS:
        left = _cut_clients(changes.get(clients, paper["partition"]["clients"]), before, rules)
        changes |= {key: value for key, value in zip((clients, held_out), left, strict=True) if key in changes}


def _cut_iterations(attack: dict[str, Any], rules: Rules) -> None:
    """Cut the iterations of an attack, and of the parts of a chain."""
    for key, value in attack.items():
        if key == "iterations" and isinstance(value, int):
            attack[key] = rules.iterations.of(value)
        elif isinstance(value, dict):
            _cut_iterations(value, rules)


def _cut_observation(observe: dict[str, Any], prefix: str, batch_size: int | None, last: int, rules: Rules) -> None:
    """Cut whom an attacker watches, and when: rounds later than the last stand for it.

    Args:
        observe: settings, under keys that begin with `prefix`.
        prefix: of the keys.
        batch_size: of the experiment.
        last: round of training.
        rules: of the scale.
    """
    images, rounds, size = (f"{prefix}{key}" for key in ("images", "rounds", "batch_size"))
    if observe.get(rounds):
        observe[rounds] = sorted({min(number, last) for number in observe[rounds]})
    if observe.get(images):
        batch = observe.get(size, batch_size) or 1
        observe[images] = batch * max(1, rules.images.of(observe[images]) // batch)


def _cut_dataset(source: dict[str, Any], partition: Mapping[str, Any], parts: int, rules: Rules) -> None:
    """Cut a data set that is split among all clients, to as many images as all of them may have."""
    if partition.get("train_size"):
        return
    if isinstance(source.get("source"), dict):  # of what is pooled
        source = source["source"]
    for key, most in _limits(parts, rules).items():
        if key in source:
            source[key] = min(source[key] or most, most)


def _limits(parts: int, rules: Rules) -> dict[str, int]:
    """Return the limits of a data set that is split among so many clients."""
    return {"limit": parts * int(rules.train_images.most), "test_limit": parts * int(rules.test_images.most)}
