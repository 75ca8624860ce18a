"""Counts that can be checked by hand, and what single methods cost beyond a gradient."""

from dataclasses import replace

import pytest
from torch import nn

import attacks
from defenses import defenses
from eval.experiment.spec import FederationSpec
from eval.run import unit_costs
from eval.run.unit_costs import (
    ClientImages,
    TrainingWork,
    attack_seconds,
    generated_macs,
    local_seconds,
    network_work,
    template_task,
    training_seconds,
    work_of,
)
from fl.method import methods
from fl.models import models
from fl.types import Task

IMAGES = ClientImages(clients=10, train=200, test=50)


def work(method="fedavg", model="hyperfl-grey", defense="none", **settings):
    network = models.build(model)
    chosen = methods.build({"name": method, **settings})
    return TrainingWork(
        task=template_task(network),
        network=network_work(network),
        federation=FederationSpec(rounds=10),
        method=chosen,
        defense=defenses.build(defense),
        images=IMAGES,
    )


def test_layers_and_multiplications_of_hyperfls_network_by_hand(monkeypatch):
    for name, value in (("MACS_A_SECOND", 1.0), ("SLOWEST", 1.0), ("FASTEST", 1.0)):
        monkeypatch.setattr(unit_costs, name, value)
    task = models.build("hyperfl-grey").build_task(num_classes=10)
    found = work_of(task)
    convolutions = 24 * 24 * 16 * 25 + 10 * 10 * 32 * 16 * 25
    assert found.seconds == convolutions + 800 * 128 + 128 * 10
    assert found.layers == 4
    assert found.numbers == 16 * 25 + 16 + 32 * 16 * 25 + 32 + 800 * 128 + 128 + 128 * 10 + 10


def test_what_has_no_layer_that_multiplies_is_not_known():
    assert work_of(Task(nn.Flatten(), (1, 8, 8), 64)) is None


class OnNamedInputs(nn.Module):
    """A network whose input is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x.features)


def test_what_cannot_be_called_on_a_tensor_is_not_known():
    assert work_of(Task(OnNamedInputs(), (4,), 2)) is None


def test_steps_are_those_of_the_method():
    one = work(batch_size=50, epochs=2)
    eight = local_seconds(one, one.method, 200)
    assert local_seconds(one, replace(one.method, epochs=4), 200) == pytest.approx(2 * eight)
    assert local_seconds(one, replace(one.method, epochs=None, steps=8), 200) == pytest.approx(eight)
    assert local_seconds(one, methods.build({"name": "pfedhn", "batch_size": 50}), 200) == pytest.approx(50 / 8 * eight)


def test_a_network_for_every_image_costs_what_makes_it():
    one = work("hyperfedzero", "mlp", chunk=100, hidden=[300, 300])
    weights = one.network.numbers
    assert generated_macs(one.method, one.task) == -(-weights // 100) * (300 * 300 + 300 * 100)
    assert training_seconds(one) > 10 * training_seconds(work("fedavg", "mlp", steps=5, epochs=None, batch_size=80))
    assert generated_macs(methods.build({"name": "hyperfedzero", "condition": "input"}), one.task) == 0


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pfedhn", {"hidden": [400]}),
        ("hfedf", {"hidden": [400]}),
        ("feddf", {"public": "mnist", "server_steps": 500}),
        ("fedbe", {"public": "mnist", "images": 5_000}),
        ("fedlaw", {"public": "mnist", "images": 5_000}),
        ("fedgen", {"server_steps": 5_000}),
    ],
)
def test_what_a_server_does_counts(method, settings):
    """A server's hypernetwork, its distillation and its generator cost more the larger they are."""
    small = {"hidden": [10], "server_steps": 5, "images": 128}
    common = {"epochs": 1, "batch_size": 50}
    less = {key: small.get(key, value) for key, value in settings.items()}
    assert training_seconds(work(method, **common, **settings)) > 1.5 * training_seconds(work(method, **common, **less))


def test_a_chain_searches_for_an_update_of_fedavg():
    one = work("hyperfl")
    observed = replace(one.method, epochs=None, steps=1, head_epochs=0)
    alone, peeled = (
        attack_seconds(one, attacks.build({"name": name, "iterations": 1000}), observed, 4, 1)
        for name in ("rog", "peel+rog")
    )
    assert alone > 2 * peeled
    assert attack_seconds(one, attacks.build("cascade"), observed, 4, 1) == pytest.approx(
        unit_costs.ATTACK_SECONDS + 4 * unit_costs.CASCADE_SECONDS * 784
    )


def test_factors_are_of_registered_methods_attacks_and_defenses():
    names = {*attacks.attacks.names(), "*"}
    assert set(unit_costs.STEP_FACTORS) <= set(methods.names())
    assert set(unit_costs.PRIVATE_FACTORS) <= set(defenses.names())
    assert set(unit_costs.EXACT_SECONDS) <= names
    assert {attack for _, attack in unit_costs.SEARCH_FACTORS} <= names
    assert {method for method, _ in unit_costs.SEARCH_FACTORS} <= {*methods.names(), "*"}
