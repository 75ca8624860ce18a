"""FedBN and FedProx by themselves: who holds what, and a round by plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from torch import nn

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.fedbn import FedBN
from fl.methods.fedprox import FedProx
from fl.types import Scope

TASK = worlds.task(batch_norm=True)


def federation(method: FedAvg) -> Federation:
    data = [ClientData(worlds.images(4, "train", n), worlds.images(4, "test", n)) for n in range(2)]
    return Federation(Client(TASK, method), data)


def test_batch_norm_and_its_statistics_stay_with_the_client() -> None:
    method = FedBN(lr=0.1)
    names = {*TASK.parameters, *TASK.buffers}
    private = {name for name in names if method.scope(name, TASK) is Scope.PRIVATE}
    numbers = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert private == {f"body.norm1.{key}" for key in numbers}
    run = federation(method)
    rounds = run.run_round()
    for client, done in enumerate(rounds):
        assert not any("norm1" in name for name in (*done.upload.update, *done.upload.buffers))
        assert_same(run.clients[client].private, done.result.private)
    means = [run.clients[n].buffers["body.norm1.running_mean"] for n in (0, 1)]
    assert not torch.equal(*means)
    moved = run.clients[0].private["body.norm1.weight"]
    assert not torch.equal(moved, run.private_init["body.norm1.weight"])  # type: ignore[arg-type]


def test_without_batch_norm_fedbn_is_fedavg() -> None:
    same = {"lr": 0.1, "epochs": 2, "batch_size": 2}
    first, second = (worlds.federation(kind(**same)).server.shared for kind in (FedBN, FedAvg))  # type: ignore[arg-type]
    assert_same(first, second)


@pytest.mark.parametrize(("mu", "momentum"), [(0.7, 0.0), (0.7, 0.5), (0.0, 0.5)])
def test_fedprox_trains_the_loss_with_its_proximal_term(mu: float, momentum: float) -> None:
    method = FedProx(mu=mu, lr=0.1, momentum=momentum, weight_decay=1e-2, epochs=2, batch_size=2)
    task = worlds.task()
    run = worlds.federation(method, task_=task, rounds=0)
    done = run.train(0)
    model = worlds.task().model
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum, weight_decay=1e-2)
    for (index,) in done.trace.order[0]:
        loss = nn.functional.cross_entropy(model(done.trace.inputs[index]), done.trace.labels[index])
        for p, before in zip(model.parameters(), start, strict=True):
            loss = loss + mu / 2 * (p - before).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert_near(done.result.trained(run.server.shared), expected, 1e-12)
    plain = FedAvg(lr=0.1, momentum=momentum, weight_decay=1e-2, epochs=2, batch_size=2)
    same = worlds.federation(plain, task_=task, rounds=0).train(0).upload.update
    if mu == 0:
        assert_near(done.upload.update, same, 1e-12)
    else:
        assert float((done.upload.update["head.weight"] - same["head.weight"]).norm()) > 1e-4


def test_the_weight_of_the_term_is_checked() -> None:
    with pytest.raises(ValueError, match="mu: expected a number >= 0, got -1"):
        replace(FedProx(), mu=-1.0)
