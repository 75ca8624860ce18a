"""FedBABU by itself: rounds and fine-tuning by plain loops, and what of the classifier anyone sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from reference import personal_rounds as plain
from support import worlds
from support.compare import assert_near, assert_same

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.fedbabu import FedBABU
from fl.methods.fedper import FedPer
from fl.seeds import derive_seed
from fl.simulation.client_round import train
from fl.simulation.protocol import Protocol
from fl.simulation.scores import scores

SETTINGS = {"momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0}


def in_head(name: str) -> bool:
    return name.startswith("head.")


def in_body(name: str) -> bool:
    return not in_head(name)


def federation(method: FedAvg, held_out_clients: int = 0) -> Federation:
    data = [ClientData(worlds.images(4, "train", i), worlds.images(40, "test", i)) for i in range(3)]
    return Federation(
        Client(worlds.task(), method), data, protocol=Protocol(fine_tune_epochs=2, held_out_clients=held_out_clients)
    )


def test_two_rounds_train_the_body_alone() -> None:
    run, model = worlds.federation(FedBABU.example(), rounds=0), worlds.task().model
    for _ in range(2):
        trained = []
        for done in run.run_round():
            local = plain.loaded(model, {})
            plain.sgd(local, in_body, plain.fed(done.trace, 0), lr=0.1, **SETTINGS)  # type: ignore[arg-type]
            trained.append(plain.weights_of(local))
        model = plain.loaded(model, plain.average(trained, [4, 4, 4]))
        body = {name: value for name, value in plain.weights_of(model).items() if in_body(name)}
        assert_near(run.server.shared, body, 1e-10)


@pytest.mark.parametrize("tunes", ["full", "head", "body"])
def test_fine_tuning_moves_what_it_is_told(tunes: Literal["full", "head", "body"]) -> None:
    run = federation(replace(FedBABU.example(), tunes=tunes))
    run.run_round()
    moves = {"full": lambda name: True, "head": in_head, "body": in_body}[tunes]
    rule = Client(run.client.base, run.client.method.fine_tuning_method())
    begin = run.start(
        1, client=rule, seed=derive_seed(0, "tuning"), phases=rule.method.fine_tuning_phases(rule.task, 2)
    )
    done = train(begin)
    local = plain.loaded(worlds.task().model, dict(run.server.shared))  # type: ignore[arg-type]
    assert begin.phases[0].epochs == 2
    plain.sgd(local, moves, plain.fed(done.trace, 0), lr=0.1, **SETTINGS)  # type: ignore[arg-type]
    after = {**done.result.trained(begin.download.shared), **done.result.private}
    assert_near(after, plain.weights_of(local), 1e-10)
    test = run.data[1].test
    assert scores(run)["tuned"][1] == plain.accuracy(local, test.inputs, test.labels)


def test_a_tuned_classifier_is_what_is_scored() -> None:
    run = federation(replace(FedBABU.example(), tunes="head", lr=5.0, max_norm=None), held_out_clients=1)
    found = scores(run)
    assert found["tuned"] != tuple(run.accuracy())
    assert len(found["unseen_tuned"]) == 1
    assert not run.clients[0].private


def test_the_classifier_is_known_and_never_sent() -> None:
    run = worlds.federation(FedBABU.example())
    view, _ = run.observe(0)
    assert not any(map(in_head, (*view.update, *view.shared, *view.private)))
    initial = worlds.task().parameters
    heads = [{n: v for n, v in each.items() if in_head(n)} for each in (view.task.parameters, initial)]
    assert_same(*heads)
    numbers = sum(value.numel() for name, value in initial.items() if in_body(name))
    assert run.record().numbers_down == numbers


def test_its_training_is_fedper_with_the_classifier_at_rest() -> None:
    same = {"lr": 0.1, "epochs": 2, "batch_size": 2, "weight_decay": 5e-4, "momentum": 0.5}
    ours = worlds.federation(FedBABU(**same), rounds=2)  # type: ignore[arg-type]
    theirs = worlds.federation(FedPer(**same, head_lr=0.0), rounds=2)  # type: ignore[arg-type]
    assert_same(ours.server.shared, theirs.server.shared)
    assert torch.equal(torch.tensor(ours.accuracy()), torch.tensor(theirs.accuracy()))


def test_constants_are_the_authors_and_others_are_refused() -> None:
    (phase,) = FedBABU().phases(worlds.task(), 0)
    assert (phase.groups[0].lr, phase.momentum, phase.epochs, phase.batch_size) == (0.1, 0.9, 4, 50)
    with pytest.raises(ValueError, match="tunes: expected 'full', 'head' or 'body', got 'tail'"):
        FedBABU(tunes="tail")  # type: ignore[arg-type]
