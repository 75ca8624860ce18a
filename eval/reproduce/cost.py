"""What experiments cost, without their data: counts, from the settings, times unit costs that were measured once.

An estimate is of one CPU core. Where a cell of the same kind is committed its seconds are taken, else counts times
unit costs (`eval.run.unit_costs`), as `eval.run.estimate` does for a plan whose data are at hand. Images are counted
by the published sizes of data sets here. A GPU, a faster core or several workers divide an estimate. What is not known
is None, never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

from eval.experiment.scales import DOMAINS
from eval.experiment.spec import Experiment, ObserveSpec
from eval.reproduce.cells import PlannedCell, planned_cells
from eval.reproduce.item_status import Cost
from eval.run.estimate import KnownTimes
from eval.run.unit_costs import (
    ClientImages,
    TrainingWork,
    attack_seconds,
    network_work,
    template_task,
    training_seconds,
)
from fl.data import Source
from fl.data.sources.download import PUBLISHED_SIZES

IMAGES: Mapping[str, tuple[int, int]] = PUBLISHED_SIZES | {
    "handwritten62": (4_805, 930),
    "pacs": (7_993, 1_998),
    "office-home": (12_470, 3_118),
    "vlcs": (8_583, 2_146),
}
"""Training and test images of data sets as published, for estimates that load none."""
SOURCE_DOMAINS = 3
"""Domains of the papers' data sets, beside the one that is left out."""


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


def _known_seconds(cell: PlannedCell, times: KnownTimes) -> float | None:
    if cell.attack is None:
        return times.training(cell.cell.settings)[0]
    return times.attack(cell.cell.settings, cell.training.settings)[0]


def _counted_seconds(cell: PlannedCell) -> float | None:
    model, images = cell.part.task.model, client_images(cell.part)
    task, network = template_task(model), network_work(model)
    if task is None or network is None:
        return None
    work = TrainingWork(
        task=task,
        network=network,
        federation=cell.part.federation,
        method=cell.method.item,
        defense=cell.defense.item,
        images=images,
    )
    if cell.attack is None:
        return training_seconds(work)
    return attack_seconds(work, cell.attack.item, cell.observed, *watched_updates(cell.part.observe, images))


def client_images(experiment: Experiment) -> ClientImages:
    """Return how many images clients have by the settings and the published size of the data set."""
    federation = experiment.federation
    partition: Any = federation.partition
    train, test = _size(experiment.task.dataset)
    if partition.name == DOMAINS:  # one domain is the held-out client's
        clients = partition.clients or SOURCE_DOMAINS
        left = SOURCE_DOMAINS / (SOURCE_DOMAINS + 1) / clients
        return ClientImages(clients=clients, train=left * train, test=left * test, held_out=federation.held_out_clients)
    every = int(getattr(partition, "clients", None) or 4)
    return ClientImages(
        clients=max(every - federation.held_out_clients, 1),
        train=getattr(partition, "train_size", None) or train / every,
        test=getattr(partition, "test_size", None) or test / every,
        held_out=federation.held_out_clients,
        global_test=test if federation.global_test else 0,
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


def watched_updates(observe: ObserveSpec, images: ClientImages) -> tuple[int, float]:
    """Return how many updates are attacked, and how many images each has."""
    count = observe.images or ceil(images.train)
    batch = observe.batch_size or count
    return len(observe.clients) * ceil(count / batch), float(batch)
