"""HyperFedZero over the five networks of its tables at their real sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import hyperfedzero_round as reference
from support import worlds
from support.compare import assert_same
from torch.func import functional_call

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.hyperfedzero import HyperFedZero
from fl.models import build
from fl.predict import predict
from fl.types import Batch, Task

NETWORKS: dict[str, tuple[dict[str, Any], int]] = {
    "mlp": ({"widths": (200, 200)}, 199_210),
    "lenet-s": ({}, 21_840),
    "lenet": ({}, 431_080),
    "zenkenet": ({}, 1_250_858),
    "resnet20": ({}, 270_410),
}
EACH = pytest.mark.parametrize("name", list(NETWORKS))
METHOD = HyperFedZero(embedding=3, hidden=(6,), chunk=2000, chunk_embedding=2, batch_size=2, steps=2)


def task(name: str) -> Task:
    settings, numbers = NETWORKS[name]
    given = build(name, num_classes=10, seed=0, **settings).to(dtype=torch.float64)
    assert sum(p.numel() for p in given.parameters.values()) == numbers
    return given


def images(given: Task, n: int) -> Batch:
    return worlds.images(n, "real", shape=given.input_shape)


@EACH
def test_predictions_are_training_bit_for_bit(name: str) -> None:
    given = task(name)
    data = images(given, 4)
    view, truth = Federation(Client(given, METHOD), [ClientData(data, data)]).observe(0)
    right = truth.candidate()
    with torch.no_grad():
        assert_same(predict(view, right), view.update)
        wrong = predict(view, replace(right, inputs=1 - right.inputs))
    assert any(not torch.equal(wrong[n], value) for n, value in view.update.items())  # type: ignore[arg-type]


@EACH
def test_each_image_is_classified_by_the_network_generated_for_it(name: str) -> None:
    given = task(name)
    data = images(given, 3)
    run = Federation(Client(given, METHOD), [ClientData(data, data)])
    network = run.client.network(run.server.shared, run.client.task.buffers)
    network.model.eval()
    params: Any = run.server.shared
    shapes = {n: p.shape for n, p in given.model.named_parameters()}
    mean, std = given.normalization(data.inputs)
    template, expected = given.model.eval(), []
    with torch.no_grad():
        found = run.client.method.logits(network, data.inputs)
        for image, normalized in zip(data.inputs, (data.inputs - mean) / std, strict=True):
            own = reference.generated(params, reference.embedding(params, normalized, None), shapes)
            expected.append(functional_call(template, own, (image[None],))[0])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found[0], found[1])
