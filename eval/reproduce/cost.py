"""What experiments cost, without their data: counts, from the settings, times unit costs that were measured once.

An estimate is of one CPU core and tells an hour from a day. Where a cell of the same kind is committed its seconds are
taken, as `eval.run.estimate` takes them for a plan whose data are at hand. Unit costs are medians over the committed
cells and `benchmarks/results`; a GPU, a faster core or several workers divide them. What is not known is None, never
zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import nn

from attacks.base import Attack, Chain
from eval.experiment.serialization import attack_spec
from eval.experiment.spec import Experiment, FederationSpec, ObserveSpec
from eval.reproduce.cells import PlannedCell, planned_cells
from eval.run.estimate import KnownTimes
from fl.data import Source
from fl.data.sources.download import PUBLISHED_SIZES
from fl.federation import n_sampled
from fl.method import Method, methods
from fl.models import Network

MACS_A_SECOND = 2.5e10
"""Multiplications and additions of one core in the convolutions of small networks."""
STEP_SECONDS = 5e-4
"""Of a step of training beside these: a step's own overhead, layer by layer."""
BACKWARD = 3.0
"""A pass back and forth, in passes forth."""
SECOND_ORDER = 6.0
"""A step of a search, which differentiates a gradient, in passes forth."""
ITERATION_SECONDS = 4e-3
"""Of a step of a search beside these."""
METHOD_FACTORS: Mapping[str, float] = {
    "hyperfl": 1.4,
    "dp-hyperfl": 3.5,
    "dp-fedavg": 1.7,
    "centaur": 1.8,
    "ppsgd": 1.9,
    "hfedf": 1.4,
    "hyperfedzero": 20.0,
}
"""A round of a method, in rounds of FedAvg on the same network and images; others count as FedAvg."""
EXACT_SECONDS: Mapping[str, float] = {"cascade": 15.0, "backsolve": 60.0, "spear": 30.0, "april": 10.0}
"""An update under an attack that does not search in iterations; others count as `CLOSED_FORM_SECONDS`."""
CLOSED_FORM_SECONDS = 1.0
IMAGES: Mapping[str, tuple[int, int]] = PUBLISHED_SIZES | {
    "handwritten62": (4_805, 930),
    "pacs": (7_993, 1_998),
    "office-home": (12_470, 3_118),
    "vlcs": (8_583, 2_146),
}
"""Training and test images of data sets as published, for estimates that load none."""


@dataclass(frozen=True, kw_only=True)
class ClientImages:
    """How many images clients have, as far as costs depend on it.

    Attributes:
        clients: that take part.
        train: training images of a client, in the mean.
        test: test images likewise.
    """

    clients: int
    train: float
    test: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an experiment comes to.

    Attributes:
        trainings: cells of trainings.
        attacks: cells of attacks.
        seconds: of all of them on one core; None where some network's cost is not known.
    """

    trainings: int
    attacks: int
    seconds: float | None


@cache
def forward_macs(model: Network) -> float | None:
    """Return multiplications and additions of one image's way through a network's extractor; None where not known.

    Convolutions and linear layers are counted, on the `meta` device, which computes nothing.
    """
    found: list[float] = []

    def count(module: nn.Module, _: Any, out: Any) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        found.append(float(out.numel()) * weight[0].numel())

    try:
        with torch.device("meta"), torch.no_grad():
            body = model.body()
            for module in body.modules():
                if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                    module.register_forward_hook(count)
            body.eval()(torch.zeros(1, *model.input_shape))
    except (RuntimeError, ValueError, OSError, NotImplementedError, TypeError):  # weights that are not there, or odd
        return None
    return sum(found) or None


def training_seconds(model: Network, federation: FederationSpec, method: Method, images: ClientImages) -> float | None:
    """Return what a training takes on one core, with its evaluations.

    Args:
        model: the network.
        federation: for how long, and how often it is scored.
        method: whose steps they are.
        images: of the clients.
    """
    macs = forward_macs(model)
    if macs is None:
        return None
    settings = methods.spec(method)
    size = min(settings.get("batch_size") or images.train, images.train) or 1
    if settings.get("steps"):
        steps = float(settings["steps"])
    else:
        steps = float(settings.get("epochs") or 1) * ceil(images.train / size)
    steps += float(settings.get("head_epochs") or 0) * ceil(images.train / size)
    per_client = steps * (size * BACKWARD * macs / MACS_A_SECOND + STEP_SECONDS)
    asked = n_sampled(federation.client_fraction, images.clients)
    training = federation.rounds * asked * per_client * METHOD_FACTORS.get(settings["name"], 1.0)
    scored = federation.rounds // federation.evaluate_every + 1
    tuned = federation.fine_tune_epochs * images.train * BACKWARD
    scoring = scored * images.clients * (images.test + tuned) * macs / MACS_A_SECOND
    return training + scoring


def attack_seconds(model: Network, attack: Attack, method: Method, updates: int, batch: float) -> float | None:
    """Return what an attack takes on one core.

    Args:
        model: the network.
        attack: which.
        method: of the observed round, whose steps a search makes again.
        updates: how many are attacked.
        batch: images in each.
    """
    macs = forward_macs(model)
    if macs is None:
        return None
    last = attack
    while isinstance(last, Chain):
        last = last.then
    iterations = attack_spec(last).get("iterations")
    if not isinstance(iterations, int):
        return updates * EXACT_SECONDS.get(attack_spec(last)["name"], CLOSED_FORM_SECONDS)
    settings = methods.spec(method)
    size = min(settings.get("batch_size") or batch, batch) or 1
    steps = settings.get("steps") or (settings.get("epochs") or 1) * ceil(batch / size)
    one = steps * (size * SECOND_ORDER * macs / MACS_A_SECOND + ITERATION_SECONDS)
    return updates * iterations * one


def experiment_cost(
    experiment: Experiment, times: KnownTimes | None = None, cells: Iterable[PlannedCell] | None = None
) -> Cost:
    """Return what an experiment comes to; cells that several entries share count once. Loads no data.

    Args:
        experiment: at some scale.
        times: of finished cells; where one of the same kind is among them, that is taken. Otherwise counts by the
            published sizes of data sets, times unit costs.
        cells: of the experiment, if they are known.
    """
    seconds: dict[str, float | None] = {}
    attacked = set[str]()
    for one in planned_cells(experiment) if cells is None else cells:
        if one.cell.id in seconds:
            continue
        if one.attack is not None:
            attacked.add(one.cell.id)
        known = None if times is None else _known_seconds(one, times)
        seconds[one.cell.id] = _counted_seconds(one) if known is None else known
    found = [value for value in seconds.values() if value is not None]
    whole = sum(found) if len(found) == len(seconds) else None
    return Cost(trainings=len(seconds) - len(attacked), attacks=len(attacked), seconds=whole)


def _known_seconds(one: PlannedCell, times: KnownTimes) -> float | None:
    if one.attack is None:
        return times.training(one.cell.settings)[0]
    return times.attack(one.cell.settings, one.training.settings)[0]


def _counted_seconds(one: PlannedCell) -> float | None:
    model, images = one.part.task.model, client_images(one.part)
    if one.attack is None:
        return training_seconds(model, one.part.federation, one.method.item, images)
    return attack_seconds(model, one.attack.item, one.observed, *_watched(one.part.observe, images))


def client_images(experiment: Experiment) -> ClientImages:
    """Return how many images clients have by the settings and the published size of the data set."""
    federation = experiment.federation
    partition: Any = federation.partition
    train, test = _size(experiment.task.dataset)
    clients = int(getattr(partition, "clients", None) or 4) - federation.held_out_clients
    return ClientImages(
        clients=max(clients, 1),
        train=getattr(partition, "train_size", None) or train / max(clients, 1),
        test=getattr(partition, "test_size", None) or test / max(clients, 1),
    )


def _size(source: Source) -> tuple[float, float]:
    """Return how many images a data set has for training and for testing."""
    pooled = getattr(source, "source", None)
    if isinstance(pooled, Source):
        whole = sum(_size(pooled))
        return 0.8 * whole, 0.2 * whole
    train, test = IMAGES.get(str(getattr(source, "name", "")), (1_000, 200))
    limits = getattr(source, "limit", None), getattr(source, "test_limit", None)
    return min(train, limits[0] or train), min(test, limits[1] or test)


def _watched(observe: ObserveSpec, images: ClientImages) -> tuple[int, float]:
    """Return how many updates are attacked, and how many images each has."""
    count = observe.images or ceil(images.train)
    batch = observe.batch_size or count
    return len(observe.clients) * ceil(count / batch), float(batch)


def describe_seconds(seconds: float | None) -> str:
    """Return a duration as people say it: `40 s`, `3 min`, `2 h`, `5 days`; `unknown` of None."""
    if seconds is None:
        return "unknown"
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
