"""Which phases count as local steps: looks do not, nor what moves nothing that the network reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near
from support.pictures import POOLED, attack, error, network, photograph, victim
from torch import nn

from attacks import NotApplicable, Reconstruction
from attacks.base import build
from attacks.labels.recovery import recover_labels
from attacks.rewriting.headless import Headless
from attacks.rewriting.surrogate import Surrogate, count_local_steps, is_single_step
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient, training_phases
from fl.capture import from_update
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.feddyn import FedDyn
from fl.methods.fedgen import FedGen
from fl.methods.fedjets import FedJETs
from fl.methods.ga import GA
from fl.methods.hyperfl import HyperFL
from fl.methods.scaffold import Scaffold
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.tensors import dense
from fl.types import Task
from fl.view import ServerView

ONE: dict[str, Any] = {"lr": 0.1, "steps": 1, "epochs": None, "batch_size": None}
SEVERAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 2}
PLAIN: dict[str, Any] = {"momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0}
FLAT = network(nn.Flatten(), nn.Linear(196, 40), nn.ReLU())


def seen(method: Method, n: int = 1, task: Task | None = None) -> ServerView:
    """A client's view of the first round on `n` images."""
    data = worlds.images(n, "training")
    return Federation(Client(task or worlds.task(), method), [ClientData(data, data)]).observe(0)[0]


@pytest.mark.parametrize("method", [FedGen, GA, FedJETs, Scaffold], ids=lambda m: m.name)
@pytest.mark.parametrize(("settings", "count"), [(ONE, 1), (SEVERAL, 4)], ids=["one", "several"])
def test_phases_that_do_not_train_are_not_counted(method: type[FedAvg], settings: Any, count: int) -> None:
    beside = {"option": "I"} if method is Scaffold else {}
    view = seen(method(**settings, **beside), 4)
    phases, schedule = training_phases(view)
    assert len(phases) == 1
    assert schedule is not None
    assert sum(map(len, schedule)) == count_local_steps(view) == count
    unknown = replace(view, schedule=None)
    assert (len(training_phases(unknown)[0]), training_phases(unknown)[1], count_local_steps(unknown)) == (
        1,
        None,
        None,
    )


def test_two_phases_that_train_are_two() -> None:
    phases, schedule = training_phases(seen(HyperFL.example(), 4))
    assert len(phases) == 2
    assert schedule is not None
    assert all(schedule)


@pytest.mark.parametrize("method", [GA, FedJETs])
def test_only_the_methods_own_direction_is_known_to_be_plain(method: type[FedAvg]) -> None:
    class Other(method):  # type: ignore[misc, valid-type]
        def gradient(self, grad: Any, params: Any, batches: Any, step: Any) -> Any:
            return {name: value * 2.0 for name, value in super().gradient(grad, params, batches, step).items()}

    assert deviation_from_loss_gradient(seen(method(**SEVERAL), 4)) is None
    assert deviation_from_loss_gradient(seen(Other(**SEVERAL), 4)) is not None


@pytest.mark.parametrize("method", [FedDyn, Scaffold])
def test_what_is_remembered_is_zero_and_known_in_the_first_round_alone(method: type[FedAvg]) -> None:
    data = worlds.images(4, "training")
    run = Federation(Client(worlds.task(), method(**ONE)), [ClientData(data, data)])
    first, truth = run.observe(0)
    assert not first.private
    assert deviation_from_loss_gradient(first) is None
    assert_near(predict(first, truth.candidate()), first.update, 1e-12)
    run.run_round()
    later = run.observe(0)[0]
    assert later.private
    assert "first round" in (deviation_from_loss_gradient(later) or "")


def test_a_captured_update_does_not_tell_which_round_it_is_of() -> None:
    update = dict(seen(FedDyn(**ONE)).update)
    view = from_update(worlds.task().model, update, input_shape=(1, 8, 8), num_classes=3, method=FedDyn(**ONE))
    assert "mu: alpha" in (deviation_from_loss_gradient(view) or "")


def test_several_first_steps_of_feddyn_are_pulled_back() -> None:
    assert deviation_from_loss_gradient(seen(FedDyn(**SEVERAL), 4)) is not None
    assert deviation_from_loss_gradient(seen(Scaffold(**SEVERAL), 4)) is None


@pytest.mark.parametrize("method", [FedDyn, FedGen, GA, Scaffold], ids=lambda m: m.name)
@pytest.mark.parametrize("name", ["cascade", "first-step+cascade"])
def test_a_single_step_gives_the_picture_back(method: type[FedAvg], name: str) -> None:
    found = attack(victim(network(*POOLED), photograph(14), method(**ONE)), name)
    assert error(found, photograph(14)) < 1e-5
    assert found.verified


@pytest.mark.parametrize("method", [FedGen, GA], ids=lambda m: m.name)
def test_several_steps_are_worked_out_from_the_first(method: type[FedAvg]) -> None:
    view = victim(FLAT, photograph(14), method(**{**ONE, "lr": 3e-3, "steps": 5}))
    found = attack(view, "first-step+cascade")
    assert error(found, photograph(14)) < 1e-5


def test_the_experts_of_a_mixture_give_away_the_picture_though_its_gate_is_given_something_else() -> None:
    found = attack(victim(FLAT, photograph(14), FedJETs(**ONE)), "analytic")
    assert error(found, photograph(14)) < 1e-9
    assert found.verified


@pytest.mark.parametrize("method", [FedGen, GA], ids=lambda m: m.name)
@pytest.mark.parametrize("settings", [ONE, SEVERAL], ids=["one", "several"])
def test_what_is_read_off_is_what_fedavg_gives_away(method: type[FedAvg], settings: dict[str, Any]) -> None:
    ours, theirs = (seen(kind(**settings, **PLAIN, sampler="sequential"), 4) for kind in (method, FedAvg))
    mine, plain = (recover_labels(ObservedUpdate(view)) for view in (ours, theirs))
    assert plain is not None
    assert mine is not None
    assert torch.equal(mine, plain)
    known = [Surrogate().rewrite(view) for view in (ours, theirs)]
    assert all(isinstance(view, ServerView) for view in known)
    for name, value in known[1].update.items():  # type: ignore[union-attr]
        assert torch.allclose(dense(known[0].update[name]), dense(value), rtol=1e-9, atol=1e-12)  # type: ignore[union-attr]


def test_a_look_is_no_phase_that_trains_a_hypernetwork() -> None:
    made = Hypernetwork(embedding=8, hidden=16, init="scaled")
    found, plain = (attack(seen(kind(**ONE, parametrization=made)), "peel+headless") for kind in (GA, FedAvg))
    assert torch.allclose(dense(found.private["features"]), dense(plain.private["features"]))


@pytest.mark.parametrize("method", [FedGen, GA, FedJETs], ids=lambda m: m.name)
def test_the_search_without_a_classifier_has_what_it_needs(method: type[FedAvg]) -> None:
    view = seen(method(**ONE))
    found = build({"name": "chain", "first": "headless", "then": {"name": "ig", "iterations": 2}})(view)
    if method is FedJETs:
        assert isinstance(found, NotApplicable)
        assert "has no weight and bias of the network" in found.reason
        inside = Headless(layer="experts.0.body.fc1")(view)
        assert isinstance(inside, NotApplicable)
        assert "of the network" in inside.reason
        return
    assert isinstance(found, Reconstruction)
    assert set(found.private) >= {"features"}


@pytest.mark.parametrize("method", [FedGen, GA], ids=lambda m: m.name)
def test_one_step_on_some_of_the_images_that_were_looked_at(method: type[FedAvg]) -> None:
    view = seen(method(**{**ONE, "batch_size": 1}), 2)
    assert view.batch_size == 2
    found = Headless()(view)
    assert isinstance(found, NotApplicable)
    assert "a client of one image" in found.reason
    assert not is_single_step(view)
    assert is_single_step(seen(method(**ONE), 2))
