"""Rounds of the methods with differential privacy, against naive ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import dp_rounds
from support import worlds
from support.compare import assert_near, assert_same
from support.private import federation_of
from torch import Tensor

import fl.privacy.private_method
from fl.method import methods
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.ppsgd import PPSGD
from fl.privacy.private_method import NOISE_KEY, PrivateMethod
from fl.simulation.checkpoint import load, save
from fl.simulation.client_round import Round
from fl.tensors import dense, norm


@pytest.mark.parametrize(("private", "plain"), [(DPHyperFL(), "hyperfl"), (DPFedAvg(), "fedavg")])
def test_defaults_are_those_of_the_method_behind(private: PrivateMethod, plain: str) -> None:
    mine, theirs = methods.spec(private), methods.spec(methods.build(plain))
    differ = {key for key in theirs if mine[key] != theirs[key]}
    assert differ - {"name"} == ({"momentum", "weight_decay", "epochs", "sampler"} if plain == "fedavg" else set())


# ---- one round against a naive one ---------------------------------------------------------------------------------
def steps_of(done: Round) -> list[dp_rounds.Steps]:
    trace = done.trace
    return [
        dp_rounds.batches(
            trace.inputs,
            trace.labels,
            [index for (index,) in steps],
            [drawn[NOISE_KEY].tolist() for drawn in draws],
        )
        for steps, draws in zip(trace.order, trace.draws, strict=True)
    ]


def settings_of(method: PrivateMethod) -> dp_rounds.Settings:
    return dp_rounds.Settings(
        lr=method.lr,  # type: ignore[attr-defined]
        clip=method.clip,
        sigma=method.sigma,
        denominator=method.denominator(),
        head_lr=getattr(method, "head_lr", 0.1),
        max_norm=getattr(method, "max_norm", None) or 50.0,
    )


def averaged(trained: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in trained]).mean(0) for name in trained[0]}


@pytest.mark.parametrize("mode", ["dp-joint", "as-published"])
@pytest.mark.parametrize("clip", [0.3, 100.0])
def test_a_round_of_dp_fedavg(mode: Any, clip: float) -> None:
    method = replace(DPFedAvg.example(), mode=mode, clip=clip)
    run = federation_of(method)
    rounds = run.run_round()
    model = worlds.task().model
    expected = [dp_rounds.dp_fedavg(model, steps_of(done), settings_of(method)) for done in rounds]
    assert_near(run.server.shared, averaged(expected), 1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["dp-joint", "as-published"])
def test_a_round_of_centaur(mode: Any) -> None:
    method = replace(Centaur.example(), mode=mode, clip=0.3)
    run = federation_of(method)
    rounds = run.run_round()
    plain = mode == "as-published"
    expected = [
        dp_rounds.centaur(worlds.task().model, steps_of(done), settings_of(method), plain_head=plain) for done in rounds
    ]
    mean = averaged(expected)
    assert_near(run.server.shared, {name: mean[name] for name in run.server.shared}, 1e-10)
    for done, own in zip(rounds, expected, strict=True):
        assert_near(done.state.private, {name: own[name] for name in done.state.private}, 1e-10)


@pytest.mark.parametrize("mode", ["dp-joint", "as-published"])
def test_a_round_of_ppsgd(mode: Any) -> None:
    method = replace(PPSGD.example(), mode=mode, clip=0.3)
    run = federation_of(method, rounds=1)  # personal classifiers have left zero
    before = {**run.server.shared}
    model = worlds.task().model
    model.load_state_dict({n.removeprefix("common."): dense(v) for n, v in before.items()}, strict=True)
    personal = [{n.removeprefix("personal.head."): dense(v) for n, v in state.private.items()} for state in run.clients]
    assert any(value.any() for value in personal[0].values())
    rounds = run.run_round()
    expected = [
        dp_rounds.ppsgd(model, own, steps_of(done), settings_of(method), plain_head=mode == "as-published")
        for own, done in zip(personal, rounds, strict=True)
    ]
    mean = averaged([common for common, _ in expected])
    assert_near({n.removeprefix("common."): v for n, v in run.server.shared.items()}, mean, 1e-10)  # type: ignore
    for done, (_, own) in zip(rounds, expected, strict=True):
        found = {n.removeprefix("personal.head."): v for n, v in done.state.private.items()}
        assert_near(found, own, 1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise_on", ["extractor", "hypernetwork"])
@pytest.mark.parametrize("clip", [0.3, 100.0])
def test_a_round_of_dp_hyperfl(noise_on: Any, clip: float) -> None:
    method = replace(DPHyperFL.example(), noise_on=noise_on, clip=clip, max_norm=1.0)
    run = federation_of(method)
    params = {name: dense(value) for name, value in {**run.server.shared, **run.clients[0].private}.items()}
    rounds = run.run_round()
    expected = [
        dp_rounds.dp_hyperfl(
            worlds.task().model, params, steps_of(done), settings_of(method), on_extractor=noise_on == "extractor"
        )
        for done in rounds
    ]
    mean = averaged(expected)
    assert_near(run.server.shared, {name: mean[name] for name in run.server.shared}, 1e-10)
    for done, own in zip(rounds, expected, strict=True):
        assert_near(done.state.private, {name: own[name] for name in done.state.private}, 1e-10)


@pytest.mark.parametrize("clip", [0.02, 100.0])
def test_a_round_at_client_level(clip: float) -> None:
    method = replace(DPFedAvg.example(), mode="client-level", clip=clip)
    run = federation_of(method, rounds=1)
    before = {name: dense(value) for name, value in run.server.shared.items()}
    key = dense(run.server.own[fl.privacy.private_method.SERVER_NOISE]["key"]) + torch.tensor([0, 1])
    rounds = run.run_round()
    plain = methods.build("fedavg")
    assert all(not drawn for done in rounds for steps in done.trace.draws for drawn in steps)
    assert method.sampler == "shuffle"
    assert type(method).gradient is not type(plain).gradient
    after = [done.result.trained(before) for done in rounds]  # type: ignore[arg-type]
    dense_after = [{name: dense(value) for name, value in one.items()} for one in after]
    expected = dp_rounds.client_level(before, dense_after, clip, method.sigma, key.tolist())
    assert_near(run.server.shared, expected, 1e-10)  # type: ignore[arg-type]
    assert float(norm(rounds[0].upload.update)) > 0.02  # the server sees it as it is


def test_clients_at_client_level_train_as_in_the_method_behind() -> None:
    method = replace(DPFedAvg.example(), mode="client-level")
    plain = methods.build(
        {"name": "fedavg", "lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "epochs": 2, "batch_size": 2}
    )
    one, other = federation_of(method).train(0), worlds.federation(plain, rounds=0).train(0)
    assert_same(one.upload.update, other.upload.update)


def test_updates_that_are_no_numbers_count_as_nothing() -> None:
    method = replace(DPFedAvg.example(), mode="client-level", noise_multiplier=0.0, clip=0.1)
    run = federation_of(method)
    uploads = [run.train(number).upload for number in range(3)]
    bad = replace(uploads[0], update={n: dense(v) * float("nan") for n, v in uploads[0].update.items()})
    after = method.aggregate(run.server, [bad, *uploads[1:]], run.client.task)
    change = {n: dense(run.server.shared[n]) - dense(v) for n, v in after.shared.items()}
    assert all(value.isfinite().all() for value in change.values())
    assert float(norm(change)) <= 2 * 0.1 / 3  # type: ignore[arg-type]


def test_a_checkpoint_brings_back_the_count(tmp_path: Any) -> None:
    method = replace(DPFedAvg.example(), mode="client-level")
    run = federation_of(method, rounds=2)
    save(tmp_path / "state.npz", run)
    again = federation_of(method)
    load(tmp_path / "state.npz", again)
    run.run_round()
    again.run_round()
    assert_same(run.server.shared, again.server.shared)
    assert dense(again.server.own[fl.privacy.private_method.PARTICIPATION]["rounds"]).tolist() == [3, 3, 3]
