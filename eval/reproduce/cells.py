"""The cells that an experiment comes to, known by everything but its data, which are not loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

from attacks.base import Attack
from defenses import Defense
from eval.experiment import sweep
from eval.experiment.spec import Entry, Experiment
from eval.reproduce.items import PaperRow
from eval.run.cache_keys import Cell, TrainedUpdates, attack_cell, training_cell
from eval.run.federation_data import FederationData
from eval.run.plan import watched_rounds
from fl.method import Method


@dataclass(frozen=True, eq=False)
class PlannedCell:
    """One cell of an experiment.

    Attributes:
        row: whose it is.
        method: which is trained.
        attack: which is run; None for a training.
        defense: of the clients.
        part: the experiment as both have it.
        observed: the method as it is in the observed round.
        cell: its settings; the digest of the data is empty, so its id is that of no run.
        training: the cell of the training that is attacked; a training's own.
    """

    row: PaperRow
    method: Entry[Method]
    attack: Entry[Attack] | None
    defense: Entry[Defense]
    part: Experiment
    observed: Method
    cell: Cell
    training: Cell


def planned_cells(experiment: Experiment) -> list[PlannedCell]:
    """Return every cell, the attacks on a training behind it; those of entries that are alike stand there twice."""
    bare = replace(experiment, published=())  # figures of papers are checked whenever an experiment is made
    observed: dict[str, Mapping[str, Method]] = {}
    return [one for method in bare.method for one in _cells_of_method(bare, method, observed)]


def _cells_of_method(
    experiment: Experiment, method: Entry[Method], observed: dict[str, Mapping[str, Method]]
) -> Iterator[PlannedCell]:
    """Yield the cells of a method; `observed` keeps methods in observed rounds, by the settings they are of."""
    own = sweep.experiment_of(experiment, method, None)
    # all that a cell takes of data, but for their digest
    data = cast("FederationData", SimpleNamespace(task_spec=own.task, digest="", device_kind="cpu"))
    parts, known = [], dict[str, Experiment]()
    for attack in experiment.attack:
        if not attack.against or method.label in attack.against:
            changes = json.dumps(attack.changes, sort_keys=True)
            if changes not in known:
                known[changes] = sweep.experiment_of(experiment, method, attack)
            part = known[changes]
            own_round = json.dumps(part.observe.method, sort_keys=True)
            if own_round not in observed:
                observed[own_round] = part.observed_methods()
            parts.append((attack, part, observed[own_round][method.label]))
    for seed in experiment.seeds:
        for defense in experiment.defense:
            training = training_cell(data, own.federation, method.item, defense.item, seed)
            yield PlannedCell(PaperRow(method.label), method, None, defense, own, method.item, training, training)
            for attack, part, watched in parts:
                row = PaperRow(method.label, attack.label)
                for number in watched_rounds(part, method):
                    updates = TrainedUpdates(training, number, watched, part.threat, part.observe)
                    cell = attack_cell(updates, attack.item, part.score, None)
                    yield PlannedCell(row, method, attack, defense, part, watched, cell, training)
