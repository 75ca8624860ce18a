"""FedJETs by itself: who gets which experts, rounds by plain loops, and which expert answers."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from support import unequal, worlds
from support.compare import assert_near, assert_same
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fl.client import Client
from fl.method import ServerState
from fl.methods.fedavg import FedAvg
from fl.methods.fedjets import FedJETs
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.simulation.client_round import Round
from fl.tensors import dense
from fl.types import Task

SIZES = (3, 4, 5, 6)
federation = partial(unequal.federation, sizes=SIZES, test=9)


def expert(server: ServerState, k: int, task: Task) -> nn.Module:
    model = copy.deepcopy(task.model).train()
    model.load_state_dict({name: dense(value) for name, value in server.own[f"expert.{k}"].items()})
    return model


def gate(server: ServerState) -> nn.Linear:
    weight, bias = (dense(server.own["gate"][f"gate.{key}"]) for key in ("weight", "bias"))
    layer = nn.Linear(16, len(bias), dtype=torch.float64)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def features(task: Task, x: Tensor) -> Tensor:
    """What the common expert makes of images."""
    with torch.no_grad():
        made: Tensor = copy.deepcopy(task.model.get_submodule("body")).eval()(x)
    return made


class Trained:
    """One client's round with modules and torch.optim."""

    def __init__(self, method: FedJETs, server: ServerState, ids: list[int], done: Round, task: Task) -> None:
        self.gate, self.experts = gate(server), nn.ModuleList([expert(server, k, task) for k in ids])
        parameters = [*self.gate.parameters(), *self.experts.parameters()]
        optimizer = torch.optim.SGD(parameters, method.lr, method.momentum, weight_decay=method.weight_decay)
        for (index,) in done.trace.order[0]:
            x, y = done.trace.inputs[index], done.trace.labels[index]
            scores = self.gate(features(task, x))
            shares = torch.softmax(torch.stack([scores[:, k] for k in ids], 1), 1)
            logits = sum(shares[:, i, None] * one(x) for i, one in enumerate(self.experts))
            assert isinstance(logits, Tensor)
            loss = nn.functional.cross_entropy(logits, y)
            if done.upload.client < method.experts:
                own = torch.full_like(y, done.upload.client)
                loss = loss + method.anchor * nn.functional.cross_entropy(scores, own)
            optimizer.zero_grad()
            loss.backward()
            assert method.max_norm is not None
            clip_grad_norm_(parameters, method.max_norm)
            optimizer.step()


@pytest.mark.parametrize(("rate", "batch_norm"), [(1.0, False), (0.5, False), (1.0, True)])
def test_rounds_equal_plain_loops(rate: float, batch_norm: bool) -> None:
    method, task = FedJETs.example(), worlds.task(batch_norm=batch_norm)
    run = federation(method, client_fraction=rate, task=task)
    for _ in range(3):
        before = run.server
        chosen = [method.experts_of(before, number) for number in range(len(SIZES))]
        rounds = run.run_round()
        ends = {done.upload.client: Trained(method, before, chosen[done.upload.client], done, task) for done in rounds}
        whole = sum(SIZES[i] for i in ends)
        for key, value in dict(gate(run.server).named_parameters()).items():
            mean = sum(SIZES[i] / whole * end.gate.get_parameter(key) for i, end in ends.items())
            assert isinstance(mean, Tensor)
            assert_near({key: value}, {key: mean}, 1e-10)
        for k in range(method.experts):
            mine = {i: end.experts[chosen[i].index(k)].state_dict() for i, end in ends.items() if k in chosen[i]}
            whole = sum(SIZES[i] for i in mine)
            for key, value in expert(before, k, task).state_dict().items():
                moved = bool(mine) and value.is_floating_point()
                mean = sum(SIZES[i] / whole * end[key] for i, end in mine.items()) if moved else value
                assert isinstance(mean, Tensor)
                assert_near({key: run.server.own[f"expert.{k}"][key]}, {key: mean}, 1e-10)
        for i, end in ends.items():
            scores = end.gate(features(task, run.data[i].train.inputs)).softmax(1).mean(0)
            torch.testing.assert_close(dense(run.server.own["scores"]["scores"])[i], scores.detach())


def test_who_gets_which_experts() -> None:
    method = FedJETs(experts=4, chosen=2)
    run = federation(method)
    assert [method.experts_of(run.server, i) for i in range(6)] == [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1], [1, 2]]
    scores = torch.tensor([[0.0, 0.1, 0.7, 0.2], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.0] * 4])
    server = replace(run.server, own={**run.server.own, "scores": {"scores": scores}})
    assert [method.experts_of(server, i) for i in range(4)] == [[0, 2], [1, 0], [2, 3], [3, 0]]
    free = replace(method, anchor=0.0)
    assert [free.experts_of(server, i) for i in range(4)] == [[2, 3], [0, 1], [3, 2], [3, 0]]


def test_what_travels_and_what_the_server_sees() -> None:
    run = worlds.federation(FedJETs.example())
    one = sum(value.numel() for value in worlds.task().parameters.values())
    door = 16 * 3 + 3
    view, _ = run.observe(1)
    assert run.download(1).numbers() == 2 * one + door + 3  # which experts they are, and whether it is an anchor
    assert sum(value.numel() for value in run.train(1).upload.update.values()) == 2 * one + door
    assert dense(view.update["scores/mean"]).sum() == pytest.approx(1.0)
    assert not any(name.startswith("common.") for name in view.update)
    assert not view.private
    assert view.buffers["ids"].tolist() == run.client.method.experts_of(run.server, 1)  # type: ignore[attr-defined]


def test_the_common_expert_rests() -> None:
    task = worlds.task(batch_norm=True)
    run = federation(FedJETs.example(), task=task)
    common = run.client.task.model.get_submodule("common")
    before = {name: value.clone() for name, value in common.state_dict(keep_vars=True).items()}
    run.run_round()
    assert_same(before, common.state_dict(keep_vars=True))
    assert not any(name.startswith("common.") for name in (*run.client.task.parameters, *run.client.task.buffers))
    assert not any(module.training for module in common.modules())


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_best_expert_answers(batch_norm: bool) -> None:
    task = worlds.task(batch_norm=batch_norm)
    run = federation(FedJETs(experts=3, lr=0.1), task=task)
    run.run_round()
    far = torch.Generator().manual_seed(0)
    door = {name: 5 * torch.randn(dense(v).shape, generator=far).double() for name, v in run.server.own["gate"].items()}
    run.server = replace(run.server, own={**run.server.own, "gate": door})
    x, experts = worlds.images(20, "x").inputs, [expert(run.server, k, task).eval() for k in range(3)]
    best = gate(run.server)(features(task, x)).argmax(1)
    assert len(set(best.tolist())) > 1
    expected = torch.stack([experts[k](image[None])[0] for k, image in zip(best.tolist(), x, strict=True)])
    torch.testing.assert_close(torch.cat(list(run.model(0).logits(x))), expected.detach())
    down = run.download(2)  # a client's own experts alone
    ids = run.client.method.experts_of(run.server, 2)  # type: ignore[attr-defined]
    mine = gate(run.server)(features(task, x))[:, ids].argmax(1)
    own = torch.stack([experts[ids[k]](image[None])[0] for k, image in zip(mine.tolist(), x, strict=True)])
    rule = replace(run.client.method, train_mode=False)
    network = Client(run.client.base, rule).network(down.shared, {**run.client.task.buffers, **down.buffers})
    torch.testing.assert_close(rule.logits(network, x), own)


def test_one_expert_without_anchors_is_fedavg_from_fresh_weights() -> None:
    settings = {"lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "epochs": 2, "batch_size": 2}
    run = federation(FedJETs(experts=1, chosen=1, anchor=0.0, **settings))  # type: ignore[arg-type]
    task = worlds.task()
    task.model.load_state_dict({name: dense(value) for name, value in run.server.own["expert.0"].items()})
    theirs = federation(FedAvg(**settings), task=task)  # type: ignore[arg-type]
    for _ in range(2):
        run.run_round()
        theirs.run_round()
    assert_near(run.server.own["expert.0"], theirs.server.shared, 1e-12)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="expected chosen from 1 to 5 experts, got 6"):
        FedJETs(chosen=6)
    with pytest.raises(ValueError, match="anchor: expected a number >= 0, got -1"):
        FedJETs(anchor=-1)
    with pytest.raises(ValueError, match="expected parametrization 'direct'"):
        FedJETs(parametrization=Hypernetwork.example())
    with pytest.raises(ValueError, match="expected a linear layer called 'body' as classifier, got none"):
        Client(replace(worlds.task(), head="body."), FedJETs())
    (phase,) = FedJETs().fine_tuning_phases(worlds.task(), 2)
    assert (phase.epochs, phase.records_direction_as) == (2, None)
