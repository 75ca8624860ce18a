"""FedDyn and FedSAM by themselves: rounds by plain loops, and where they are other methods."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import unequal, worlds
from support.compare import assert_near, assert_same
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fl.methods.fedavg import FedAvg
from fl.methods.feddyn import FedDyn
from fl.methods.fedprox import FedProx
from fl.methods.fedsam import FedSAM
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.simulation.client_round import Round
from fl.tensors import dense

SIZES = (3, 4, 5)
BARE: dict[str, Any] = {"momentum": 0.0, "max_norm": None, "weight_decay": 0.0}
SETTINGS = pytest.mark.parametrize("settings", [BARE, {}], ids=["bare", "momentum, decay, clipping"])
federation = partial(unequal.federation, sizes=SIZES)


def step(method: FedAvg, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip what `.grad` holds, and move."""
    if method.max_norm is not None:
        clip_grad_norm_(model.parameters(), method.max_norm)
    optimizer.step()


def dynamic(method: FedDyn, sent: nn.Module, slope: list[Tensor], done: Round) -> list[Tensor]:
    """A client's parameters after its round: SGD on the loss of FedDyn's Eq. 1 as it is written."""
    model = copy.deepcopy(sent)
    start = [p.detach().clone() for p in sent.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), method.lr, method.momentum, weight_decay=method.weight_decay)
    for (index,) in done.trace.order[0]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(done.trace.inputs[index]), done.trace.labels[index])
        for p, w, g in zip(model.parameters(), start, slope, strict=True):
            loss = loss - (g * p).sum() + method.alpha / 2 * (p - w).square().sum()
        loss.backward()
        step(method, model, optimizer)
    return [p.detach() for p in model.parameters()]


@SETTINGS
@pytest.mark.parametrize("rate", [1.0, 0.67])
def test_rounds_of_feddyn_equal_plain_loops(settings: dict[str, Any], rate: float) -> None:
    method = replace(FedDyn.example(), **settings)
    run, server = federation(method, client_fraction=rate), copy.deepcopy(worlds.task().model)
    h = [torch.zeros_like(p) for p in server.parameters()]
    slopes = [[torch.zeros_like(p) for p in server.parameters()] for _ in SIZES]
    for _ in range(3):
        rounds = run.run_round()
        assert len(rounds) == round(rate * 3)
        start = [p.detach().clone() for p in server.parameters()]
        ends = {done.upload.client: dynamic(method, server, slopes[done.upload.client], done) for done in rounds}
        for k, end in ends.items():
            slopes[k] = [g - method.alpha * (w - s) for g, w, s in zip(slopes[k], end, start, strict=True)]
        with torch.no_grad():
            for i, p in enumerate(server.parameters()):
                h[i] = h[i] - method.alpha / len(SIZES) * sum(end[i] - start[i] for end in ends.values())
                p.copy_(sum(end[i] for end in ends.values()) / len(ends) - h[i] / method.alpha)
        assert_near(run.server.shared, dict(server.named_parameters()), 1e-10)
    names = list(run.server.shared)
    assert_near(run.server.own["slope"], dict(zip(names, h, strict=True)), 1e-10)
    for state, slope in zip(run.clients, slopes, strict=True):
        assert_near(state.memory["slope"], dict(zip(names, slope, strict=True)), 1e-10)


def test_the_servers_slope_is_the_mean_of_the_clients() -> None:
    run = federation(FedDyn.example(), client_fraction=0.67)
    for _ in range(3):
        run.run_round()
    for name, value in run.server.own["slope"].items():
        whole = torch.stack([dense(state.memory["slope"][name]) for state in run.clients])
        torch.testing.assert_close(dense(value), whole.mean(0), rtol=1e-10, atol=1e-14)


def test_in_the_first_round_a_client_of_feddyn_is_one_of_fedprox() -> None:
    same = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
    ours, theirs = federation(FedDyn(alpha=0.3, **same)), federation(FedProx(mu=0.3, **same))  # type: ignore[arg-type]
    assert_near(ours.train(1).upload.update, theirs.train(1).upload.update, 1e-12)
    ours.run_round()
    theirs.run_round()
    assert float((dense(ours.server.shared["head.weight"]) - dense(theirs.server.shared["head.weight"])).norm()) > 1e-4


def test_feddyn_sends_what_fedavg_sends() -> None:
    run, plain = worlds.federation(FedDyn.example()), worlds.federation(FedAvg.example())
    assert run.download(1).numbers() == plain.download(1).numbers()
    assert run.train(1).upload.numbers() == plain.train(1).upload.numbers()
    view = run.observe(1)[0]
    assert not view.received
    assert set(view.private) == {f"memory/slope/{name}" for name in run.server.shared}


def test_feddyn_over_generated_and_private_parameters() -> None:
    run = worlds.federation(replace(FedDyn.example(), parametrization=Hypernetwork.example()), rounds=2)
    assert set(run.clients[0].memory["slope"]) == set(run.server.shared)
    assert all(dense(value).isfinite().all() for value in run.server.shared.values())


@SETTINGS
def test_a_round_of_fedsam_equals_a_plain_loop(settings: dict[str, Any]) -> None:
    method = replace(FedSAM.example(), rho=0.3, **settings)
    run, server = federation(method), copy.deepcopy(worlds.task().model)
    for _ in range(2):
        rounds, ends = run.run_round(), []
        for done in rounds:
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(
                model.parameters(), method.lr, method.momentum, weight_decay=method.weight_decay
            )
            for (index,) in done.trace.order[0]:
                inputs, labels = done.trace.inputs[index], done.trace.labels[index]
                here = [p.detach().clone() for p in model.parameters()]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                g = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                with torch.no_grad():
                    for p in model.parameters():
                        p += method.rho * p.grad / g.norm()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                with torch.no_grad():
                    for p, w in zip(model.parameters(), here, strict=True):
                        p.copy_(w)
                step(method, model, optimizer)
            ends.append([p.detach() for p in model.parameters()])
        with torch.no_grad():
            for i, p in enumerate(server.parameters()):
                p.copy_(sum(n * end[i] for n, end in zip(SIZES, ends, strict=True)) / sum(SIZES))
        assert_near(run.server.shared, dict(server.named_parameters()), 1e-10)


def test_fedsam_that_looks_nowhere_else_is_fedavg() -> None:
    ours = worlds.federation(replace(FedSAM.example(), rho=0.0))
    assert_same(ours.server.shared, worlds.federation(FedAvg.example()).server.shared)
    assert FedSAM(rho=0.0).follows_loss_gradient(None)
    assert not FedSAM().follows_loss_gradient(1)
    assert not FedDyn().follows_loss_gradient(1)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="alpha: expected a number > 0, got 0"):
        FedDyn(alpha=0.0)
    with pytest.raises(ValueError, match="rho: expected a number >= 0, got -1"):
        FedSAM(rho=-1.0)
