"""Run an experiment: train every method under every defence, watch clients, attack what the server sees, score it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, Result
from defenses import Defense
from eval.audit import forward_error
from eval.experiment import Entry, Experiment
from eval.perceptual import Perceptual, load_lpips
from eval.score import Row, score
from fl.client import Client
from fl.data import Dataset
from fl.data.partition import Partition
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.registry import UnknownNameError
from fl.seeds import derive, stream
from fl.simulate import Truth, observe
from fl.types import Batch, ServerView, Task

log = logging.getLogger(__name__)
STACK = 64
"""Updates attacked at once."""


class Progress(Protocol):
    """Told what is going on."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` parts of `stage` are done; called with 0 when it starts."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that tells no one."""


@dataclass(frozen=True)
class Victim:
    """One watched update.

    Attributes:
        client: number of the client.
        samples: which images of the data set's training part it is computed from (n,) int64.
        data: these images.
    """

    client: int
    samples: Tensor
    data: Batch

    @property
    def key(self) -> str:
        """A name for it, the same in every run."""
        return f"{self.client}:{','.join(map(str, self.samples.tolist()))}"


@dataclass(frozen=True)
class Picture:
    """True images beside what one attack made of them, in the order of the truth.

    Attributes:
        name: `method-defense-attack`, with round and seed.
        original: (N, C, H, W) in [0, 1].
        reconstruction: likewise; black where there is none.
    """

    name: str
    original: Tensor
    reconstruction: Tensor


@dataclass(frozen=True)
class Outcome:
    """What an experiment gave.

    Attributes:
        rows: one for every attacked image, in plain JSON values (see `eval.score.score`).
        pictures: one for every attack on every method.
        seconds: what took how long, by stage.
    """

    rows: list[Row]
    pictures: list[Picture]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Prepared:
    """An experiment with its data: ready to run, and checked as far as can be without training.

    Attributes:
        experiment: the settings.
        dataset: all images, on the device.
        partition: who holds which.
        victims: whom the attacker watches.
        perceptual: LPIPS, or why there is none; None if it is off.
        device: where everything is computed.
    """

    experiment: Experiment
    dataset: Dataset
    partition: Partition
    victims: tuple[Victim, ...]
    perceptual: Perceptual | None
    device: torch.device

    def task(self, seed: int) -> Task:
        """The task with the network that `seed` starts from."""
        task = self.experiment.task.model.task(num_classes=self.dataset.num_classes, seed=seed)
        return task.to(device=self.device)

    def reference(self) -> Tensor | None:
        """Training images that no watched client holds: what an attacker may have had before, or None."""
        free = torch.ones(len(self.dataset.train), dtype=torch.bool)
        for victim in self.victims:
            free[self.partition.train[victim.client]] = False
        return self.dataset.train.inputs[free].cpu() if free.any() else None


def device_of(name: str) -> torch.device:
    """The device called `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:1`.

    Raises:
        ValueError: no such device here.
    """
    kind = name.partition(":")[0]
    if kind not in {"auto", "cpu", "cuda"}:
        raise ValueError(f"expected device auto, cpu or cuda, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device, found none; use --device cpu")
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def prepare(experiment: Experiment, *, device: str = "auto") -> Prepared:
    """Load the data, split it, choose whom to watch, and check that everything fits together.

    Raises:
        ValueError: settings that don't fit each other or the data; says which.
        FileNotFoundError: the data set is not there; says how to get it.
    """
    where = device_of(device)
    loaded = experiment.task.dataset.load()
    wanted = tuple(experiment.task.model.input_shape)
    if wanted != loaded.input_shape:
        raise ValueError(
            f"task.model: expected input_shape {list(loaded.input_shape)} for data set {loaded.name!r}, got "
            f"{list(wanted)}; change the model's input_shape, or the data set's size if it has one"
        )
    partition = experiment.federation.partition(loaded)
    dataset = replace(loaded, train=_moved(loaded.train, where), test=_moved(loaded.test, where))
    settings = experiment.score
    perceptual: Perceptual | None = None
    if settings.lpips != "off":
        net = None if settings.lpips == "auto" else settings.lpips
        perceptual = load_lpips(net, allow_download=settings.download)
    prepared = Prepared(experiment, dataset, partition, _victims(experiment, dataset, partition), perceptual, where)
    task = prepared.task(experiment.seeds[0])
    _check_methods(experiment, task)
    return prepared


def _check_methods(experiment: Experiment, task: Task) -> None:
    """Build every client that will train or be watched, so that what does not fit is said before any training.

    Raises:
        ValueError: a setting of a method or what it makes of the model; says of which method.
    """
    trained = {entry.label: entry.item for entry in experiment.method}
    for place, found in (("method", trained), ("observe.method", experiment.observed_methods())):
        for label, method in found.items():
            try:
                phases = method.phases(task, 0)
                if idle := [phase for phase in phases if phase.epochs == 0]:
                    raise ValueError(f"expected epochs >= 1, got {idle[0].epochs}")
                for defense in experiment.defense:
                    Client(task, method, defense.item)
            except ValueError as error:
                raise ValueError(f"{place} {label!r}: {error}") from error


def run(prepared: Prepared, *, progress: Progress = silent) -> Outcome:
    """Train, watch and attack; every number is a function of the experiment alone (on one device).

    Raises:
        ValueError: a training or an attack that can't be done.
    """
    experiment, outcome = prepared.experiment, Outcome([], [], {})
    for seed in experiment.seeds:
        task = prepared.task(seed)
        for method in experiment.method:
            for defense in experiment.defense:
                _Run(prepared, outcome, task, seed, method, defense, progress).go()
    return outcome


@dataclass(frozen=True)
class _Run:
    """One method under one defence from one seed."""

    prepared: Prepared
    outcome: Outcome
    task: Task
    seed: int
    method: Entry[Method]
    defense: Entry[Defense]
    progress: Progress
    rows: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the progress and the timings call it."""
        defense = "" if self.defense.label == "none" else f" + {self.defense.label}"
        seed = f" (seed {self.seed})" if len(self.prepared.experiment.seeds) > 1 else ""
        return f"{self.method.label}{defense}{seed}"

    def go(self) -> None:
        """Train; stop to watch and attack after the rounds the experiment names."""
        experiment, data = self.prepared.experiment, self._clients()
        client = Client(self.task, self.method.item, self.defense.item)
        federation = Federation(client, data, self.seed, experiment.federation.rate)
        total = experiment.federation.rounds
        for stop in sorted({*experiment.rounds, total}):
            with self._timed(f"{self.name}: training", total, start=federation.server.round) as tick:
                while federation.server.round < stop:
                    federation.run_round()
                    tick()
            if stop in experiment.rounds:
                self._watch(federation)
        if not self.rows:  # an accuracy to compare with, without an attack
            self.rows.append({**self._labels("-"), "round": total, "not_applicable": "no attack was asked for"})
        accuracies = federation.accuracy()
        accuracy = sum(accuracies) / len(accuracies)
        self.outcome.rows.extend({**row, "accuracy": accuracy} for row in self.rows)

    def _clients(self) -> list[ClientData]:
        dataset, split = self.prepared.dataset, self.prepared.partition
        pairs = zip(split.train, split.test, strict=True)
        return [ClientData(dataset.train.take(train), dataset.test.take(test)) for train, test in pairs]

    def _watch(self, federation: Federation) -> None:
        """Every attack on every victim, at the federation's present round."""
        experiment, victims = self.prepared.experiment, self.prepared.victims
        observed = Client(self.task, experiment.observed_methods()[self.method.label], self.defense.item)
        seen = [self._observed(federation, observed, victim) for victim in victims]
        states = [(federation.clients[v.client], federation.download(v.client)) for v in victims]
        errors = [forward_error(*pair, observed, *state) for pair, state in zip(seen, states, strict=True)]
        for attack in experiment.attack:
            if attack.against and self.method.label not in attack.against:
                continue
            results: list[Result] = []
            with self._timed(f"{self.name}: {attack.label}", len(victims)) as tick:
                for start in range(0, len(victims), STACK):
                    part = slice(start, start + STACK)
                    seeds = [derive(self.seed, "attack", victim.key) for victim in victims[part]]
                    results += attack.item.run([view for view, _ in seen[part]], seeds)
                    tick(len(seeds))
            self._score(attack, federation.server.round, seen, results, errors)

    def _observed(self, federation: Federation, client: Client, victim: Victim) -> tuple[ServerView, Truth]:
        """What the server sees of a victim; each draws its own noise, also where one client has several."""
        view, truth, _ = observe(
            client,
            federation.clients[victim.client],
            federation.download(victim.client),
            victim.data,
            threat=self.prepared.experiment.threat,
            number=victim.client,
            round=federation.server.round,
            seed=derive(self.seed, "observe", victim.key),
            private_init=federation.private_init,
        )
        return view, truth

    def _score(
        self,
        attack: Entry[Attack],
        number: int,
        seen: Sequence[tuple[ServerView, Truth]],
        results: Sequence[Result],
        errors: Sequence[float],
    ) -> None:
        reference, pairs = self.prepared.reference(), []
        for victim, (_, truth), result, error in zip(self.prepared.victims, seen, results, errors, strict=True):
            head = {**self._labels(attack.label), "round": number, "client": victim.client, "update": victim.key}
            head["forward_error"] = error if math.isfinite(error) else None
            scored = _scored(result, truth, self.prepared.perceptual, reference, derive(self.seed, "floor", victim.key))
            self.rows.extend({**head, "picture": _picture(victim, truth, row), **row} for row in scored)
            if isinstance(result, Reconstruction) and result.inputs is not None:
                pairs.append((truth.inputs.cpu(), _in_order(result.inputs.cpu(), scored)))
        if pairs:
            name = f"{self.method.label}-{self.defense.label}-{attack.label}-round{number}-seed{self.seed}"
            originals, found = (torch.cat(part) for part in zip(*pairs, strict=True))
            self.outcome.pictures.append(Picture(name, originals, found))

    def _labels(self, attack: str) -> Row:
        return {"seed": self.seed, "method": self.method.label, "defense": self.defense.label, "attack": attack}

    def _timed(self, stage: str, total: int, start: int = 0) -> _Timed:
        return _Timed(self, stage, total, start)


class _Timed:
    """A stage of the work: reports its progress, and how long it took."""

    def __init__(self, run: _Run, stage: str, total: int, start: int) -> None:
        self.run, self.stage, self.total, self.done = run, stage, total, start

    def __enter__(self) -> _Timed:
        self.began = time.perf_counter()
        self.run.progress(self.stage, self.done, self.total)
        return self

    def __call__(self, count: int = 1) -> None:
        self.done += count
        self.run.progress(self.stage, self.done, self.total)

    def __exit__(self, *_: object) -> None:
        seconds = self.run.outcome.seconds
        seconds[self.stage] = round(seconds.get(self.stage, 0.0) + time.perf_counter() - self.began, 3)
        log.info("%s: %.1f s", self.stage, seconds[self.stage])


def _scored(
    result: Result, truth: Truth, perceptual: Perceptual | None, reference: Tensor | None, seed: int
) -> list[Row]:
    """The rows of one attacked update; a single one, with the reason, where the attack says nothing about it."""
    if isinstance(result, NotApplicable):
        return [{"not_applicable": result.reason}]
    history = [value if math.isfinite(value) else None for value in map(float, result.history)]
    common = {"knowledge": list(result.knowledge), "verified": result.verified, "history": history}
    rows = score(result, truth, perceptual=perceptual, reference=reference, seed=seed)
    return [{**row, **common} for row in rows]


def _picture(victim: Victim, truth: Truth, row: Row) -> str | None:
    """Which image of the data set a row is about: its number, and which copy if a defence made several of it."""
    if "image" not in row:
        return None
    indices, image = truth.trace.indices, row["image"]
    copy = int((indices[:image] == indices[image]).sum())
    return f"{victim.client}:{int(victim.samples[indices[image]])}" + (f"#{copy}" if copy else "")


def _in_order(inputs: Tensor, rows: Sequence[Row]) -> Tensor:
    """Reconstructions in the order of the true images, black where there is none."""
    black = torch.zeros_like(inputs[0])
    return torch.stack([black if row["matched"] is None else inputs[row["matched"]] for row in rows]).clamp(0, 1)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.inputs.to(device), batch.labels.to(device))


def _victims(experiment: Experiment, dataset: Dataset, partition: Partition) -> tuple[Victim, ...]:
    observe, found = experiment.observe, []
    classes = torch.tensor(list(_classes(observe.classes, dataset.class_names)), dtype=torch.int64)
    for client in observe.clients:
        if client >= len(partition):
            raise ValueError(f"observe.clients: expected numbers below {len(partition)}, got {client}")
        own = partition.train[client]
        if len(classes):
            own = own[torch.isin(dataset.train.labels.cpu()[own], classes)]
        own = own[torch.randperm(len(own), generator=stream(observe.seed, "observe", client))]
        count = observe.images or len(own)
        if not len(own) or count > len(own):
            raise ValueError(f"observe.images: expected at most the {len(own)} of client {client}, got {count}")
        for samples in own[:count].split(observe.batch_size or count):
            found.append(Victim(client, samples, dataset.train.take(samples)))
    return tuple(found)


def _classes(wanted: Sequence[int | str], names: Sequence[str]) -> Iterator[int]:
    for item in wanted:
        if isinstance(item, str):
            if item not in names:
                raise UnknownNameError("class in observe.classes", item, list(names))
            yield names.index(item)
        elif 0 <= item < len(names):
            yield item
        else:
            raise ValueError(f"observe.classes: expected labels in [0, {len(names)}), got {item}")
