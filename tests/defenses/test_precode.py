from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.defended_gradients import precode
from support import worlds
from support.compare import assert_near, assert_same
from torch import nn

from attacks.base import Reconstruction, build
from defenses.compose import Chain
from defenses.dp_sgd import DPSGD
from defenses.precode import Precode
from defenses.prune import Prune
from eval.metrics.score import score
from fl.client import Client, LossGradient
from fl.federation import ClientData, Federation
from fl.gradient import autograd_derivative, func_derivative
from fl.method import Step
from fl.methods.fedavg import FedAvg
from fl.methods.fedgen import FedGen
from fl.methods.hyperfl import HyperFL
from fl.models import build as network
from fl.predict import predict
from fl.privacy.dp_sgd import Privatization, private_gradient
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Candidate, Task
from fl.view import ThreatModel

STEP = FedAvg(lr=1.0, steps=1, batch_size=None)
SMALL = Precode(latent=6, beta=0.1)
NOISE = "draws/0/0/defense/body.bottleneck.sample.noise"


def test_a_step_follows_the_loss_with_its_divergence() -> None:
    run = worlds.federation(STEP, SMALL, rounds=0)
    view, truth = run.observe(1)
    model = run.client.task.model
    body = nn.Sequential(*(m for name, m in model.body.named_children() if name != "bottleneck"))
    made = {name: value for name, value in model.body.bottleneck.named_parameters() if "." in name}
    batch, noise = run.data[1].train, dense(truth.private[NOISE])
    index = truth.trace.indices[truth.trace.order[0][0][0]]
    value = precode(body, model.head, made, noise, batch.inputs[index], batch.labels[index], 0.1)
    names = [name for name, _ in model.named_parameters()]
    grads = dict(zip(names, torch.autograd.grad(value, list(model.parameters())), strict=True))
    assert_near(view.update, grads, 1e-12)


@pytest.mark.parametrize("defense", [SMALL, Chain(parts=(SMALL, Prune(ratio=0.5)))], ids=["alone", "chain"])
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_update(method: Any, defense: Any) -> None:
    view, truth = worlds.federation(method, defense).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)
    named = Candidate(truth.inputs, truth.labels, truth.private, truth.trace.order)  # the noise as a private tensor
    assert_same(predict(view, named), view.update)
    other = {n: value + 0.5 if n.startswith("draws/") else value for n, value in truth.private.items()}
    changed = predict(view, replace(named, private=other))
    assert any(not torch.equal(dense(changed[name]), dense(value)) for name, value in view.update.items())


def test_every_step_has_noise_of_its_own() -> None:
    view, truth = worlds.federation(FedAvg(epochs=2, batch_size=2), SMALL).observe(1)
    shapes = {name: tuple(shape) for name, shape in view.private.items()}
    assert shapes == {NOISE.replace("/0/0/", f"/0/{s}/"): (2, 6) for s in range(4)}
    drawn = torch.stack([dense(truth.private[name]) for name in shapes])
    assert len(drawn.flatten().unique()) == 48
    again = worlds.federation(FedAvg(epochs=2, batch_size=2), SMALL).observe(1)[1]
    assert all(torch.equal(dense(again.private[name]), dense(truth.private[name])) for name in shapes)


def test_noise_is_no_secret_where_it_is_known_or_the_defense_is_not() -> None:
    run = worlds.federation(STEP, SMALL)
    told, truth = run.observe(1, threat=ThreatModel(knows_randomness=True))
    assert not told.private
    assert_same(predict(told, Candidate(truth.inputs, truth.labels, order=truth.trace.order)), told.update)
    unaware, truth = run.observe(1, threat=ThreatModel(knows_defense=False))
    assert not unaware.private
    plain = Candidate(truth.inputs, truth.labels, order=truth.trace.order)
    found = predict(unaware, plain)
    assert found.keys() == unaware.update.keys()
    assert not torch.equal(dense(found["head.weight"]), dense(unaware.update["head.weight"]))


def test_a_step_that_does_not_call_the_network_has_no_divergence() -> None:
    run = worlds.federation(FedGen.example(), SMALL)
    view, truth = run.observe(1)
    assert_same(predict(view, truth.candidate()), view.update)
    counts = torch.bincount(run.data[1].train.labels, minlength=3).double()
    sent = dense(view.shared["label_shares"]) - dense(view.update["label_shares"])
    assert torch.allclose(sent, counts / counts.sum())


def test_predictions_at_test_time_take_the_mean() -> None:
    client = Client(worlds.task(), STEP, SMALL)
    inputs = worlds.images(3).inputs
    with torch.no_grad():
        model = client.task.model
        features = model.body.bottleneck.encoder(model.body[:-1](inputs))[:, :6]
        assert torch.equal(model(inputs), model.head(model.body.bottleneck.decoder(features)))


def test_noise_of_another_batch_is_refused() -> None:
    run = worlds.federation(STEP, SMALL, rounds=0)
    batch, model = run.data[1].train, run.client.task.model
    params = run.download(1).shared
    draws = run.client.draw(batch, stream(0, "noise"))
    step = Step(run.client.task, params, {}, {}, draws, 0)
    grad = LossGradient(run.client, step, tuple(params), {}, model, None, func_derivative)
    with pytest.raises(ValueError, match=r"expected noise \(3, 6\), one row an image, got \(4, 6\)"):
        grad(params, batch.take(torch.arange(3)))
    whole = grad.of_weights(grad.weights(params), batch, autograd_derivative)
    single = private_gradient(grad, params, batch, Privatization(clip=1e9, noise_multiplier=0.0), None)
    assert_near(single, whole, 1e-12)  # there each image meets its own row


def test_names_stay_wherever_it_is_put() -> None:
    layers = OrderedDict(flatten=nn.Flatten(), first=nn.Linear(64, 5), act=nn.Sigmoid(), last=nn.Linear(5, 3))
    wrapped = SMALL.wrap_model(nn.Sequential(layers))
    assert [name for name, _ in wrapped.named_children()] == ["flatten", "first", "act", "bottleneck", "last"]
    before = set(worlds.task().parameters)
    client = Client(worlds.task(), STEP, SMALL)
    assert {name for name in client.task.parameters if "bottleneck" not in name} == before
    assert client.task.parameters["body.bottleneck.encoder.weight"].shape == (12, 16)
    assert client.task.parameters["body.bottleneck.decoder.weight"].shape == (16, 6)


def test_precode_adds_as_many_parameters_as_published() -> None:
    """K = 256 between 128 features and 10 classes: 128 x 512 + 512 and 256 x 128 + 128 more parameters."""
    task = network("hyperfl-grey", num_classes=10, seed=0)
    sizes = [sum(p.numel() for p in Client(task, STEP, d).task.parameters.values()) for d in (Precode(), Prune())]
    assert sizes[0] - sizes[1] == 128 * 512 + 512 + 256 * 128 + 128


class Odd(nn.Module):
    """A classifier that is in no nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.flatten(1))


def test_what_it_cannot_defend_is_said() -> None:
    with pytest.raises(ValueError, match=r"expected the last linear layer, 'last', in an nn\.Sequential, got Odd"):
        Client(Task(Odd(), (1, 8, 8), 3, head="last."), STEP, SMALL)
    with pytest.raises(ValueError, match="expected 4 outputs of the last linear layer, got 3"):
        Client(replace(worlds.task(), num_classes=4), STEP, SMALL)
    with pytest.raises(ValueError, match="at most 1 defense that changes the gradient"):
        Chain(parts=(SMALL, DPSGD()))
    for settings, words in (({"latent": 0}, "latent"), ({"beta": -1.0}, "beta")):
        with pytest.raises(ValueError, match=f"{words}: expected a"):
            Precode(**settings)


def test_an_attacker_who_knows_it_does_better() -> None:
    """Scheliga et al. (2022, "Combining variational modeling"): left out, the noisy gradients protect nothing."""
    task = network("lenet-zhu", num_classes=10, seed=0, input_shape=(1, 16, 16))
    images = worlds.images(2, shape=(1, 16, 16))
    images = replace(images, inputs=torch.nn.functional.avg_pool2d(images.inputs.float(), 5, 1, 2))
    run = Federation(Client(task, STEP, Precode(latent=64)), [ClientData(images, images)])
    found = {}
    for known in (True, False):
        seen = [
            run.observe(0, data=images.take(torch.tensor([i])), threat=ThreatModel(knows_defense=known)) for i in (0, 1)
        ]
        results = build({"name": "ig", "iterations": 100}).run([view for view, _ in seen], [0, 1])
        assert all(isinstance(result, Reconstruction) for result in results)
        found[known] = [score(result, truth)[0]["psnr"] for result, (_, truth) in zip(results, seen, strict=True)]
    assert all(knowing > 3 + not_knowing for knowing, not_knowing in zip(found[True], found[False], strict=True)), found
