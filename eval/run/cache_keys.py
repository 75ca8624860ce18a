"""The parts of a run that are computed once: trainings, and attacks on what they send.

A *training cell* is one method under one defense from one seed; an *attack cell* is one attack on what the watched
clients of such a training send after so many rounds. A cell is known by a hash of everything its numbers depend on: the
settings, the data, the kind of device and the version of this package; labels and the other cells of a config are not
among them. So a cell that is finished stays finished, whatever is added around it. A setting that has been renamed is
hashed by its first name (`fl.settings`), so that it stays finished under another name, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from attacks.base import Attack
from defenses import Defense, defenses
from eval.experiment import plugins, yaml_config
from eval.experiment.capture_spec import CaptureSpec
from eval.experiment.serialization import attack_spec, section_spec
from eval.experiment.spec import Experiment, FederationSpec, ObserveSpec, ScoreSpec
from eval.metrics.perceptual import Lpips, Perceptual
from eval.run.federation_data import FederationData
from fl.data import Source
from fl.method import Method, methods
from fl.view import ThreatModel

DIGITS = 12
"""Digits of a cell's SHA-256 that make its name."""


@dataclass(frozen=True, eq=False)
class Cell:
    """Everything the numbers of one cell depend on.

    Attributes:
        settings: plain data.
    """

    settings: dict[str, Any]

    @cached_property
    def id(self) -> str:
        """The first digits of the settings' SHA-256."""
        return short_hash(self.settings)


def training_cell(
    data: FederationData,
    federation: FederationSpec,
    method: Method,
    defense: Defense,
    seed: int,
    public: Sequence[str] = (),
) -> Cell:
    """Return the cell of one training; `public` are digests of the data sets that method and defense name."""
    return Cell(
        {
            "kind": "training",
            "task": section_spec(data.task_spec, oldest_names=True),
            "data": data.digest,
            "federation": _measuring(section_spec(federation, oldest_names=True)),
            "method": _without_optimizer(methods.spec(method, oldest_names=True)),
            "defense": _spec(defense),
            "seed": seed,
            "device": data.device_kind,
            "version": version(),
            **_public(public),
            **_user_code(data, seed),
        }
    )


def _user_code(data: FederationData, seed: int) -> dict[str, str]:
    """Return a hash of the source and weights of a user's own network; nothing for others, whose settings say it."""
    network = data.task_spec.model
    if not network.user_code:
        return {}
    return {"network": network.fingerprint(num_classes=data.dataset.num_classes, seed=seed)[:DIGITS]}


@dataclass(frozen=True)
class TrainedUpdates:
    """What is known of updates that clients of a training send.

    Attributes:
        training: its cell.
        rounds: of training before.
        method: what the clients train by in the observed round.
        threat: what the server knows.
        observe: which clients are watched, and on what images.
    """

    training: Cell
    rounds: int
    method: Method
    threat: ThreatModel
    observe: ObserveSpec


def attack_cell(
    updates: TrainedUpdates,
    attack: Attack,
    score: ScoreSpec,
    perceptual: Perceptual | None,
    public: Sequence[str] = (),
) -> Cell:
    """Return the cell of one attack on updates of a training.

    Args:
        updates: which.
        attack: on them.
        score: figures that were asked for.
        perceptual: LPIPS, or why there is none.
        public: digests of the data sets that the attack names.
    """
    observed_part = section_spec(updates.observe, oldest_names=True)
    watched = {key: value for key, value in observed_part.items() if key not in {"rounds", "method"}}
    if updates.observe.split == "train":  # as in cells from before there was a choice
        del watched["part"]
    return Cell(
        {
            "kind": "attack",
            "training": updates.training.id,
            "round": updates.rounds,
            "method": _without_optimizer(methods.spec(updates.method, oldest_names=True)),
            "attack": _without_later_settings(
                attack_spec(attack, oldest_names=True), updates.training.settings["defense"]
            ),
            "threat": _known(section_spec(updates.threat, oldest_names=True)),
            "observe": watched,
            # whether LPIPS can be taken depends on the weights at hand, and so do the figures
            "lpips": [score.lpips, perceptual.net if isinstance(perceptual, Lpips) else None],
            "version": version(),
            **_public(public),
        }
    )


@dataclass(frozen=True)
class CapturedUpdates:
    """What is known of updates that are attacked without a training.

    Attributes:
        method: what the client is taken to have trained by.
        defense: of the client.
        threat: what the server knows.
        seed: of everything random.
        device: kind of device.
    """

    method: Method
    defense: Defense
    threat: ThreatModel
    seed: int
    device: str


def capture_cell(
    digest: str,
    updates: CapturedUpdates,
    attack: Attack,
    score: ScoreSpec,
    perceptual: Perceptual | None,
    public: Sequence[str] = (),
) -> Cell:
    """Return the cell of one attack on updates of the user's own.

    Args:
        digest: of all that makes the updates: model, images, or the captured tensors.
        updates: what else is known of them.
        attack: which.
        score: figures that were asked for.
        perceptual: LPIPS, or why there is none.
        public: digests of the data sets that the attack names.
    """
    defense = _spec(updates.defense)
    return Cell(
        {
            "kind": "attack",
            "updates": digest,
            "method": methods.spec(updates.method, oldest_names=True),
            "defense": defense,
            "seed": updates.seed,
            "attack": _without_later_settings(attack_spec(attack, oldest_names=True), defense),
            "threat": _known(section_spec(updates.threat, oldest_names=True)),
            "lpips": [score.lpips, perceptual.net if isinstance(perceptual, Lpips) else None],
            "device": updates.device,
            "version": version(),
            **_public(public),
        }
    )


def cell_after_attacks(cell: Cell, before: Sequence[Cell]) -> Cell:
    """Return the cell of an attack that leaves out the updates that those `before` it settle."""
    return Cell({**cell.settings, "after": [other.id for other in before]}) if before else cell


def cut_short(cell: Cell) -> Cell:
    """Return the cell of what an attack had found when a limit or an interrupt ended it; never taken for the whole."""
    return Cell({**cell.settings, "cut_short": True})


def _public(digests: Sequence[str]) -> dict[str, list[str]]:
    """Return digests under `public`, and nothing where there are none, which keeps the ids of such cells."""
    return {"public": [*digests]} if digests else {}


def dataset_sources(settings: object) -> Iterator[Source]:
    """Yield the data sets that a method, defense or attack names among its settings, in their order."""
    if isinstance(settings, Source):
        yield settings
    elif isinstance(settings, tuple | list):
        for item in settings:
            yield from dataset_sources(item)
    elif is_dataclass(settings):
        for field in fields(settings):
            yield from dataset_sources(getattr(settings, field.name))


OMITTED_WHEN_OFF = frozenset({"compiled", "clamped", "balance"})
"""Settings of attacks that came after the first cells, and change nothing where they are off (0)."""


def _without_later_settings(attack: dict[str, Any], defense: object) -> dict[str, Any]:
    """Return the attack without `LATER` settings that are off, as in cells from before there were these.

    Noise once weighed tensors itself, so under noise no balance is another attack than what had none to set.
    """
    return _without_off(attack, OMITTED_WHEN_OFF - {"balance"} if "noise" in _names(defense) else OMITTED_WHEN_OFF)


def _known(threat: dict[str, Any]) -> dict[str, Any]:
    """Return a threat model's settings; without a known optimizer, as in cells from before it could be unknown."""
    return {key: value for key, value in threat.items() if key != "knows_optimizer" or not value}


CHOSE_OPTIMIZER = frozenset({"hfedf", "hfedf-latent", "hyperfedzero", "hypergenfl"})
"""Methods whose settings named an optimizer when the others' did not yet."""


def _without_optimizer(method: dict[str, Any]) -> dict[str, Any]:
    """Return a method's settings without an optimizer of SGD, as in cells from before there was a choice.

    The optimizer's eps came later still, and is left out where it is the optimizer's own.
    """
    if method.get("eps", 0) is None:
        method = {key: value for key, value in method.items() if key != "eps"}
    if method.get("optimizer") != "sgd" or method["name"] in CHOSE_OPTIMIZER:
        return method
    return {key: value for key, value in method.items() if key != "optimizer"}


def _without_off(spec: dict[str, Any], later: frozenset[str]) -> dict[str, Any]:
    kept = {key: value for key, value in spec.items() if not (key in later and not value)}
    nested = {key: value for key, value in kept.items() if isinstance(value, dict) and "name" in value}
    return {**kept, **{key: _without_off(value, later) for key, value in nested.items()}}


def _names(spec: object) -> Iterator[str]:
    """Yield the names of everything that settings name, however deep."""
    if isinstance(spec, dict):
        yield str(spec.get("name"))
    for part in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from _names(part)


def _measuring(federation: dict[str, Any]) -> dict[str, Any]:
    """Return a federation's settings with `measures` in order; without it where none is, as older cells have it."""
    rest = {key: value for key, value in federation.items() if key != "measures"}
    return {**rest, "measures": sorted(measures)} if (measures := federation.get("measures")) else rest


def run_id(experiment: Experiment | CaptureSpec) -> str:
    """Return a name for a run: a hash of the resolved config, but for where modules lie, and the package's version."""
    spec = yaml_config.to_plain(experiment, oldest_names=True)
    plain = {key: value for key, value in spec.items() if key != "imports"}
    plain |= {"method": [*map(_without_optimizer, plain["method"])], "threat": _known(plain["threat"])}
    if "score" in plain:  # whether weights may be fetched is no part of what was asked for
        plain["score"] = {**plain["score"], "download": False}
    return short_hash({"config": plain, "version": version()})


def short_hash(value: Any) -> str:
    """Return the first digits of the SHA-256 of plain data as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


@cache
def version() -> str:
    """Return the package's version."""
    return metadata.version("hyperleak")


def source_digest() -> str:
    """Return a hash of the source, imported modules included: says whether the code that runs now computed a cell."""
    digest = _package().copy()
    for name, source in sorted(plugins.plugin_sources().items()):
        digest.update(f"{name}\0".encode() + source)
    return digest.hexdigest()[:DIGITS]


@cache
def _package() -> hashlib._Hash:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("fl", "defenses", "attacks", "eval"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest


def _spec(defense: Defense) -> dict[str, Any]:
    """Return a defense's settings; one that is not registered (made in Python) is known by its class and fields."""
    try:
        return defenses.spec(defense, oldest_names=True)
    except ValueError:
        return {"name": type(defense).__qualname__, "settings": repr(defense)}
