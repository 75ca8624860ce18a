"""HyperGenFL against its equations written out with torch's own attention, autograd and optimizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.hypergenfl_round import Attention, joined, learn
from reference.plain_training import train
from support import worlds
from support.compare import assert_near, assert_same
from torch import Tensor, nn

from fl.federation import Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hypergenfl import HyperGenFL, layers
from fl.models.hypernetworks.attention_hypernetwork import AttentionHypernetwork
from fl.parametrization import Parametrization
from fl.seeds import stream
from fl.simulation import checkpoint
from fl.simulation.client_round import Round
from fl.tensors import Tensors, dense
from fl.types import Task

SMALL: dict[str, Any] = {"lr": 0.02, "epochs": 2, "batch_size": 2, "embedding": 8, "heads": 2, "weight_decay": 0.1}
NORM = worlds.task(batch_norm=True)


def fed(task: Task | None = None, **settings: Any) -> tuple[HyperGenFL, Federation]:
    method = HyperGenFL(**{**SMALL, **settings})
    return method, worlds.federation(method, task_=task, rounds=0)


def state(run: Federation) -> dict[str, Tensor]:
    floating = {n: v for n, v in run.server.buffers.items() if v.is_floating_point()}
    return {**{n: dense(v) for n, v in run.server.shared.items()}, **floating}


class Reference:
    """The whole server, from the numbers that `run` starts with."""

    def __init__(self, method: HyperGenFL, run: Federation) -> None:
        own = {n: dense(v) for n, v in run.server.own["hypernetwork"].items()}
        hyper = method.hypernetwork(run.server)
        self.net = Attention(own, hyper.layers, hyper.embedding, hyper.depth, hyper.heads, hyper.floor)
        learned = method.start != "one-hot"
        self.embeddings = [nn.Parameter(own[f"embeddings.{c}"].clone(), requires_grad=learned) for c in range(3)]
        moving = [*self.net.parameters(), *self.embeddings]
        plain = method.server_optimizer == "sgd"
        self.solver: Any = (
            torch.optim.SGD(moving, method.server_lr, weight_decay=method.server_decay)
            if plain
            else torch.optim.AdamW(moving, method.server_lr, weight_decay=method.server_decay)
        )
        self.layers, self.kind, self.sent = list(layers(run.server).values()), method.distance, state(run)

    def shares(self, clients: list[int]) -> Tensor:
        with torch.no_grad():
            return self.net(torch.stack([self.embeddings[c] for c in clients]))

    def learn(self, clients: list[int], models: list[dict[str, Tensor]]) -> None:
        chosen = [self.embeddings[c] for c in clients]
        learn(self.net, chosen, self.solver, self.sent, models, self.layers, self.kind)

    def check(self, run: Federation) -> None:
        expected = {**self.net.named(), **{f"embeddings.{c}": v for c, v in enumerate(self.embeddings)}}
        own = run.server.own["hypernetwork"]
        assert own.keys() == expected.keys()
        for name, value in expected.items():  # a key's bias has a gradient of rounding alone
            torch.testing.assert_close(dense(own[name]), value.detach(), rtol=1e-10, atol=1e-11)


def trained(run: Federation, sent: dict[str, Tensor], done: Round, method: HyperGenFL) -> dict[str, Tensor]:
    model = run.client.base.model.train()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name in sent:
                value.copy_(sent[name])
    batches = [(done.trace.inputs[i], done.trace.labels[i]) for (i,) in done.trace.order[0]]
    kind = torch.optim.AdamW if method.optimizer == "adamw" else torch.optim.SGD
    solver = partial(kind, lr=method.lr, weight_decay=method.weight_decay)
    end = train(model, batches, solver)
    values = {**dict(end.named_parameters()), **dict(end.named_buffers())}
    return {name: values[name].detach() for name in sent}


def with_buffers(shares: Tensor, names: list[list[str]], models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics go with the layer that holds them."""
    prefixes = [parts[0].rpartition(".")[0] for parts in names]
    every = [[*parts] for parts in names]
    for name in models[0]:
        prefix = name.rpartition(".")[0]
        if name not in {n for parts in names for n in parts} and prefix in prefixes:
            every[prefixes.index(prefix)].append(name)
    return joined(shares, every, models)


# Adam divides by itself what is nothing but rounding: a bias before batch norm, and a hypernetwork of equal embeddings
CASES: list[dict[str, Any]] = [
    {"start": "random"},
    {"start": "random", "optimizer": "sgd"},
    {"start": "random", "distance": "mse", "depth": 2},
    {"start": "random", "distance": "log-cosh", "server_optimizer": "sgd", "server_decay": 0.1},
    {"start": "ones", "depth": 3, "server_optimizer": "sgd"},
    {"start": "one-hot"},
    {"start": "random", "distance": "as-printed"},
]


@pytest.mark.parametrize("settings", CASES, ids=[",".join(map(str, case.values())) for case in CASES])
def test_rounds_equal_the_equations(settings: dict[str, Any]) -> None:
    method, run = fed(NORM if settings.get("optimizer") == "sgd" else None, **settings)
    reference = Reference(method, run)
    for clients in ([0, 1, 2], [0, 2], [1, 2]):
        rounds = run.run_round(clients)
        models = [trained(run, reference.sent, done, method) for done in rounds]
        reference.learn(clients, models)
        reference.sent = with_buffers(reference.shares(clients), reference.layers, models)
        reference.check(run)
        assert_near({n: v for n, v in state(run).items() if n in reference.sent}, reference.sent, 1e-10)
    assert reference.sent.keys() == state(run).keys()


def test_algorithm_1_aggregates_what_is_stored_of_the_clients_newly_drawn() -> None:
    method, run = fed(NORM, start="random", aggregates="stored", optimizer="sgd")
    reference = Reference(method, run)
    models = [reference.sent] * 3
    for clients in ([0, 1], [1, 2], [0, 2]):
        reference.sent = with_buffers(reference.shares(clients), reference.layers, [models[c] for c in clients])
        rounds = run.run_round(clients)
        assert_near(state(run), reference.sent, 1e-10)
        for client, done in zip(clients, rounds, strict=True):
            models[client] = trained(run, reference.sent, done, method)
        reference.learn(clients, [models[c] for c in clients])
        reference.check(run)


def test_both_readings_agree_on_all_clients_and_differ_on_some() -> None:
    for drawn, same in (([[0, 1, 2]] * 3, True), ([[0, 1], [1, 2], [0, 2]], False)):
        found = []
        for aggregates in ("arrived", "stored"):
            method, run = fed(start="random", aggregates=aggregates)
            for clients in drawn:
                run.run_round(clients)
            found.append(method.begin_round(run.server, drawn[-1], run.client.task).shared)
        if same:
            assert_near(*found, 1e-12)
        else:
            assert not torch.allclose(dense(found[0]["head.weight"]), dense(found[1]["head.weight"]))


@pytest.mark.parametrize(("distance", "towards"), [("difference", True), ("as-printed", False)])
def test_a_step_moves_the_aggregate_towards_what_clients_learned_but_as_printed(distance: str, towards: bool) -> None:
    method, run = fed(start="random", distance=distance, server_optimizer="sgd", server_lr=1e-4, server_decay=0.0)
    before, sent = run.server, state(run)
    rounds = run.run_round()
    models = [{n: sent[n] - dense(v) for n, v in done.upload.update.items()} for done in rounds]
    names = list(layers(before).values())
    old, new = (torch.stack(list(method.shares(s, [0, 1, 2]).values()), 1) for s in (before, run.server))
    first, second = joined(old, names, models), joined(new, names, models)
    target = {n: sum(model[n] for model in models) / 3 for n in first}
    gained = sum(((second[n] - first[n]) * (target[n] - sent[n])).sum() for n in first)
    assert (float(gained) > 0) == towards
    assert_near({n: v for n, v in state(run).items() if n in second}, second, 1e-12)


def test_shares_sum_to_one_whatever_the_order_of_clients() -> None:
    method, run = fed(start="random")
    shares = method.shares(run.server, [0, 1, 2])
    assert list(shares) == ["body.conv1", "body.fc1", "head"]
    again = method.shares(run.server, [2, 0, 1])
    for name, values in shares.items():
        assert float(values.sum()) == pytest.approx(1, abs=1e-14)
        assert float(values.min()) > 0
        torch.testing.assert_close(again[name], values[[2, 0, 1]], rtol=1e-13, atol=0)
    assert any(float(values.std()) > 1e-4 for values in shares.values())


def test_equal_embeddings_give_equal_shares_and_only_embeddings_learn_first() -> None:
    method, run = fed(start="ones", server_optimizer="sgd", server_lr=1.0, server_decay=0.0)
    before = run.server
    for values in method.shares(before, [0, 1, 2]).values():
        torch.testing.assert_close(values, torch.full((3,), 1 / 3, dtype=torch.float64), rtol=1e-14, atol=0)
    run.run_round()
    own, start = run.server.own["hypernetwork"], before.own["hypernetwork"]
    for name, value in own.items():
        moved = float((dense(value) - dense(start[name])).abs().max())
        assert moved > 1e-8 if name.startswith("embeddings.") else moved < 1e-14, name


@pytest.mark.parametrize("depth", [1, 2])
def test_pull_back_equals_finite_differences(depth: int) -> None:
    hyper = AttentionHypernetwork(layers=4, embedding=6, depth=depth, heads=3)
    params = hyper.initial_parameters(stream(0, "h"), torch.zeros((), dtype=torch.float64))
    draw = stream(0, "v")
    embeddings, grads = (torch.randn(3, n, generator=draw, dtype=torch.float64) for n in (6, 4))
    with torch.no_grad():
        found, back = hyper.pull_back(params, embeddings, grads)
    assert found.keys() == params.keys()

    def along(params: Tensors, embeddings: Tensor) -> float:
        return float((hyper.weights(params, embeddings) * grads).sum())

    h = 1e-6
    for name, gradient in {**found, "v": back}.items():
        start = embeddings if name == "v" else dense(params[name])
        for i in range(0, start.numel(), 7):
            shift = torch.zeros(start.numel(), dtype=torch.float64)
            shift[i] = h
            ends = [start + sign * shift.view_as(start) for sign in (1, -1)]
            up, down = (along(params, end) if name == "v" else along({**params, name: end}, embeddings) for end in ends)
            assert (up - down) / (2 * h) == pytest.approx(float(gradient.flatten()[i]), rel=1e-5, abs=1e-9), name


def test_one_hot_embeddings_have_the_size_of_the_federation_and_stay() -> None:
    method, run = fed(start="one-hot", heads=4)
    assert method.hypernetwork(run.server).embedding == 3
    assert method.hypernetwork(run.server).heads == 1
    run.run_round()
    own = run.server.own["hypernetwork"]
    assert torch.equal(torch.stack([dense(own[f"embeddings.{c}"]) for c in range(3)]), torch.eye(3).double())


def test_without_a_step_equal_shares_are_fedavgs_on_clients_of_equal_size() -> None:
    _, run = fed(NORM, server_lr=0.0, optimizer="sgd")
    plain = worlds.federation(FedAvg(lr=0.02, epochs=2, batch_size=2, weight_decay=0.1), task_=NORM, rounds=0)
    for _ in range(2):
        run.run_round()
        plain.run_round()
    assert_near(state(run), state(plain), 1e-12)
    assert run.server.buffers["body.norm1.num_batches_tracked"] == 0


def test_the_published_constants_and_what_travels() -> None:
    method = HyperGenFL()
    run = worlds.federation(method, rounds=0)
    (phase,) = method.phases(run.client.task, 0)
    assert (phase.optimizer, phase.epochs, phase.batch_size) == ("adamw", 10, 32)
    assert [(g.lr, g.weight_decay) for g in phase.groups] == [(0.01, 1e-5)]
    hyper = method.hypernetwork(run.server)
    assert (hyper.embedding, hyper.depth, hyper.layers) == (128, 1, 3)
    own = run.server.own["hypernetwork"]
    assert all(torch.equal(dense(own[f"embeddings.{c}"]), torch.ones(128).double()) for c in range(3))
    attention = 3 * 128 * 128 + 3 * 128 + 128 * 128 + 128
    assert sum(v.numel() for n, v in own.items() if "embeddings" not in n) == attention + 3 * 129
    record = run.step(evaluate=False)
    assert record.numbers_up == record.numbers_down == sum(v.numel() for v in run.client.task.parameters.values())


@pytest.mark.parametrize("aggregates", ["arrived", "stored"])
def test_a_federation_read_back_goes_on_as_the_whole_one(tmp_path: Path, aggregates: str) -> None:
    _, whole = fed(NORM, aggregates=aggregates, start="random")
    whole.run_round([0, 1])
    checkpoint.save(tmp_path / "state.npz", whole)
    _, again = fed(NORM, aggregates=aggregates, start="random")
    checkpoint.load(tmp_path / "state.npz", again)
    for run in (whole, again):
        run.run_round([1, 2])
    assert_same(state(again), state(whole))  # type: ignore[arg-type]
    assert again.server.own.keys() == whole.server.own.keys()
    for name, payload in whole.server.own.items():
        assert_same(again.server.own[name], payload)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "heads that divide"),
        ({"depth": 0}, "expected depth >= 1"),
        ({"floor": 0.0}, "expected floor > 0"),
        ({"layers": 0}, "expected layers >= 1"),
    ],
)
def test_sizes_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionHypernetwork(**{"layers": 2, "embedding": 8, **settings})


def test_another_generator_on_the_clients_is_refused() -> None:
    class Other(Parametrization):
        pass

    with pytest.raises(ValueError, match="'direct'"):
        HyperGenFL(parametrization=Other())
