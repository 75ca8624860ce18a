"""HyperFedZero against a reference that loops over samples and chunks, and against published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import hyperfedzero_round as reference
from support import worlds
from support.compare import assert_near, assert_same
from torch import Tensor, nn

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfedzero import HyperFedZero
from fl.models import build
from fl.models.hyperfedzero import ZeroNet
from fl.models.hypernetworks.chunked import ChunkedHypernetwork, count_parameters, fitting_chunk
from fl.predict import predict
from fl.seeds import stream
from fl.types import Scope, Task

SMALL: dict[str, Any] = {"embedding": 3, "hidden": (6, 5), "chunk": 40, "chunk_embedding": 2, "batch_size": 3}


def mlp() -> Task:
    task = build("mlp", num_classes=3, seed=0, input_shape=(1, 8, 8), widths=(5, 4), mean=(0.3,), std=(0.5,))
    return task.to(dtype=torch.float64)


def federation(method: HyperFedZero, task: Task, seed: int = 0) -> Federation:
    sizes = (4, 7, 5)
    data = [ClientData(worlds.images(n, "train", i), worlds.images(4, "test", i)) for i, n in enumerate(sizes)]
    return Federation(Client(task, method), data, seed=seed)


def inside(client: Client) -> ZeroNet:
    model = client.task.model
    assert isinstance(model, ZeroNet)
    return model


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("network", ["mlp", "conv", "norm"])
def test_a_federation_round_equals_the_reference(network: str, optimizer: str) -> None:
    task = mlp() if network == "mlp" else worlds.task(batch_norm=network == "norm")
    kind = "mlp" if network == "conv" else "conv"
    method = HyperFedZero(**SMALL, lr=0.01, steps=3, extractor=kind, optimizer=optimizer, alpha=0.7, beta=1.3)  # type: ignore[arg-type]
    run = federation(method, task)
    start = {name: value.clone() for name, value in run.server.shared.items()}
    rounds = run.run_round()

    mean, std = task.normalization(torch.zeros((), dtype=torch.float64))
    shapes = {name: p.shape for name, p in task.model.named_parameters()}
    classifier = reference.mlp if network == "mlp" else reference.tiny

    def loss(params: reference.Params, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return reference.objective(params, classifier, shapes, batch, 0.7, 1.3)

    def steps(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, 0.01) if optimizer == "adam" else torch.optim.SGD(params, 0.01)

    models = []
    for done in rounds:
        trace = done.trace
        fed = [
            ((trace.inputs[i] - mean) / std, trace.labels[i], trace.draws[0][s]["z"])
            for s, (i,) in enumerate(trace.order[0])
        ]
        models.append(reference.client_round(start, loss, fed, steps))
    assert_near(run.server.shared, reference.averaged(models, [4, 7, 5]), 1e-10)
    moved = [name for name, value in start.items() if torch.equal(run.server.shared[name], value)]  # type: ignore[arg-type]
    assert not moved


def test_predictions_are_those_of_the_reference_without_noise() -> None:
    task = mlp()
    run = federation(HyperFedZero(**SMALL), task)
    images = worlds.images(6, "unseen").inputs
    network = run.client.network(run.server.shared, {**run.client.task.buffers})
    mean, std = task.normalization(images)
    params: Any = run.server.shared
    shapes = {name: p.shape for name, p in task.model.named_parameters()}
    normalized = list((images - mean) / std)
    made = [reference.generated(params, reference.embedding(params, x, None), shapes) for x in normalized]
    expected = torch.stack(reference.mlp(made, normalized))
    with torch.no_grad():
        torch.testing.assert_close(run.client.method.logits(network, images), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("hidden", "chunk", "change"),
    [
        ((100, 100), 576, -69.13),
        ((500, 500), 576, 102.04),
        ((300, 300), 144, -27.01),
        ((300, 300), 288, -22.79),
        ((300, 300), 2304, 182.09),
    ],
)
def test_the_published_counts_of_table_3(hidden: tuple[int, ...], chunk: int, change: float) -> None:
    """On a ResNet for Tiny-ImageNet; where every chunk has 32 numbers (we: 16), and f and noisy are left out.

    Two of the table's seven rows differ from this: 2.30 (2.31 here) and 58.07, which leaves the chunks' numbers out.
    """
    task = build("resnet20", num_classes=200, input_shape=(3, 64, 64))
    plain = sum(p.numel() for p in task.parameters.values())
    assert plain == 282_760
    hypernet = inside(Client(task, HyperFedZero(hidden=hidden, chunk=chunk))).hypernet
    ours = sum(p.numel() for p in hypernet.parameters())
    assert hypernet.total == plain
    assert round(100 * ((ours + 16 * len(hypernet.chunks)) / plain - 1), 2) == change


@pytest.mark.parametrize(
    ("name", "settings", "numbers"),
    [
        ("mlp", {"widths": (200, 200)}, 199_210),
        ("lenet", {}, 431_080),
        ("zenkenet", {}, 1_250_858),
        ("resnet20", {}, 270_410),
    ],
)
def test_chunks_are_chosen_so_that_nothing_more_is_sent(name: str, settings: dict[str, Any], numbers: int) -> None:
    task = build(name, num_classes=10, **settings)
    assert sum(p.numel() for p in task.parameters.values()) == numbers
    client = Client(task, HyperFedZero())
    sent = client.task.parameters
    assert abs(sum(p.numel() for p in sent.values()) / numbers - 1) < 5e-3
    assert {client.method.scope(n, client.task) for n in [*sent, *client.task.buffers]} == {Scope.SHARED}


def test_a_chosen_chunk_is_the_best_there_is() -> None:
    shape = {"inputs": 5, "total": 900, "embedding": 7, "hidden": (9, 11)}
    counts = {c: sum(p.numel() for p in ChunkedHypernetwork(chunk=c, **shape).parameters()) for c in range(1, 901)}
    assert all(count_parameters(chunk=chunk, **shape) == count for chunk, count in counts.items())
    for budget in (900, 1500, 4000):
        found = fitting_chunk(budget, **shape)
        assert abs(counts[found] - budget) == min(abs(counts[c] - budget) for c in counts if c >= found)
        assert abs(counts[found] - budget) <= min(abs(count - budget) for count in counts.values()) + 7


def test_every_image_gets_a_classifier_of_its_own() -> None:
    client = Client(worlds.task(), HyperFedZero(**{**SMALL, "hidden": (30, 30)}))
    net = inside(client)
    images = worlds.images(2).inputs
    weights = net.classifier.weights(net.hypernet(net.embedder(images).exp()))
    assert {name: value.shape[1:] for name, value in weights.items()} == {
        name: p.shape for name, p in worlds.task().model.named_parameters()
    }
    assert all(not torch.allclose(value[0], value[1], rtol=1e-6) for value in weights.values())


def test_noise_is_recorded_and_off_at_test_time() -> None:
    client = Client(worlds.task(), HyperFedZero(**SMALL, lr=0.1, steps=2))
    run = Federation(client, [ClientData(worlds.images(4), worlds.images(4, "test"))])
    view, truth = run.observe(0)
    drawn = [step["z"] for step in truth.trace.draws[0]]
    assert all(z.shape == (len(i), 3) for z, (i,) in zip(drawn, truth.trace.order[0], strict=True))
    assert all(bool(z.any()) for z in drawn)
    assert_same(predict(view, truth.candidate()), view.update)
    unknown = predict(view, replace(truth.candidate(), draws=None))  # the guess z = 0: noisy gets no gradient
    assert not any(bool(v.any()) for name, v in unknown.items() if name.startswith("embedder.noisy."))  # type: ignore[union-attr]
    assert all(bool(v.any()) for name, v in view.update.items() if name.startswith("embedder.noisy."))  # type: ignore[union-attr]
    network = client.network(view.shared, client.task.buffers)
    first, again = (client.method.logits(network, truth.inputs) for _ in range(2))
    assert torch.equal(first, again)
    z = torch.zeros(4, 3, dtype=torch.float64)
    torch.testing.assert_close(first, network(truth.inputs, z)[0])
    assert not torch.allclose(first, network(truth.inputs, z + 1)[0])


def test_the_penalties_spread_the_use_and_sharpen_each_embedding() -> None:
    images = worlds.images(12)

    def trained(alpha: float, beta: float) -> tuple[float, float]:
        method = HyperFedZero(**{**SMALL, "batch_size": None}, lr=0.02, steps=25, alpha=alpha, beta=beta)
        run = Federation(Client(worlds.task(), method), [ClientData(images, images)])
        run.run_round()
        net = run.client.network(run.server.shared, run.client.task.buffers)
        log_e = net(images.inputs, torch.zeros(12, 3, dtype=torch.float64))[1]
        return float(log_e.exp().sum(0).var()), float(-(log_e.exp() * log_e).sum(1).mean())

    plain, even, sharp = trained(0, 0), trained(5, 0), trained(0, 5)
    assert even[0] < 0.1 * plain[0]
    assert sharp[1] < 0.5 * plain[1]


def test_the_input_can_be_conditioned_instead() -> None:
    """Opt. 1: one classifier of (x, e) for all, so there is no hypernetwork and the same e shifts all images alike."""
    task = mlp()
    client = Client(task, HyperFedZero(**SMALL, condition="input"))
    names = set(client.task.parameters)
    assert not any(name.startswith("hypernet.") for name in names)
    assert {"classifier.body.fc1.condition", "classifier.body.fc1.inner.weight", "classifier.head.bias"} <= names
    params = client.method.initial_parameters(client.task, stream(3, "init"))
    torch.testing.assert_close(params["classifier.head.weight"], task.parameters["head.weight"])
    images = worlds.images(5).inputs
    network = client.network(params, client.task.buffers)
    z = torch.ones(5, 3, dtype=torch.float64)
    logits, log_e = network(images, z)
    mean, std = task.normalization(images)
    joined = torch.cat([((images - mean) / std).flatten(1), log_e.exp()], 1)
    p: Any = {name.removeprefix("classifier."): value for name, value in params.items()}
    first = torch.cat([p["body.fc1.inner.weight"], p["body.fc1.condition"]], 1)
    x = torch.relu(joined @ first.mT + p["body.fc1.inner.bias"])
    x = torch.relu(x @ p["body.fc2.weight"].mT + p["body.fc2.bias"])
    torch.testing.assert_close(logits, x @ p["head.weight"].mT + p["head.bias"])


@pytest.mark.parametrize(("condition", "apart"), [("parameters", True), ("input", False)])
def test_only_conditioned_parameters_make_another_classifier(condition: Any, apart: bool) -> None:
    """How a linear classifier weighs the pixels: under Opt. 2 that depends on e, under Opt. 1 e only shifts logits."""
    task = build("linear", num_classes=3, seed=0).to(dtype=torch.float64)
    net = Client(task, HyperFedZero(**{**SMALL, "hidden": (30,)}, condition=condition)).task.model
    e = torch.eye(3, dtype=torch.float64)

    def logits(images: Tensor) -> Tensor:
        if isinstance(net, ZeroNet):
            return net.classifier(images, net.hypernet(e))
        net.classifier.head.given = {"e": e}
        return net.classifier(images)

    one = worlds.images(1).inputs.expand(3, -1, -1, -1)
    gains = logits(2 * one) - logits(one)
    assert (gains[0] - gains[1]).abs().min() > 1e-3 if apart else torch.allclose(gains[0], gains[1], rtol=1e-12)
    assert (logits(one)[0] - logits(one)[1]).abs().min() > 1e-3


def test_another_seed_starts_elsewhere_and_the_same_does_not() -> None:
    starts = [federation(HyperFedZero(**SMALL), mlp(), seed).server.shared for seed in (0, 0, 1)]
    assert_same(starts[0], starts[1])
    assert not torch.equal(starts[0]["hypernet.chunks"], starts[2]["hypernet.chunks"])  # type: ignore[arg-type]


def test_dropout_is_drawn_by_the_method_and_replayed() -> None:
    task = build("zenkenet", num_classes=3, input_shape=(1, 12, 12), dropout=0.25)
    data = worlds.images(3, shape=(1, 12, 12))
    small: dict[str, Any] = {**SMALL, "chunk": 4000, "hidden": (4,), "batch_size": None, "steps": 1, "optimizer": "sgd"}
    method = HyperFedZero(**small)
    client = Client(task, method)
    data = worlds.Batch(data.inputs.float(), data.labels)
    view, truth = Federation(client, [ClientData(data, data)]).observe(0)
    drawn = truth.trace.draws[0][0]
    masks = {name: value for name, value in drawn.items() if name.endswith(".mask")}
    assert {value.shape for value in masks.values()} == {(3, 32), (3, 64), (3, 512)}
    assert all(set(value.unique().tolist()) <= {0.0, 2.0, float(torch.tensor(1 / 0.75))} for value in masks.values())
    assert_same(predict(view, truth.candidate()), view.update)
    whole = ({**drawn, **{name: torch.ones_like(value) for name, value in masks.items()}},)
    other = predict(view, replace(truth.candidate(), draws=(whole,)))
    assert any(not torch.equal(other[name], value) for name, value in view.update.items())  # type: ignore[arg-type]
    plain = Federation(Client(task, FedAvg(steps=1)), [ClientData(data, data)])
    with pytest.raises(ValueError, match="draws masks"):
        plain.run_round()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding": 1}, "embedding: expected a whole number >= 2, got 1"),
        ({"alpha": -1.0}, r"alpha: expected a number >= 0, got -1\.0"),
        ({"hidden": ()}, "hidden"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Client(worlds.task(), HyperFedZero(**settings))
