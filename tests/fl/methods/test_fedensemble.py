"""Fed-ensemble by itself: whose turn it is, rounds by plain loops, and what answers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.fedensemble import FedEnsemble
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.simulation.client_round import Round
from fl.simulation.protocol import Protocol
from fl.simulation.scores import scores
from fl.tensors import dense
from fl.types import Task

SIZES = (3, 4, 5, 6)


def federation(method: FedAvg, rate: float = 1.0, task: Task | None = None, held_out_clients: int = 0) -> Federation:
    """Clients of unequal numbers of images."""
    data = [ClientData(worlds.images(n, "train"), worlds.images(9, "test", n)) for n in SIZES]
    protocol = Protocol(held_out_clients=held_out_clients, global_test=worlds.images(20, "whole"))
    return Federation(Client(task or worlds.task(), method), data, client_fraction=rate, protocol=protocol)


def member(run: Federation, k: int) -> nn.Module:
    """Network number `k` as a module."""
    model = copy.deepcopy(run.client.task.model)
    model.load_state_dict({name: dense(value) for name, value in run.server.own[f"member.{k}"].items()})
    return model


def trained(method: FedEnsemble, model: nn.Module, done: Round) -> nn.Module:
    """The network after the batches of a client's round."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), method.lr, method.momentum, weight_decay=method.weight_decay)
    for (index,) in done.trace.order[0]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(done.trace.inputs[index]), done.trace.labels[index]).backward()
        assert method.max_norm is not None
        clip_grad_norm_(model.parameters(), method.max_norm)
        optimizer.step()
    return model


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_rounds_equal_plain_loops(rate: float, batch_norm: bool) -> None:
    method = replace(FedEnsemble.example(), members=3)
    run = federation(method, rate, worlds.task(batch_norm=batch_norm))
    for _ in range(3):
        before = [member(run, k) for k in range(3)]
        turns = [method.member(run.server, number) for number in range(len(SIZES))]
        rounds = run.run_round()
        for k in range(3):
            ends = [
                (SIZES[done.upload.client], trained(method, before[k], done).state_dict())
                for done in rounds
                if turns[done.upload.client] == k
            ]
            whole = sum(n for n, _ in ends)
            expected = {
                name: sum(n / whole * end[name] for n, end in ends) if ends and value.is_floating_point() else value
                for name, value in before[k].state_dict().items()
            }
            assert_near(run.server.own[f"member.{k}"], expected, 1e-10)  # type: ignore[arg-type]


def test_every_client_trains_each_network_once_in_an_age() -> None:
    run = worlds.federation(replace(FedEnsemble.example(), members=4), rounds=0)
    method, turns = run.client.method, []
    assert isinstance(method, FedEnsemble)
    for number in range(20):
        servers = [replace(run.server, round=i) for i in range(12)]
        turns.append([method.member(server, number) for server in servers])
        assert all(sorted(turns[-1][age : age + 4]) == [0, 1, 2, 3] for age in (0, 4, 8))
    assert len({tuple(row[:4]) for row in turns}) > 5
    assert any(row[:4] != row[4:8] for row in turns)
    other = worlds.federation(replace(FedEnsemble.example(), members=4), rounds=0, seed=1).server
    assert [method.member(other, number) for number in range(20)] != [row[0] for row in turns]


def test_networks_start_apart_and_the_first_as_the_task_does() -> None:
    run = worlds.federation(replace(FedEnsemble.example(), members=3), rounds=0)
    first, second, third = (run.server.own[f"member.{k}"] for k in range(3))
    assert_same(first, worlds.task().parameters)
    for name in first:
        assert not torch.equal(dense(second[name]), dense(third[name]))
        assert not torch.equal(dense(first[name]), dense(second[name]))


def test_one_network_is_fedavg() -> None:
    settings = {"lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
    ours, theirs = federation(FedEnsemble(members=1, **settings)), federation(FedAvg(**settings))  # type: ignore[arg-type]
    for _ in range(2):
        ours.run_round()
        theirs.run_round()
    assert_near(ours.server.own["member.0"], theirs.server.shared, 1e-12)
    assert ours.accuracy() == theirs.accuracy()


def test_what_travels_is_one_network() -> None:
    run = worlds.federation(FedEnsemble.example())
    size = sum(value.numel() for value in worlds.task().parameters.values())
    view, _ = run.observe(1)
    assert run.download(1).numbers() == run.train(1).upload.numbers() == size
    assert run.prediction_download(1).numbers() == 2 * size
    assert_same(view.shared, run.server.own[f"member.{run.client.method.member(run.server, 1)}"])  # type: ignore[attr-defined]
    assert not view.private


@pytest.mark.parametrize("batch_norm", [False, True])
def test_all_networks_answer(batch_norm: bool) -> None:
    run = federation(FedEnsemble.example(), 1.0, worlds.task(batch_norm=batch_norm), 1)
    run.run_round()
    far = torch.Generator().manual_seed(0)
    own = {**run.server.own}
    for k in range(2):  # networks that disagree
        own[f"member.{k}"] = {
            name: dense(v) + 3 * torch.randn(v.shape, generator=far) if name in run.client.task.parameters else v
            for name, v in own[f"member.{k}"].items()
        }
    run.server = replace(run.server, own=own)
    models = [member(run, k).eval() for k in range(2)]
    whole = run.protocol.global_test
    assert whole is not None
    with torch.no_grad():
        answer = sum(model(whole.inputs).softmax(-1) for model in models)
    assert isinstance(answer, torch.Tensor)
    together = torch.cat([logits.exp() for logits in run.model(0).logits(whole.inputs)])
    torch.testing.assert_close(together, answer / 2)
    right = float((answer.argmax(-1) == whole.labels).double().mean())
    assert scores(run)["global"] == (right,) * 3
    seen, test = run.data[3].train, run.data[3].test
    with torch.no_grad():
        outside = sum(model(torch.cat([seen.inputs, test.inputs])).softmax(-1) for model in models)
    assert isinstance(outside, torch.Tensor)
    hits = outside.argmax(-1) == torch.cat([seen.labels, test.labels])
    assert scores(run)["unseen"] == (pytest.approx(float(hits.double().mean())),)


def test_right_after_training_a_client_has_one_network() -> None:
    run = federation(FedEnsemble.example())
    for done in run.run_round(evaluate=True):
        assert done.accuracy is not None
        assert 0 <= done.accuracy <= 1


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="members: expected a whole number >= 1, got 0"):
        FedEnsemble(members=0)
    with pytest.raises(ValueError, match="expected parametrization 'direct'"):
        FedEnsemble(parametrization=Hypernetwork.example())
