"""pFedLA by itself: rounds with modules, autograd and torch.optim, where the shares go, and what travels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import personal_rounds as plain
from support import unequal, worlds
from support.compare import assert_near, assert_same
from support.unequal import read_back
from torch import Tensor, nn

from fl.federation import Federation
from fl.methods.bases.personal_models import last_model
from fl.methods.fedavg import FedAvg
from fl.methods.pfedla import PFedLA
from fl.models.hypernetworks.filter_hypernetwork import Filters
from fl.simulation.protocol import Protocol
from fl.tensors import dense

SIZES = (3, 4, 5)
METHOD = replace(PFedLA.example(), max_norm=None, server_lr=0.5)
federation = partial(unequal.federation, test=20)
LAYERS = {"body.conv1": ("body.conv1.weight", "body.conv1.bias"), "body.fc1": ("body.fc1.weight", "body.fc1.bias")}
LAYERS |= {"head": ("head.weight", "head.bias")}


class Shares(nn.Module):
    """One client's hypernetwork: embedding, perceptron, a linear layer for each layer of the network, ReLU."""

    def __init__(self, own: dict[str, Tensor], embedding: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding.clone())
        self.mlp = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 5)])
        self.fc = nn.ModuleList([nn.Linear(5, 3) for _ in LAYERS])
        self.double()
        names = [f"mlp.{i}" for i in range(2)] + [f"heads.{name}" for name in LAYERS]
        with torch.no_grad():
            for name, module in zip(names, [*self.mlp, *self.fc], strict=True):
                module.weight.copy_(own[f"{name}.weight"])
                module.bias.copy_(own[f"{name}.bias"])

    def forward(self) -> dict[str, Tensor]:
        x = self.embedding
        for module in self.mlp:
            x = torch.relu(module(x))
        found = {name: torch.relu(module(x)) for name, module in zip(LAYERS, self.fc, strict=True)}
        return {name: value / value.sum() for name, value in found.items()}


def started(run: Federation, i: int) -> Shares:
    own = run.server.own
    network = {n: dense(v) for n, v in own["hypernetwork"].items()}
    return Shares(network, dense(own["embeddings"][str(i)]))


def mean(shares: dict[str, Tensor], models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    found = {}
    for name, members in LAYERS.items():
        for n in members:
            found[n] = sum(s * model[n] for s, model in zip(shares[name], models, strict=True))
    return found  # type: ignore[return-value]


def test_rounds_equal_autograd_and_torch_optim() -> None:
    run, net = federation(METHOD), worlds.task().model
    hyper = [started(run, i) for i in range(3)]
    first = [{n: v.detach() for n, v in h().items()} for h in hyper]
    models = [plain.weights_of(net) for _ in SIZES]
    for drawn in ([0, 1, 2], [0, 2], [1, 2], [0, 1, 2]):
        sent = [mean(h(), models) for h in hyper]
        trained = list(models)
        for i, done in zip(drawn, run.run_round(drawn), strict=True):
            local = plain.loaded(net, {n: v.detach() for n, v in sent[i].items()})
            plain.sgd(local, lambda name: True, plain.fed(done.trace, 0), lr=0.1, momentum=0.5, weight_decay=5e-4)
            trained[i] = plain.weights_of(local)
            solver = torch.optim.SGD(hyper[i].parameters(), METHOD.server_lr)
            solver.zero_grad()
            sum(((sent[i][n].detach() - trained[i][n]) * sent[i][n]).sum() for n in trained[i]).backward()  # type: ignore[union-attr]
            solver.step()
        models = trained
        for i in range(3):
            assert_near(last_model(run.server, i), models[i], 1e-10)
            assert_near(METHOD.shares(run.server, i), {n: v.detach() for n, v in hyper[i]().items()}, 1e-10)
    moved = METHOD.shares(run.server, 0)
    assert all(float((moved[name] - first[0][name]).abs().max()) > 1e-4 for name in LAYERS)


def test_a_step_moves_the_mean_towards_what_the_client_learned() -> None:
    method = replace(METHOD, server_lr=1e-3)
    run = federation(method)
    run.run_round()
    before, sent = run.server, run.download(1).shared
    done = run.train(1)
    after = method.aggregate(before, [done.upload], run.client.task)
    models = [last_model(before, i) for i in range(3)]
    old, new = (mean(method.shares(state, 1), models) for state in (before, after))  # type: ignore[arg-type]
    assert_near(old, sent, 1e-12)
    gained = sum(((new[n] - old[n]) * -dense(done.upload.update[n])).sum() for n in new)
    assert float(gained) > 0


def test_equal_shares_of_equal_clients_are_fedavg() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "epochs": 2, "batch_size": 2}
    task = worlds.task(batch_norm=True)
    runs = [worlds.federation(kind, task_=task, rounds=0) for kind in (PFedLA(**settings), FedAvg(**settings))]
    own = runs[0].server.own
    for name in own["hypernetwork"]:
        if name.startswith("heads."):
            own["hypernetwork"][name] = torch.ones_like(dense(own["hypernetwork"][name]))
    for run in runs:
        run.run_round()
    ours, theirs = (run.download(0) for run in runs)
    assert_near(ours.shared, theirs.shared, 1e-10)
    floating = [n for n, v in theirs.buffers.items() if v.is_floating_point()]
    assert_near({n: ours.buffers[n] for n in floating}, {n: theirs.buffers[n] for n in floating}, 1e-10)


def test_where_relu_leaves_nothing_a_client_gets_its_own_layer() -> None:
    run = federation(METHOD)
    network = run.server.own["hypernetwork"]
    network["heads.head.weight"] = -dense(network["heads.head.weight"])
    for _ in range(2):
        run.run_round()
    assert METHOD.shares(run.server, 1)["head"].tolist() == [0, 1, 0]
    assert_same({"w": run.download(1).shared["head.weight"]}, {"w": last_model(run.server, 1)["head.weight"]})
    assert not torch.equal(
        dense(run.download(1).shared["body.fc1.bias"]), dense(last_model(run.server, 1)["body.fc1.bias"])
    )
    assert all(dense(v).isfinite().all() for part in run.server.own.values() for v in part.values())


def test_what_travels_is_as_much_as_with_fedavg_and_hypernetworks_stay() -> None:
    ours, theirs = (federation(kind) for kind in (METHOD, FedAvg(lr=0.1, epochs=2, batch_size=2)))
    records = [run.step(evaluate=False) for run in (ours, theirs)]
    assert records[0].numbers_down == records[1].numbers_down
    assert records[0].numbers_up == records[1].numbers_up
    view, truth = ours.observe(1)
    assert view.private == truth.private == view.received == {}
    assert set(view.update) == set(view.shared) == set(worlds.task().parameters)


def test_a_client_that_never_takes_part_gets_the_mean() -> None:
    run = federation(METHOD, protocol=Protocol(held_out_clients=1))
    run.run_round()
    every = [last_model(run.server, i) for i in (0, 1)]
    assert_near(run.download(2).shared, {n: (dense(every[0][n]) + dense(every[1][n])) / 2 for n in every[0]}, 1e-12)


def test_it_goes_with_a_generator() -> None:
    method = replace(METHOD, parametrization=Filters(embedding=3, block=(2, 2)))
    run = worlds.federation(method, task_=worlds.deeper(), rounds=2)
    assert run.private_init
    assert set(last_model(run.server, 0)) == set(run.server.shared)
    assert all(dense(value).isfinite().all() for value in run.download(0).shared.values())


def test_a_run_read_back_goes_on_as_it_would_have(tmp_path: Path) -> None:
    run, again = read_back(lambda: federation(METHOD), tmp_path)
    for i in range(3):
        assert_same(run.download(i).shared, again.download(i).shared)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="server_lr: expected a number >= 0, got -1"):
        PFedLA(server_lr=-1.0)
    with pytest.raises(ValueError, match="embedding: expected a whole number >= 1, got 0"):
        federation(PFedLA(embedding=0))
