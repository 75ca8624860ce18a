"""Parameters with requires_grad=False: part of the network, known to everybody."""

from __future__ import annotations

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same

import attacks
from attacks.network.layer_chain import extract_layer_chain
from fl.client import Client, LossGradient
from fl.federation import ClientData, Federation
from fl.gradient import autograd_derivative
from fl.method import Step
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.network import Network
from fl.predict import predict
from fl.privacy.dp_sgd import Privatization, opacus_gradient, private_gradient
from fl.tensors import dense
from fl.types import Task, frozen

METHOD = FedAvg(lr=0.1, momentum=0.5, epochs=2, batch_size=2)


def task() -> Task:
    given = worlds.task()
    given.model.get_submodule("body.conv1").requires_grad_(False)
    return given


def test_they_are_no_parameters_of_the_task() -> None:
    given = task()
    assert set(frozen(given.model)) == {"body.conv1.weight", "body.conv1.bias"}
    assert {n for n, _ in given.model.named_parameters()} == given.parameters.keys() | frozen(given.model).keys()
    assert not given.parameters.keys() & frozen(given.model).keys()
    assert not any(name.startswith("body.conv1") for name in given.buffers)


@pytest.mark.parametrize("method", [METHOD, FedPer(lr=0.1, batch_size=2)])
def test_they_are_not_trained_not_sent_and_known(method: FedAvg) -> None:
    run = worlds.federation(method, task_=task())
    known = frozen(task().model)
    assert_same(frozen(run.client.task.model), known)
    view, truth = run.observe(1)
    sent = {"body.fc1.weight", "body.fc1.bias", "head.weight", "head.bias"} - view.private.keys()
    assert view.update.keys() == view.shared.keys() == sent
    assert_same(frozen(view.task.model), known)
    assert_same(predict(view, truth.candidate()), view.update)


def test_a_network_takes_them_from_its_module_and_all_else_from_outside() -> None:
    client = Client(task(), METHOD)
    x = worlds.images(2).inputs
    weights = dict(client.task.parameters)
    expected = client.task.model(x)
    assert torch.equal(Network(client.fixed_statistics_model, weights, {})(x), expected)
    del weights["head.bias"]
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        Network(client.fixed_statistics_model, weights, {})(x)


def test_a_network_notices_what_was_frozen_thawed_or_taken_out_after_its_first_call() -> None:
    given, x = task(), worlds.images(2).inputs
    model, conv, weights = given.model, given.model.get_submodule("body.conv1"), dict(given.parameters)
    for _ in range(2):
        Network(model, weights, {})(x)
    conv.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"body\.conv1\.bias"):
        Network(model, weights, {})(x)
    thawed = {name: value.detach() * 2 for name, value in model.named_parameters()}
    expected = torch.func.functional_call(model, thawed, (x,))
    assert torch.equal(Network(model, thawed, {})(x), expected)
    model.requires_grad_(False)
    Network(model, {}, {})(x)
    with torch.no_grad():
        conv.bias += 1.0  # type: ignore[operator]
    assert torch.equal(Network(model, {}, {})(x), model(x))
    conv.bias = None
    assert torch.equal(Network(model, {}, {})(x), model(x))


def test_tied_weights_go_by_one_name() -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
    tied[1].weight = tied[0].weight
    own = {name: torch.ones_like(value) for name, value in tied.named_parameters()}
    assert own.keys() == {"0.weight", "0.bias", "1.bias"}
    for _ in range(2):
        assert torch.equal(Network(tied, own, {})(torch.ones(1, 3).double()), torch.full((1, 3), 13.0).double())


def test_clipping_by_sample_leaves_them_out() -> None:
    client, batch = Client(task(), METHOD), worlds.images(3)
    params = dict(client.task.parameters)
    step = Step(client.task, params, {}, {}, {}, 0)
    grad = LossGradient(client, step, tuple(params), {}, client.task.model, None, autograd_derivative)
    found = [
        way(grad, params, batch, Privatization(clip=0.1, noise_multiplier=0.0), None)
        for way in (private_gradient, opacus_gradient)
    ]
    assert found[0].keys() == params.keys()
    assert_near(found[0], found[1], 1e-12)


def test_attacks_see_through_them() -> None:
    image = worlds.images(1, "victim")
    run = Federation(Client(task(), FedAvg(steps=1, batch_size=None)), [ClientData(image, image)])
    view, _ = run.observe(0)
    given = run.client.task.model.get_submodule("body")[:4](image.inputs)  # what fc1 is given
    found = attacks.build("headless")(view)
    assert isinstance(found, attacks.Reconstruction)
    torch.testing.assert_close(dense(found.private["features"]), given[0], rtol=1e-9, atol=1e-12)
    linear = attacks.build({"name": "ig", "iterations": 2})(view)
    assert isinstance(linear, attacks.Reconstruction)
    stages = extract_layer_chain(view, lossy=True)
    assert not isinstance(stages, attacks.NotApplicable)
    assert torch.equal(stages[0].layer.weight, task().model.get_submodule("body.conv1").weight)
