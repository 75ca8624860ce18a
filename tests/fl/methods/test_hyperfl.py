from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.hyperfl_round import Settings, hyperfl_round
from support import worlds
from support.compare import assert_near

from fl.client import Client
from fl.methods.hyperfl import HyperFL
from fl.models import build
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.seeds import stream
from fl.simulation.client_round import ClientState, Round, prepare, train
from fl.tensors import LowRank, dense, norm
from fl.types import Scope

MODEL = worlds.task()


def prepared(max_norm: float, **settings: Any) -> tuple[HyperFL, worlds.Federation]:
    hypernet = Hypernetwork(embedding=5, hidden=12, **settings)
    method = HyperFL(parametrization=hypernet, lr=0.05, epochs=3, batch_size=2, max_norm=max_norm)
    return method, worlds.federation(method, rounds=0)


def batches(done: Round, phase: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    trace = done.trace
    return [(trace.inputs[index], trace.labels[index]) for (index,) in trace.order[phase]]


def after(done: Round, shared: dict[str, Any]) -> dict[str, Any]:
    return {**done.result.trained(shared), **done.state.private}


@pytest.mark.parametrize("init", ["published", "scaled"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("max_norm", [50.0, 0.05])
def test_a_round_equals_the_published_one(init: str, bias: bool, max_norm: float) -> None:
    method, run = prepared(max_norm, init=init, bias=bias)
    shared, private = run.download(0).shared, run.clients[0].private
    done = run.train(0)
    assert [len(steps) for steps in done.trace.order] == [2, 6]
    constants = Settings(method.lr, method.head_lr, method.momentum, method.weight_decay, max_norm)
    expected = hyperfl_round(MODEL.model, {**shared, **private}, batches(done, 0), batches(done, 1), constants)
    assert_near(after(done, shared), expected, 1e-10)
    moved = {name: shared[name] - expected[name] for name in shared}
    assert_near(done.upload.update, moved, 1e-10)
    frozen = replace(method, max_norm=None)
    unclipped = train(prepare(Client(MODEL, frozen), run.clients[0], run.download(0), run.data[0].train))
    bound = not torch.allclose(
        dense(unclipped.upload.update["hypernet.trunk.bias"]), dense(done.upload.update["hypernet.trunk.bias"])
    )
    assert bound == (max_norm == 0.05)


def test_two_rounds_of_two_clients_equal_the_dense_mean() -> None:
    method, run = prepared(50.0, init="scaled")
    constants = Settings(method.lr, method.head_lr, method.momentum, method.weight_decay, 50.0)
    shared, private = dict(run.server.shared), [dict(state.private) for state in run.clients]
    for _ in range(2):
        ends = []
        rounds = run.run_round([0, 2])
        for client, done in zip((0, 2), rounds, strict=True):
            start = {**shared, **private[client]}
            ends.append(hyperfl_round(MODEL.model, start, batches(done, 0), batches(done, 1), constants))
            private[client] = {name: ends[-1][name] for name in private[client]}
        shared = {name: (ends[0][name] + ends[1][name]) / 2 for name in shared}
        assert_near(run.server.shared, shared, 1e-10)
        assert_near(run.clients[2].private, private[2], 1e-10)
    assert run.clients[1].private is run.private_init


def test_head_updates_stay_structured_and_the_classifier_phase_moves_only_it() -> None:
    method, run = prepared(50.0)
    update = run.train(0).upload.update
    assert all(
        isinstance(v, LowRank) == ((".heads." in k and k.endswith(".weight.weight")) or k.endswith(".bias.weight"))
        for k, v in update.items()
    )
    only_head = replace(method, epochs=0)
    done = train(prepare(Client(MODEL, only_head), run.clients[0], run.download(0), run.data[0].train))
    assert not any(dense(v).any() for v in done.upload.update.values())
    assert torch.equal(done.state.private["embedding"], run.clients[0].private["embedding"])
    assert not torch.equal(done.state.private["head.weight"], run.clients[0].private["head.weight"])


def test_a_fixed_embedding_stays() -> None:
    method, run = prepared(50.0)
    client = Client(MODEL, replace(method, learn_embedding=False))
    done = train(prepare(client, run.clients[0], run.download(0), run.data[0].train))
    assert torch.equal(done.state.private["embedding"], run.clients[0].private["embedding"])


def test_a_dead_hidden_layer_gives_finite_gradients() -> None:
    _, run = prepared(0.05, init="scaled")
    dead = {**run.server.shared, "hypernet.trunk.bias": torch.full((12,), -100.0, dtype=torch.float64)}
    run.server = replace(run.server, shared=dead)
    view, truth = run.observe(0)
    guess = {name: value.clone().requires_grad_() for name, value in truth.private.items()}
    grads = torch.autograd.grad(norm(predict(view, replace(truth.candidate(), private=guess))), list(guess.values()))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    ("name", "numbers", "generated"), [("hyperfl-grey", 14_943_424, 115_776), ("hyperfl-colour", 13_733_920, 106_400)]
)
def test_the_published_networks_have_as_many_parameters_as_published(name: str, numbers: int, generated: int) -> None:
    method = HyperFL()
    task = build(name, num_classes=10, seed=0)
    hypernet = method.parametrization
    assert isinstance(hypernet, Hypernetwork)
    assert sum(task.parameters[made].numel() for made in hypernet.generates(task)) == generated
    params = method.initial_parameters(task, stream(0, "init"))
    assert sum(v.numel() for k, v in params.items() if method.scope(k, task) is Scope.SHARED) == numbers
    assert params["embedding"].shape == (64,)
    private = {name for name in params if method.scope(name, task) is Scope.PRIVATE}
    assert private == {"embedding", "head.weight", "head.bias"}


def test_all_clients_start_from_the_same_embedding() -> None:
    _, run = prepared(50.0)
    assert all(torch.equal(c.private["embedding"], run.clients[0].private["embedding"]) for c in run.clients)
    assert isinstance(run.clients[0], ClientState)
