from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from reference.hyperfednet_round import Settings, generated, hyperfednet_round
from support import worlds
from support.compare import assert_near, assert_same, tensors

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method, methods
from fl.methods.fedbn import FedBN
from fl.methods.fedprox import FedProx
from fl.methods.hyperfednet import HyperFedNet
from fl.models import build
from fl.models.hypernetworks.filter_hypernetwork import Filters
from fl.predict import predict
from fl.seeds import stream
from fl.simulation.client_round import Round
from fl.simulation.protocol import Protocol
from fl.types import Scope, Task

FILTERS = Filters(embedding=3, block=(2, 2))
METHOD = HyperFedNet(parametrization=FILTERS, lr=0.05, epochs=2, batch_size=4)


@cache
def task() -> Task:
    """The residual network with 2, 4 and 8 channels."""
    return build("hfn-resnet", num_classes=3, input_shape=(1, 8, 8), blocks=1, width=2).to(dtype=torch.float64)


def federation(method: Method, task_: Task | None = None, **protocol: Any) -> Federation:
    data = [ClientData(worlds.images(n, "train", n), worlds.images(4, "test", n)) for n in (8, 6, 8)]
    return Federation(Client(task_ or task(), method), data, protocol=Protocol(**protocol))


def batches(done: Round) -> list[tuple[torch.Tensor, torch.Tensor]]:
    trace = done.trace
    return [(trace.inputs[index], trace.labels[index]) for (index,) in trace.order[0]]


def sizes(task_: Task, filters: Filters) -> tuple[int, int]:
    """Shared and all parameters."""
    params = filters.initial_parameters(task_, stream(0, "init"))
    shared = sum(v.numel() for n, v in params.items() if filters.scope(n) is Scope.SHARED)
    return shared, sum(v.numel() for v in params.values())


@pytest.mark.parametrize(("embedding", "cost"), [(1, 640), (64, 151_840), (128, 565_536)])
@pytest.mark.parametrize(("shape", "blocks"), [((1, 28, 28), 1), ((1, 28, 28), 6), ((3, 32, 32), 6)])
def test_cost_per_round_is_the_published_one(embedding: int, cost: int, shape: tuple[int, ...], blocks: int) -> None:
    network = build("hfn-resnet", num_classes=10, input_shape=shape, blocks=blocks)
    assert 2 * sizes(network, Filters(embedding=embedding))[0] == cost


@pytest.mark.parametrize(
    ("shape", "blocks", "cost"),
    [((1, 28, 28), 1, 155_508), ((1, 28, 28), 6, 1_127_668), ((3, 32, 32), 6, 1_128_244)],
)
def test_cost_per_round_of_fedavg_is_the_published_one(shape: tuple[int, ...], blocks: int, cost: int) -> None:
    network = build("hfn-resnet", num_classes=10, input_shape=shape, blocks=blocks)
    assert 2 * sum(value.numel() for value in network.parameters.values()) == cost


def test_the_network_for_cifar_100_is_twice_as_wide() -> None:
    network = build("hfn-resnet", num_classes=100, width=32)
    assert 2 * sum(value.numel() for value in network.parameters.values()) == 4_520_200
    assert 2 * sizes(network, Filters(embedding=1))[0] == 640


def test_a_round_sends_the_hypernetwork_and_nothing_else() -> None:
    network = build("hfn-resnet", num_classes=3, input_shape=(1, 8, 8), blocks=1, normalize=False)
    method = HyperFedNet(parametrization=Filters(embedding=1), epochs=1, batch_size=4)
    data = [ClientData(replace(b, inputs=b.inputs.float()), b) for b in (worlds.images(4, "train"),)]
    run = Federation(Client(network, method), data)
    record = run.step(evaluate=False)
    assert record.numbers_up + record.numbers_down == 640
    assert all(name.startswith("hypernet.16x16x3x3.") for name in run.server.shared)
    assert set(run.clients[0].buffers) == set(network.buffers)


def test_only_what_blocks_tile_is_generated() -> None:
    made = FILTERS.generates(task())
    groups = [f"body.group{g}.0.conv{c}.weight" for g in (2, 3, 4) for c in (1, 2)]
    assert made == groups  # neither body.conv1 nor the 1x1 shortcuts
    params = FILTERS.initial_parameters(task(), stream(0, "init"))
    tiles = [params[f"embeddings.2x2x3x3.{name}"].shape[:2] for name in made]
    assert tiles == [(1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]
    assert_near(FILTERS.filters(params), generated(params), 1e-14)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected convolutions that blocks"):
        Filters(block=(7, 7)).initial_parameters(task(), stream(0, "init"))


@pytest.mark.parametrize(
    ("model", "shape", "filters"), [("lenet-zhu", (12, 12, 5, 5), 2), ("hfn-lenet", (16, 6, 5, 5), 1)]
)
def test_lenet_has_one_hypernetwork_and_its_first_convolution_stays_local(
    model: str, shape: tuple[int, ...], filters: int
) -> None:
    network = build(model, num_classes=10).to(dtype=torch.float64)
    chosen = Filters(embedding=8, block=None)
    basic = chosen.basic(network)
    assert "body.conv1.weight" not in basic
    assert list(basic.values()) == [shape] * filters
    params = chosen.initial_parameters(network, stream(0, "init"))
    out, inside, height, width = shape
    n = out * height * width
    assert sizes(network, chosen)[0] == inside * 8 * 8 + inside * 8 + n * 8 + n
    assert_near(chosen.filters(params), generated(params), 1e-14)  # type: ignore[arg-type]


@pytest.mark.parametrize(("init", "spread"), [("he", (2 / 144) ** 0.5), ("default", 1 / 3)])
def test_generated_weights_start_as_wide_as_said(init: Any, spread: float) -> None:
    network = build("hfn-resnet", num_classes=10)
    for embedding in (32, 64):
        filters = Filters(embedding=embedding, init=init)
        made = torch.cat(
            [w.flatten() for w in filters.filters(filters.initial_parameters(network, stream(3, "init"))).values()]
        )
        assert float(made.std()) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("regenerate", ["step", "round"])
def test_a_round_equals_the_published_one(regenerate: Any) -> None:
    method = replace(METHOD, parametrization=replace(FILTERS, regenerate=regenerate))
    run = federation(method)
    start = {**run.download(0).shared, **run.clients[0].private}
    buffers = {**run.download(0).buffers, **run.clients[0].buffers}
    done = run.train(0)
    assert [len(steps) for steps in done.trace.order] == [4]
    settings = Settings(method.lr, 0.9, 5e-4, literal=regenerate == "round")
    expected, after = hyperfednet_round(task().model, start, buffers, batches(done), settings)
    assert_near({**done.result.trained(run.download(0).shared), **done.state.private}, expected, 1e-10)
    assert_near(done.result.buffers, after, 1e-12)


def test_the_letter_of_the_algorithm_is_another_method() -> None:
    ends = []
    for regenerate in ("step", "round"):
        method = replace(METHOD, parametrization=replace(FILTERS, regenerate=regenerate))
        ends.append(federation(method).train(0).upload.update)
    first = federation(replace(METHOD, epochs=None, steps=1)).train(0).upload.update
    name = "hypernet.2x2x3x3.out.weight"
    assert float((ends[0][name] - ends[1][name]).norm()) > 1e-3 * float(ends[0][name].norm())
    once = replace(METHOD, epochs=None, steps=1, parametrization=replace(FILTERS, regenerate="round"))
    assert_near(federation(once).train(0).upload.update, first, 1e-12)  # a single step is the same


def test_two_rounds_keep_embeddings_and_statistics_apart() -> None:
    run = federation(METHOD)
    settings = Settings(METHOD.lr, 0.9, 5e-4)
    shared, private = dict(run.server.shared), [dict(state.private) for state in run.clients]
    buffers = [{**run.server.buffers, **state.buffers} for state in run.clients]
    for _ in range(2):
        rounds, ends = run.run_round([0, 1]), []
        for client, done in enumerate(rounds):
            start = {**shared, **private[client]}
            after, buffers[client] = hyperfednet_round(task().model, start, buffers[client], batches(done), settings)
            ends.append(after)
            private[client] = {name: after[name] for name in private[client]}
        shared = {name: (8 * ends[0][name] + 6 * ends[1][name]) / 14 for name in shared}
    assert_near(run.server.shared, shared, 1e-10)
    for client in (0, 1):
        assert_near(run.clients[client].private, private[client], 1e-10)
        assert_near(run.clients[client].buffers, {n: buffers[client][n] for n in run.clients[client].buffers}, 1e-10)
    assert all(torch.equal(v, run.private_init[n]) for n, v in run.clients[2].private.items())  # type: ignore[arg-type]


def test_step_sizes_drop_and_tuning_takes_the_last() -> None:
    method = replace(METHOD, lr=0.1, drops=(2, 5))
    rates = [method.phases(task(), round)[0].groups[0].lr for round in (0, 1, 2, 4, 5)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    assert method.fine_tuning_phases(task(), 3)[0].groups[0].lr == pytest.approx(0.001)
    assert method.fine_tuning_phases(task(), 3)[0].epochs == 3
    assert replace(method, max_norm=2.0).fine_tuning_phases(task(), 3)[0].groups[0].max_norm == 2.0


@pytest.mark.parametrize("tune", ["own", "private"])
def test_tuning_moves_what_is_local(tune: Any) -> None:
    run = federation(replace(METHOD, tune=tune))
    (phase,) = run.client.method.fine_tuning_phases(run.client.task, 2)
    moved = set(phase.assign({**run.server.shared, **run.clients[0].private}))
    private = set(run.clients[0].private)
    assert moved == (private if tune == "private" else private - {n for n in private if n.startswith("embeddings.")})
    letter = replace(METHOD, tune=tune, parametrization=replace(FILTERS, regenerate="round"))
    lifted = FILTERS.generates(task())
    assert not set(letter.fine_tuning_phases(task(), 2)[0].assign(dict.fromkeys(lifted)))
    plain = HyperFedNet(parametrization=methods.get("fedavg")().parametrization)
    assert set(plain.fine_tuning_phases(task(), 2)[0].assign(task().parameters)) == set(task().parameters)


def test_new_users_start_from_fresh_embeddings_and_are_tuned() -> None:
    run = federation(METHOD, held_out_clients=1, fine_tune_epochs=1)
    record = run.step(everyone=True)
    assert record.clients == (0, 1)
    assert {"unseen", "tuned", "unseen_tuned"} <= set(record.further)
    assert_same(run.clients[2].private, run.private_init)
    assert not torch.equal(run.clients[0].private["head.weight"], run.private_init["head.weight"])  # type: ignore[arg-type]


def test_the_server_sees_no_statistics_and_predictions_move_none() -> None:
    run = federation(METHOD)
    run.run_round()
    view, truth = run.observe(0)
    assert not any("running" in name for name in (*view.buffers, *(view.buffers_after or {})))
    assert not view.buffers
    held = [*tensors([run.clients, run.server]), *view.client.fixed_statistics_model.state_dict().values()]
    before = [value.clone() for value in held]
    assert_same(predict(view, truth.candidate()), view.update)
    assert all(torch.equal(x, y) for x, y in zip(before, held, strict=True))


def test_hfn_with_fedprox_is_two_settings() -> None:
    method = FedProx(parametrization=FILTERS, lr=0.05, mu=0.5, momentum=0.0, weight_decay=5e-4, epochs=2, batch_size=4)
    run = federation(method)
    start = {**run.download(0).shared, **run.clients[0].private}
    buffers = {**run.download(0).buffers, **run.clients[0].buffers}
    done = run.train(0)
    optimizer = {"lr": 0.05, "momentum": 0.0, "weight_decay": 5e-4}
    expected = [
        hyperfednet_round(task().model, start, buffers, batches(done), Settings(**optimizer, mu=mu))[0]
        for mu in (0.5, 0.0)
    ]
    ended = {**done.result.trained(run.download(0).shared), **done.state.private}
    assert_near(ended, expected[0], 1e-10)
    with pytest.raises(AssertionError):
        assert_near(ended, expected[1], 1e-4)
    assert all(name.startswith("hypernet.") for name in done.upload.update)


def test_hfn_with_fedbn_shares_what_fedbn_does() -> None:
    local, left = (FedBN(parametrization=replace(FILTERS, local=here)) for here in (True, False))
    names = [*FILTERS.initial_parameters(task(), stream(0, "init")), *task().buffers]
    shared = {name for name in names if left.scope(name, task()) is Scope.SHARED}
    assert {"hypernet.2x2x3x3.in.bias", "body.conv1.weight", "head.weight"} <= shared
    assert not any("norm1" in name or "norm2" in name or "shortcut.1" in name for name in shared)
    assert not any(name.startswith("embeddings.") for name in shared)
    only = {name for name in names if local.scope(name, task()) is Scope.SHARED}
    assert only == {n for n in shared if n.startswith("hypernet.")}
