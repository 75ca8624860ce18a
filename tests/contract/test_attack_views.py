"""Attacks on batches, several steps, earlier rounds and groups hold nothing of the client, and say if labels helped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from support import worlds
from support.attacking import ALIKE, ATTACKS, assert_equal
from support.compare import tensors
from support.cover import SLOW

from attacks import NotApplicable, Reconstruction
from attacks.base import Result
from defenses.secagg import SecAgg
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.view import ServerView, ThreatModel

STEP, STEPS = FedAvg(lr=0.1, steps=1, batch_size=None), FedAvg(lr=0.1, steps=2, batch_size=1)
HYPER = replace(HyperFL.example(), head_epochs=0)


@dataclass(frozen=True)
class Kind:
    """What is seen of clients with so many images each."""

    method: Method
    images: int = 2
    rounds: int = 0
    defense: Defense = field(default_factory=Defense)


KINDS = {
    "one": Kind(STEP, 1),
    "one, hyperfl": Kind(worlds.one_step(HYPER), 1),
    "batch": Kind(STEP),
    "batch, hyperfl": Kind(worlds.one_step(HYPER)),
    "steps": Kind(STEPS, 2),
    "steps, hyperfl": Kind(replace(HYPER, steps=2, epochs=None, batch_size=1), 2),
    "rounds": Kind(STEP, rounds=1),
    "group": Kind(STEP, defense=SecAgg(group_size=2)),
}
TWO = ("batch", "steps, hyperfl")


def victim(kind: Kind, *, knows_labels: bool = False) -> tuple[ServerView, list[Any], Federation]:
    """The view, and what of the clients no attack may hold."""
    data = [ClientData(worlds.images(kind.images, "seen", i), worlds.images(1, "test", i)) for i in range(2)]
    run = Federation(Client(worlds.task(), kind.method, kind.defense), data)
    threat = ThreatModel(knows_labels=knows_labels, history_rounds=kind.rounds)
    earlier: tuple[ServerView, ...] = ()
    held: list[Any] = [data]
    for _ in range(kind.rounds):
        view, truth = run.observe(0, threat=replace(threat, history_rounds=0))
        earlier, held = (*earlier, view), [*held, truth]
        run.run_round()
    view, truth = run.observe(0, threat=threat, history=earlier)
    return view, [*held, truth], run


@cache
def plain(kind: str, name: str) -> Result:
    """What the attack finds of such a victim."""
    return ATTACKS[name](victim(KINDS[kind])[0], seed=3)


def _pairs() -> list[Any]:
    kinds = [kind for kind in KINDS if not kind.startswith("one")]
    return [
        pytest.param(kind, name, marks=[SLOW] if name in ALIKE and kind not in TWO else [])
        for kind in kinds
        for name in ATTACKS
    ]


@pytest.mark.parametrize(("kind", "name"), _pairs())
def test_an_attack_holds_nothing_of_the_client(kind: str, name: str) -> None:
    view, held, run = victim(KINDS[kind])
    assert len(view.history) == KINDS[kind].rounds
    server = {value.data_ptr() for value in tensors([run.download(0)])}
    for value in tensors([held, [state.private for state in run.clients]]):
        if value.data_ptr() not in server:
            value.fill_(torch.nan) if value.is_floating_point() else value.zero_()
    assert all(value.isfinite().all() for value in tensors(view))
    assert_equal(ATTACKS[name](view, seed=3), plain(kind, name))


@pytest.mark.parametrize("name", list(ATTACKS))
@pytest.mark.parametrize("kind", ["one", "one, hyperfl", "batch"])
def test_a_result_says_whether_known_labels_were_used(kind: str, name: str) -> None:
    blind, told = plain(kind, name), ATTACKS[name](victim(KINDS[kind], knows_labels=True)[0], seed=3)
    if isinstance(blind, Reconstruction):
        assert "labels" not in blind.knowledge
    if isinstance(told, NotApplicable) or told.labels is None:
        return
    found = blind.labels if isinstance(blind, Reconstruction) else None
    if found is None or found.tolist() != told.labels.tolist():
        assert "labels" in told.knowledge
