"""HyperFL over frozen networks: adapters are generated, the backbone neither trains nor travels."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.hyperfl_round import Settings, hyperfl_round
from support import worlds
from support.compare import assert_near, assert_same
from torch.func import vmap

from fl.client import Client
from fl.engines import Factored
from fl.federation import ClientData, Federation
from fl.gradient import func_derivative
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl_lpm import STATISTICS, HyperFLLPM
from fl.models import models
from fl.models.building_blocks.layers import Classifier
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.models.resnet_adapter import ResNetAdapter
from fl.models.vit_adapter import ViTAdapter
from fl.predict import predict
from fl.seeds import stream
from fl.simulation.client_round import Round
from fl.tensors import dense
from fl.types import Scope, Task, frozen

TINY = Hypernetwork(embedding=4, hidden=10, init="scaled")
METHOD = HyperFLLPM(parametrization=TINY, lr=0.05, epochs=3, batch_size=2, weight_decay=1e-2)
BOTH = pytest.mark.parametrize("name", ["resnet18-adapter", "vit-adapter"])
CASES = pytest.mark.parametrize(
    ("name", "train_mode"), [("resnet18-adapter", False), ("resnet18-adapter", True), ("vit-adapter", False)]
)


def task(name: str, **settings: Any) -> Task:
    network = replace(dict(models.examples())[name], **settings)
    return network.build_task(num_classes=worlds.CLASSES, seed=0).to(dtype=torch.float64)


def federation(name: str, method: Method, **settings: Any) -> Federation:
    data = [ClientData(worlds.images(n, "train"), worlds.images(4, "test", n)) for n in (3, 4, 5)]
    return Federation(Client(task(name), method), data, **settings)


@pytest.mark.parametrize(
    ("network", "generated", "numbers"), [(ViTAdapter(), 235_296, 30_361_504), (ResNetAdapter(), 352_000, 45_416_320)]
)
def test_the_published_networks_have_as_many_parameters_as_published(
    network: Any, generated: int, numbers: int
) -> None:
    with torch.device("meta"):
        model = Classifier(None, network.body(), network.input_shape, 10)
    method = HyperFLLPM()
    whole = Task(model, network.input_shape, 10)
    hypernet = method.parametrization
    assert isinstance(hypernet, Hypernetwork)
    made = [whole.parameters[name].numel() for name in hypernet.generates(whole)]
    assert sum(made) == generated
    assert _numbers(hypernet, made) == numbers
    small = task("resnet18-adapter")  # the formula is what is really made
    params = replace(METHOD, parametrization=TINY).initial_parameters(small, stream(0, "init"))
    shared = sum(v.numel() for k, v in params.items() if METHOD.scope(k, small) is Scope.SHARED)
    assert shared == _numbers(TINY, [small.parameters[name].numel() for name in TINY.generates(small)])


def _numbers(hypernet: Hypernetwork, made: list[int]) -> int:
    return hypernet.hidden * (hypernet.embedding + 1) + sum(made) * (hypernet.hidden + 1)


def test_constants_are_those_of_the_paper() -> None:
    method = HyperFLLPM()
    given = (method.lr, method.head_lr, method.batch_size, method.epochs, method.momentum, method.weight_decay)
    assert given == (0.01, 0.1, 16, 5, 0.5, 5e-4)


def naive(run: Federation, method: HyperFLLPM, done: Round, start: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a client has after its round from `start`, by the dense hypernetwork."""
    constants = Settings(method.lr, method.head_lr, method.momentum, method.weight_decay, 50.0)
    model = copy.deepcopy(run.client.base.model).train(method.train_mode)
    return hyperfl_round(model, start, _batches(done, 0), _batches(done, 1), constants)


@CASES
def test_a_round_equals_the_naive_one(name: str, train_mode: bool) -> None:
    method = replace(METHOD, train_mode=train_mode)
    run = federation(name, method)
    shared, private = run.download(1).shared, run.clients[1].private
    done = run.train(1)
    expected = naive(run, method, done, {**shared, **private})
    assert_near({**done.result.trained(shared), **done.state.private}, expected, 1e-10)


@BOTH
def test_the_server_takes_the_mean_by_numbers_of_images(name: str) -> None:
    run = federation(name, METHOD)
    server = {n: dense(v) for n, v in run.server.shared.items()}
    own = [{n: dense(v) for n, v in state.private.items()} for state in run.clients]
    for _ in range(2):
        ends = [naive(run, METHOD, d, {**server, **o}) for d, o in zip(run.run_round(), own, strict=True)]
        server = {n: sum(k * end[n] for k, end in zip((3, 4, 5), ends, strict=True)) / 12 for n in server}
        own = [{n: end[n] for n in state.private} for state, end in zip(run.clients, ends, strict=True)]
        assert_near(run.server.shared, server, 1e-10)
        for state, expected in zip(run.clients, own, strict=True):
            assert_near(state.private, expected, 1e-10)


def _batches(done: Round, phase: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    trace = done.trace
    return [(trace.inputs[index], trace.labels[index]) for (index,) in trace.order[phase]]


@BOTH
def test_the_backbone_is_known_and_never_travels(name: str) -> None:
    run = federation(name, METHOD)
    before = {n: p.clone() for n, p in frozen(run.client.base.model).items()}
    run.run_round()
    assert before
    assert_same(frozen(run.client.task.model), before)
    view, truth = run.observe(0)
    assert all(n.startswith("hypernet.") for n in view.update)
    assert set(view.private) == {"embedding", "head.weight", "head.bias"}
    assert all("adapter" in n for n in truth.extractor)
    assert_same(frozen(view.task.model), before)
    hidden = [p for n, p in view.task.model.named_parameters() if n not in before]
    assert hidden
    assert not any(bool(p.any()) for p in hidden)


@CASES
def test_predictions_are_training(name: str, train_mode: bool) -> None:
    run = federation(name, replace(METHOD, train_mode=train_mode))
    run.run_round()
    view, truth = run.observe(1)
    right, client = truth.candidate(), view.client
    assert_same(predict(view, right), view.update)

    def one(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        found = predict(view, replace(right, inputs=inputs), derivative=func_derivative, client=client)
        return {n: dense(v) for n, v in found.items()}

    stacked = vmap(one)(torch.stack([1 - right.inputs, right.inputs]))
    assert_near({n: v[1] for n, v in stacked.items()}, view.update, 1e-12)


def test_statistics_of_adapters_stay_with_the_client() -> None:
    run = federation("resnet18-adapter", replace(METHOD, train_mode=True))
    done = run.run_round()[0]
    mine = {n for n in run.clients[0].buffers if n.rpartition(".")[2] in STATISTICS}
    assert len(mine) == 2 * 2 * 3
    assert not mine & (done.upload.buffers.keys() | run.download(0).buffers.keys())
    moved = "body.adapter1.before.running_mean"
    assert not torch.equal(run.clients[0].buffers[moved], run.clients[1].buffers[moved])
    still = federation("resnet18-adapter", METHOD)
    rounds = still.run_round()
    assert not any(bool(change.any()) for done in rounds for change in done.upload.buffers.values())


@CASES
def test_factors_give_the_round_of_the_loop(name: str, train_mode: bool) -> None:
    method = replace(METHOD, train_mode=train_mode, epochs=5)
    loop, factored = (federation(name, method, engine=engine) for engine in ("loop", "factored"))
    assert isinstance(factored._engine, Factored)
    for one, other in zip(*(run.run_round() for run in (loop, factored)), strict=True):
        assert len(one.trace.order[1]) >= TINY.hidden  # more factors than there are hidden units
        assert_near(other.upload.update, one.upload.update, 1e-12)
    assert_near(factored.server.shared, loop.server.shared, 1e-12)
    for mine, theirs in zip(factored.clients, loop.clients, strict=True):
        assert_near(mine.private, theirs.private, 1e-12)
        assert_near(mine.buffers, theirs.buffers, 1e-12)


@pytest.mark.parametrize(
    ("train", "parts"),
    [("head", ("head.",)), ("fixed-adapters", ("head.",)), ("adapters", ("head.", "body.adapter"))],
)
def test_baselines_train_what_the_network_says(train: str, parts: tuple[str, ...]) -> None:
    given = task("resnet18-adapter", train=train)
    client = Client(given, FedAvg(lr=0.1, batch_size=2, train_mode=False))
    run = Federation(client, [ClientData(worlds.images(4, "train"), worlds.images(4, "test"))])
    (done,) = run.run_round()
    assert set(done.upload.update) == {n for n, _ in given.model.named_parameters() if n.startswith(parts)}
    assert all(bool(dense(v).any()) for v in done.upload.update.values())


def test_a_start_at_the_network_lets_adapters_pass_features_on() -> None:
    """Normalization starts at one plus what the hidden layer adds, where random heads start it near zero."""
    here = task("resnet18-adapter")

    def scales(init: Any) -> torch.Tensor:
        start = Hypernetwork(init=init)
        made = start.generate(start.initial_parameters(here, stream(0, "start")), here)
        weights = [made[name] for name in sorted(made) if name.endswith("weight") and made[name].ndim == 1]
        return torch.cat(weights)

    assert (scales("network") - 1).abs().max() < 0.2
    assert scales("scaled").abs().max() < 0.2


def test_a_start_at_the_network_needs_biases() -> None:
    with pytest.raises(ValueError, match="set bias=True"):
        Hypernetwork(init="network", bias=False)
