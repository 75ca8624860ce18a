"""Ditto by itself: both models by plain loops, who predicts by which, and that a server learns of one alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import personal_rounds as plain
from support import worlds
from support.compare import assert_near, assert_same
from support.probes import DPSGD

from fl.client import Client
from fl.engines import Processes
from fl.federation import ClientData, Federation
from fl.methods.ditto import Ditto
from fl.methods.fedavg import FedAvg
from fl.methods.local import Local
from fl.simulation import checkpoint
from fl.simulation.protocol import Protocol
from fl.simulation.scores import scores
from fl.tensors import Tensors, dense

SAME = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
METHOD = Ditto(**SAME, lam=0.7)  # type: ignore[arg-type]


def federation(
    method: FedAvg, *, norm: bool = False, protocol: Protocol | None = None, client_fraction: float = 1.0
) -> Federation:
    data = [ClientData(worlds.images(4, "train", i), worlds.images(40, "test", i)) for i in range(3)]
    client = Client(worlds.task(batch_norm=norm), method)
    return Federation(client, data, client_fraction=client_fraction, protocol=protocol or Protocol())


def personal(run: Federation, number: int) -> Tensors:
    return run.clients[number].personal["parameters"]


@pytest.mark.parametrize("lam", [0.7, 0.0])
def test_two_rounds_equal_both_loops(lam: float) -> None:
    run, model = worlds.federation(replace(METHOD, lam=lam, max_norm=None), rounds=0), worlds.task().model
    own = [plain.loaded(model, {}) for _ in range(3)]
    for _ in range(2):
        sent, trained = plain.weights_of(model), []
        for i, done in enumerate(run.run_round()):
            batches, local = plain.fed(done.trace, 0), plain.loaded(model, {})
            common = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4}
            plain.sgd(local, lambda name: True, batches, **common)  # type: ignore[arg-type]
            plain.sgd(own[i], lambda name: True, batches, **common, pulled=(lam, sent))  # type: ignore[arg-type]
            trained.append(plain.weights_of(local))
            assert_near(done.state.personal["parameters"], plain.weights_of(own[i]), 1e-10)
        model = plain.loaded(model, plain.average(trained, [4, 4, 4]))
        assert_near(run.server.shared, plain.weights_of(model), 1e-10)


@pytest.mark.parametrize("norm", [False, True])
def test_what_is_sent_is_that_of_fedavg(norm: bool) -> None:
    ours, theirs = (federation(kind, norm=norm) for kind in (METHOD, FedAvg(**SAME)))  # type: ignore[arg-type]
    for run in (ours, theirs):
        run.run_round()
        run.run_round()
    assert_same(ours.server.shared, theirs.server.shared)
    assert_same(ours.server.buffers, theirs.server.buffers)
    views = [run.observe(1)[0] for run in (ours, theirs)]
    assert_same(views[0].update, views[1].update)
    assert views[0].private == views[1].private == {}
    assert ours.record().numbers_down == theirs.record().numbers_down


def test_without_a_pull_the_personal_model_is_trained_alone_with_statistics_of_its_own() -> None:
    ours, alone = (federation(kind, norm=True) for kind in (replace(METHOD, lam=0.0), Local(**SAME)))  # type: ignore[arg-type]
    for run in (ours, alone):
        run.run_round()
        run.run_round()
    for i in range(3):
        assert_same(personal(ours, i), alone.clients[i].private)
        assert_same(ours.clients[i].personal["buffers"], alone.clients[i].buffers)
    assert ours.accuracy() == alone.accuracy()
    assert ours.accuracy(tuned=True) == alone.accuracy(tuned=True)


def test_clients_predict_by_their_own_models() -> None:
    run = federation(replace(METHOD, lr=0.5))
    rounds = run.run_round(evaluate=True)
    own = [plain.loaded(worlds.task().model, {n: dense(v) for n, v in personal(run, i).items()}) for i in range(3)]
    tests = [one.test for one in run.data]
    expected = [plain.accuracy(model, test.inputs, test.labels) for model, test in zip(own, tests, strict=True)]
    assert run.accuracy() == [done.accuracy for done in rounds] == expected
    everyone = plain.loaded(worlds.task().model, dict(run.server.shared))  # type: ignore[arg-type]
    assert expected != [plain.accuracy(everyone, test.inputs, test.labels) for test in tests]


def test_a_model_waits_for_its_client_to_take_part_and_outsiders_have_none() -> None:
    run = federation(
        METHOD,
        client_fraction=0.5,
        protocol=Protocol(held_out_clients=1, fine_tune_epochs=1, global_test=worlds.images(30, "whole")),
    )
    (done,) = run.run_round()
    other = 1 - done.upload.client
    assert_same(personal(run, other), run.client.task.parameters)  # type: ignore[arg-type]
    assert not run.clients[2].personal
    found, plainly = scores(run), federation(FedAvg(**SAME), client_fraction=0.5, protocol=run.protocol)  # type: ignore[arg-type]
    plainly.run_round()
    theirs = scores(plainly)
    assert found["unseen"] == theirs["unseen"]
    assert found["tuned"] == theirs["tuned"]
    assert found["global"] == tuple(run.score(i, run.protocol.global_test) for i in (0, 1))


@pytest.mark.parametrize(("engine", "workers"), [("vmap", 1), pytest.param("loop", 2, marks=pytest.mark.slow)])
def test_every_engine_trains_it(engine: str, workers: int) -> None:
    runs = [federation(METHOD) for _ in range(2)]
    runs[1] = Federation(runs[1].client, runs[1].data, engine=engine, workers=workers)  # type: ignore[arg-type]
    if isinstance(runs[1]._engine, Processes):
        runs[1]._engine.patience = 0.0
    for run in runs:
        run.run_round()
        run.run_round()
    for i in range(3):
        assert_near(personal(runs[1], i), personal(runs[0], i), 1e-12)
    assert runs[0].accuracy() == runs[1].accuracy()
    runs[1].close()


def test_a_run_read_back_has_its_models(tmp_path: Path) -> None:
    run, again = (federation(METHOD, norm=True) for _ in range(2))
    run.run_round()
    checkpoint.save(tmp_path / "a.npz", run)
    checkpoint.load(tmp_path / "a.npz", again)
    for mine, other in zip(again.clients, run.clients, strict=True):
        for part in ("parameters", "buffers"):
            assert_same(mine.personal[part], other.personal[part])


def test_no_defense_touches_the_personal_model() -> None:
    runs = [worlds.federation(METHOD, defense) for defense in (None, DPSGD(clip=0.1))]
    assert_same(personal(runs[0], 1), personal(runs[1], 1))
    assert not torch.equal(*(dense(run.server.shared["head.weight"]) for run in runs))


def test_constants_are_the_authors_and_others_are_refused() -> None:
    (phase,) = Ditto().phases(worlds.task(), 0)
    assert (phase.groups[0].lr, phase.steps, phase.batch_size, Ditto().lam) == (0.05, 2, 16, 1.0)
    assert Ditto(epochs=3).steps is None
    with pytest.raises(ValueError, match="lam: expected a number >= 0, got -1"):
        Ditto(lam=-1.0)
