"""FedSR by itself: rounds by plain loops, what it draws, keeps and predicts by."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import unequal, worlds
from support.compare import assert_near
from torch import Tensor, distributions, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from fl.client import Client
from fl.methods.fedsr import FedSR, divergence
from fl.simulation.client_round import Round
from fl.tensors import Tensors, dense
from fl.types import Scope, Task

SIZES = (3, 4, 6)
SHARED = ("head.encode.weight", "head.encode.bias", "head.classify.weight", "head.classify.bias")
OWN = ("head.centre", "head.width", "head.scale")
federation = partial(unequal.federation, sizes=SIZES, test=5)


class Plain(nn.Module):
    """The network and its loss with modules and `torch.distributions`."""

    center: nn.Parameter
    width: nn.Parameter
    scale: nn.Parameter

    def __init__(self, task: Task, values: Tensors) -> None:
        super().__init__()
        self.body = copy.deepcopy(task.model.get_submodule("body"))
        self.encode, self.classify = (nn.Linear(16, n, dtype=torch.float64) for n in (32, worlds.CLASSES))
        for name in ("centre", "width", "scale"):
            self.register_parameter(name, nn.Parameter(torch.empty_like(dense(values[f"head.{name}"]))))
        self.fill(values)

    def fill(self, values: Tensors) -> None:
        with torch.no_grad():
            for name, own in self.named_values().items():
                own.copy_(dense(values[name]))

    def named_values(self) -> dict[str, nn.Parameter]:
        return {name if name.startswith("body") else f"head.{name}": p for name, p in self.named_parameters()}

    def objective(self, method: FedSR, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        mu, raw = self.encode(self.body(x)).split(16, 1)
        z = mu + functional.softplus(raw) * noise
        made = distributions.Normal(self.scale * mu, self.scale * functional.softplus(raw))
        expected = distributions.Normal(self.centre[y], functional.softplus(self.width)[y])
        loss = functional.cross_entropy(self.classify(z), y)
        loss = loss + method.l2 * z.square().sum(1).sqrt().mean()
        return loss + method.cmi * distributions.kl_divergence(made, expected).sum(1).mean()


def trained(method: FedSR, values: Tensors, done: Round) -> dict[str, Tensor]:
    """One client's network after the batches and draws of its round."""
    model = Plain(worlds.task(), values)
    optimizer = torch.optim.SGD(model.parameters(), method.lr, method.momentum, weight_decay=method.weight_decay)
    for (index,), drawn in zip(done.trace.order[0], done.trace.draws[0], strict=True):
        optimizer.zero_grad()
        x, y = done.trace.inputs[index], done.trace.labels[index]
        model.objective(method, x, y, drawn["head.noise"]).backward()
        if method.max_norm is not None:
            clip_grad_norm_(model.parameters(), method.max_norm)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_values().items()}


@pytest.mark.parametrize("settings", [{}, {"max_norm": None, "l2": 0.0}, {"cmi": 0.0}], ids=["all", "no l2", "no cmi"])
def test_rounds_equal_plain_loops(settings: dict[str, Any]) -> None:
    method = replace(FedSR.example(), **settings)
    run = federation(method, client_fraction=0.67)
    shared, own = dict(run.server.shared), [dict(state.private) for state in run.clients]
    for _ in range(3):
        rounds = run.run_round()
        assert len(rounds) == 2
        ends = []
        for done in rounds:
            end = trained(method, {**shared, **own[done.upload.client]}, done)
            own[done.upload.client] = {name: end[name] for name in OWN}
            ends.append((SIZES[done.upload.client], end))
        whole = sum(n for n, _ in ends)
        shared = {name: sum(n / whole * end[name] for n, end in ends) for name in shared}  # type: ignore[misc]
        assert_near(run.server.shared, shared, 1e-10)
    for state, expected in zip(run.clients, own, strict=True):
        assert_near(state.private, expected, 1e-10)


def test_what_travels_and_what_stays() -> None:
    run = worlds.federation(FedSR.example())
    view, _ = run.observe(1)
    assert set(view.update) == {n for n in worlds.task().parameters if n.startswith("body.")} | set(SHARED)
    assert set(view.private) == set(OWN)
    assert all(run.client.method.scope(name, run.client.task) is Scope.PRIVATE for name in OWN)


def test_fedsr_starts_from_the_plain_network() -> None:
    run, task = worlds.federation(FedSR.example(), rounds=0), worlds.task()
    for name, value in run.server.shared.items():
        if not name.startswith("head.encode."):
            assert torch.equal(dense(value), task.parameters[name.replace("classify.", "")])
    assert not dense(run.private_init["head.centre"]).any()
    assert all(bool((dense(run.private_init[name]) == 1).all()) for name in ("head.width", "head.scale"))
    other = worlds.federation(FedSR.example(), rounds=0, seed=1).server.shared
    assert not torch.equal(dense(other["head.encode.weight"]), dense(run.server.shared["head.encode.weight"]))


def test_every_image_and_step_has_draws_of_its_own() -> None:
    draws = [step["head.noise"] for step in federation(FedSR.example()).train(2).trace.draws[0]]
    assert all(noise.shape == (2, 16) for noise in draws)
    rows = torch.cat(draws)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_predictions_are_means_over_draws() -> None:
    run = worlds.federation(FedSR.example())
    params = {**run.server.shared, **run.clients[0].private}
    x, model = worlds.images(5, "x").inputs, Plain(worlds.task(), params)
    network = run.client.network(params, {})
    mu, raw = model.encode(model.body(x)).split(16, 1)
    many = replace(FedSR.example(), samples=20_000).logits(network, x)
    z = mu + functional.softplus(raw) * torch.randn(20_000, 1, 16, generator=torch.Generator().manual_seed(0)).double()
    assert_near({"p": many.exp()}, {"p": model.classify(z).softmax(-1).mean(0)}, 0.02)
    few = replace(FedSR.example(), samples=3)
    assert torch.equal(few.logits(network, x), few.logits(network, x))
    torch.testing.assert_close(few.logits(network, x)[2:], few.logits(network, x[2:]))
    at_mean = replace(FedSR.example(), samples=0).logits(network, x)
    torch.testing.assert_close(at_mean, model.classify(mu))
    assert float((few.logits(network, x).exp() - at_mean.softmax(-1)).abs().max()) > 1e-4


def test_labels_of_several_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    mu, sigma, center, width = (torch.rand(n, 2, generator=generator) + 0.1 for n in (4, 4, 3, 3))
    labels = torch.tensor([0, 2, 1, 1])
    sure = functional.one_hot(labels, 3).to(mu)
    plain = divergence(mu, sigma, center, width, labels)
    torch.testing.assert_close(divergence(mu, sigma, center, width, sure), plain)
    every = torch.stack([divergence(mu, sigma, center, width, torch.full((4,), k)) for k in range(3)], 1)
    torch.testing.assert_close(
        divergence(mu, sigma, center, width, (sure + 0.5) / 2.5), ((sure + 0.5) / 2.5 * every).sum(1)
    )


def test_settings_out_of_range() -> None:
    for key in ("l2", "cmi", "samples"):
        settings: dict[str, Any] = {key: -1}
        with pytest.raises(ValueError, match=f"{key}: expected a (whole )?number >= 0, got -1"):
            FedSR(**settings)
    lengths = [FedSR(**given).phases(worlds.task(), 0)[0] for given in ({}, {"epochs": 2}, {"steps": 3})]  # type: ignore[arg-type]
    assert [(phase.epochs, phase.steps) for phase in lengths] == [(None, 5), (2, None), (None, 3)]
    with pytest.raises(ValueError, match="expected a linear layer called 'body' as classifier, got Sequential"):
        Client(replace(worlds.task(), head="body."), FedSR())
    with pytest.raises(ValueError, match="called 'nowhere' as classifier, got nothing"):
        Client(replace(worlds.task(), head="nowhere."), FedSR())
