"""MOON by itself: rounds by a plain loop, and where it is FedAvg."""

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

from fl.client import Client
from fl.methods.fedavg import FedAvg
from fl.methods.moon import Moon
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.simulation.client_round import Round
from fl.tensors import dense

SIZES = (3, 4, 5)
BARE: dict[str, Any] = {"momentum": 0.0, "max_norm": None, "weight_decay": 0.0}
federation = partial(unequal.federation, sizes=SIZES)


def contrast(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """Eq. 3 as it is written, image by image."""
    losses = []
    for i in range(len(z)):
        s, t = (z[i] @ other[i] / (z[i].norm() * other[i].norm()) / temperature for other in (near, far))
        losses.append(-torch.log(s.exp() / (s.exp() + t.exp())))
    return torch.stack(losses).mean()


def trained(method: Moon, sent: nn.Module, last: nn.Module | None, done: Round) -> nn.Module:
    """A client's network after its round."""
    model: Any = copy.deepcopy(sent).train()
    others: list[Any] = [copy.deepcopy(other).train() for other in (sent, last) if other is not None]
    optimizer = torch.optim.SGD(model.parameters(), method.lr, method.momentum, weight_decay=method.weight_decay)
    for (index,) in done.trace.order[0]:
        inputs, labels = done.trace.inputs[index], done.trace.labels[index]
        z = model.body(inputs)
        loss = nn.functional.cross_entropy(model.head(z), labels)
        if last is not None:
            near, far = (other.body(inputs).detach() for other in others)
            loss = loss + method.mu * contrast(z, near, far, method.temperature)
        optimizer.zero_grad()
        loss.backward()
        if method.max_norm is not None:
            clip_grad_norm_(model.parameters(), method.max_norm)
        optimizer.step()
    return model


@pytest.mark.parametrize("settings", [BARE, {}], ids=["bare", "momentum, decay, clipping"])
@pytest.mark.parametrize("rate", [1.0, 0.67])
def test_rounds_equal_a_plain_loop(settings: dict[str, Any], rate: float) -> None:
    method = replace(Moon.example(), **settings)
    run, server = federation(method, task=worlds.task(), client_fraction=rate), copy.deepcopy(worlds.task().model)
    last: list[nn.Module | None] = [None] * len(SIZES)
    for _ in range(3):
        rounds = run.run_round()
        assert len(rounds) == round(rate * 3)
        for done in rounds:
            last[done.upload.client] = trained(method, server, last[done.upload.client], done)
        chosen = [done.upload.client for done in rounds]
        with torch.no_grad():
            for name, p in server.named_parameters():
                whole = sum(SIZES[k] * last[k].get_parameter(name) for k in chosen)  # type: ignore[union-attr]
                p.copy_(whole / sum(SIZES[k] for k in chosen))
        assert_near(run.server.shared, dict(server.named_parameters()), 1e-10)


def test_running_statistics_are_those_of_the_network_in_training() -> None:
    task, method = worlds.task(batch_norm=True), replace(Moon.example(), **BARE)
    run = federation(method, task=task)
    first = [copy.deepcopy(task.model) for _ in SIZES]
    for model, done in zip(first, run.run_round(), strict=True):
        model.load_state_dict(trained(method, task.model, None, done).state_dict())
    sent = copy.deepcopy(task.model)
    sent.load_state_dict({**run.server.shared, **run.server.buffers})
    for last, done in zip(first, run.run_round(), strict=True):
        state = trained(method, sent, last, done).state_dict()
        assert_near(done.result.buffers, {n: state[n] for n in done.result.buffers}, 1e-10)


def test_the_first_round_and_no_contrast_are_fedavg() -> None:
    plain = worlds.federation(FedAvg.example(), rounds=2)
    run = worlds.federation(Moon.example())
    assert_same(run.server.shared, worlds.federation(FedAvg.example()).server.shared)
    assert Moon().uses_plain_cross_entropy(worlds.task(), 0)
    run.run_round()
    assert (
        float((dense(run.server.shared["body.fc1.weight"]) - dense(plain.server.shared["body.fc1.weight"])).norm())
        > 1e-4
    )
    assert not Moon().uses_plain_cross_entropy(worlds.task(), 1)
    none = worlds.federation(replace(Moon.example(), mu=0.0), rounds=2)
    assert_same(none.server.shared, plain.server.shared)
    assert not none.clients[0].memory
    assert Moon(mu=0.0).uses_plain_cross_entropy(worlds.task(), 1)


def test_what_is_kept_is_the_trained_network_below_its_classifier() -> None:
    run = worlds.federation(Moon.example(), rounds=0)
    before = dict(run.server.shared)
    done = run.run_round()[1]
    ends = done.result.trained(before)
    below = {name: value for name, value in ends.items() if not name.startswith("head.")}
    assert_near(run.clients[1].memory["previous"], below, 1e-12)
    view = run.observe(1)[0]
    assert set(view.private) == {f"memory/previous/{name}" for name in before if not name.startswith("head.")}
    assert set(view.update) == set(before)
    assert not view.received


def test_moon_trains_generated_networks() -> None:
    run = worlds.federation(replace(Moon.example(), parametrization=Hypernetwork.example()), rounds=2)
    plain = worlds.federation(replace(FedAvg.example(), parametrization=Hypernetwork.example()), rounds=2)
    assert all(dense(value).isfinite().all() for value in run.server.shared.values())
    assert any(not torch.equal(dense(run.server.shared[n]), dense(v)) for n, v in plain.server.shared.items())


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="mu: expected a number >= 0, got -1"):
        Moon(mu=-1.0)
    with pytest.raises(ValueError, match="temperature: expected a number > 0, got 0"):
        Moon(temperature=0.0)
    with pytest.raises(ValueError, match="expected a network with a classifier, a module called 'top', got none"):
        Client(replace(worlds.task(), head="top."), Moon())
    with pytest.raises(ValueError, match="expected a network with a classifier"):
        Client(replace(worlds.task(), head=""), Moon())
