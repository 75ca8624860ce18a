"""Methods with a gradient of their own: in closed form where it is that of the loss after all, refused elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from support import worlds
from support.brief import brief_picture_searches
from support.compare import assert_same
from support.private import EVERY, federation_of

from attacks import NotApplicable, Reconstruction
from attacks.base import build
from attacks.labels.recovery import recover_labels
from attacks.update.observed_update import ObservedUpdate
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.gradient import Gradient
from fl.method import Step
from fl.methods.fedavg import FedAvg
from fl.methods.fedprox import FedProx
from fl.methods.fedsam import FedSAM
from fl.models.hypernetworks.filter_hypernetwork import Filters
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.parametrization import Parametrization
from fl.tensors import Tensors, scale_tensors
from fl.types import Batch
from fl.view import ServerView

STEP = {"lr": 0.1, "momentum": 0.0, "weight_decay": 1e-2, "steps": 1, "batch_size": None}
"""One step on all images."""
CLOSED: dict[str, Parametrization] = {
    "analytic": Parametrization(),
    "headless": Parametrization(),
    "surrogate": Parametrization(),
    "peel": Hypernetwork(embedding=8, hidden=16, init="scaled"),
    "filters": Filters(embedding=3, block=(4, 4)),
}
"""Attacks that take the update for a gradient, and what they open."""


def view(method: FedAvg, images: int = 1) -> ServerView:
    data = worlds.images(images, "victim")
    task = worlds.deeper() if isinstance(method.parametrization, Filters) else worlds.task()
    return Federation(Client(task, method), [ClientData(data, data)]).observe(0)[0]


@pytest.mark.parametrize("name", CLOSED)
def test_one_step_of_fedprox_is_one_of_fedavg(name: str) -> None:
    given = {**STEP, "parametrization": CLOSED[name]}
    plain, prox = build(name)(view(FedAvg(**given))), build(name)(view(FedProx(mu=0.7, **given)))  # type: ignore[arg-type]
    assert isinstance(plain, Reconstruction), plain
    assert isinstance(prox, Reconstruction), prox
    assert plain.verified == prox.verified
    assert_same(prox.private, plain.private)
    if plain.inputs is not None:
        assert torch.equal(prox.inputs, plain.inputs)


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("steps", [2, None])
def test_several_steps_of_it_are_not(name: str, steps: int | None) -> None:
    given = {**STEP, "weight_decay": 0.0, "steps": 2, "parametrization": CLOSED[name]}
    seen = view(FedProx(mu=0.7, **given))  # type: ignore[arg-type]
    result = build(name)(seen if steps else replace(seen, schedule=None))
    assert isinstance(result, NotApplicable)
    assert "gradient of its loss alone" in result.reason


def test_without_weight_the_term_is_none() -> None:
    assert FedProx(mu=0.0).follows_loss_gradient(None)
    assert FedProx(mu=0.0).follows_loss_gradient(2)


def test_labels_are_counted_alike() -> None:
    plain, prox = (view(kind(**STEP), images=4) for kind in (FedAvg, FedProx))  # type: ignore[arg-type]
    mine, theirs = recover_labels(ObservedUpdate(prox)), recover_labels(ObservedUpdate(plain))
    assert mine is not None
    assert theirs is not None
    assert torch.equal(mine, theirs)


@dataclass(frozen=True, kw_only=True)
class Twice(FedProx):
    """FedProx with another gradient still."""

    name: ClassVar[str] = "twice"

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        return scale_tensors(super().gradient(grad, params, batches, step), 2.0)


def test_only_fedprox_itself_says_so() -> None:
    assert not FedSAM().follows_loss_gradient(1)
    assert not Twice().follows_loss_gradient(1)
    assert FedAvg().follows_loss_gradient(None)
    prox = FedProx()
    assert prox.follows_loss_gradient(1)
    assert not prox.follows_loss_gradient(2)
    assert not prox.follows_loss_gradient(None)


@pytest.mark.parametrize("name", ["analytic", "cascade", "rgap", "spear", "headless", "surrogate+ig", "peel+ig"])
@pytest.mark.parametrize("method", ["dp-fedavg", "centaur", "ppsgd", "dp-hyperfl"])
def test_equations_are_refused_where_noise_is_added_and_a_search_is_named(name: str, method: str) -> None:
    attack = build({"name": name, "iterations": 1} if name.endswith("+ig") else name)
    result = attack(federation_of(EVERY[method]).observe(0)[0])
    if (name, method) == (
        "peel+ig",
        "dp-hyperfl",
    ):  # its outer products survive (test_peel_private), and a search is named
        assert isinstance(result, Reconstruction)
        return
    assert isinstance(result, NotApplicable)
    if name == "peel+ig":
        assert "nothing to peel" in result.reason
        return
    if method == "dp-hyperfl":
        assert result.reason.endswith("`peel` takes the hypernetwork off, for a search (peel+joint)")
        return
    search = "ig" if method == "dp-fedavg" else "joint"
    assert result.reason.endswith(f"noise is added, which no equation survives; search with {search}")


@pytest.mark.parametrize("name", ["peel+cascade", "peel+analytic"])
def test_behind_the_peel_the_noise_is_still_there(name: str) -> None:
    for mode, leaks in (("client-level", True), ("dp-joint", False)):
        method = worlds.one_step(replace(EVERY["dp-hyperfl"], mode=mode))  # type: ignore[arg-type]
        with brief_picture_searches():
            result = build(name)(worlds.federation(method).observe(0, data=worlds.images(1, "victim"))[0])
        assert isinstance(result, NotApplicable) == (not leaks), result
        if not leaks:
            assert "noise is added, which no equation survives" in result.reason


@pytest.mark.parametrize(("mode", "noise_on"), [("client-level", "extractor"), ("dp-joint", "hypernetwork")])
def test_at_client_level_the_server_sees_plain_gradients(mode: str, noise_on: str) -> None:
    """There only what the server publishes gets noise: it is the attacker who reads updates as they are."""
    method = worlds.one_step(replace(EVERY["dp-hyperfl"], mode=mode, noise_on=noise_on))  # type: ignore[arg-type]
    result = build("peel")(worlds.federation(method).observe(0)[0])
    assert (isinstance(result, Reconstruction) and bool(result.verified)) == (mode == "client-level")
