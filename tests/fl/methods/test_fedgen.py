"""FedGen against its rounds written out, where it comes to FedAvg, and what clients give away beside."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.fedgen_round import Generator, learn, local
from support import unequal, worlds
from support.compare import assert_near, assert_same
from support.unequal import read_back
from torch import nn

from fl.client import Client
from fl.engines import choose
from fl.federation import Federation
from fl.method import Step
from fl.methods.fedavg import FedAvg
from fl.methods.fedgen import FedGen
from fl.models import build
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch, Task

LOCAL = {**unequal.LOCAL, "weight_decay": 0.01}
GENERATOR: dict[str, Any] = {"generated": 3, "noise": 2, "hidden": 4, "server_steps": 3, "server_batch": 5}
SHARES = "label_shares"
fed = partial(unequal.federation, sizes=(2, 4, 6))


def small(**settings: Any) -> FedGen:
    return FedGen(**{**LOCAL, **GENERATOR, "server_lr": 0.02, "diversity": 2.0, "alpha": 1.5, "beta": 0.5, **settings})


def network(run: Federation) -> dict[str, torch.Tensor]:
    return {name: dense(value).clone() for name, value in run.server.shared.items() if name != SHARES}


@pytest.mark.parametrize("task", [None, worlds.task(batch_norm=True)], ids=["plain", "batch-norm"])
def test_rounds_equal_those_written_out(task: Task | None) -> None:
    method, template = small(), (task or worlds.task()).model
    run = fed(method, task=task)
    generator = Generator(2, 3, 4, 16)
    start = {name: dense(value) for name, value in run.server.own["generator"].items()}
    generator.fill(start)
    solver = torch.optim.Adam(generator.parameters(), 0.02, weight_decay=0.01)
    seed = int(dense(run.server.own["keys"]["seed"]))
    shared: dict[str, torch.Tensor] = {**network(run), **run.server.buffers}
    for round, clients in enumerate(([0, 1, 2], [0, 2], [1, 2])):
        rounds, models, labels = run.run_round(clients), [], []
        for client, done in zip(clients, rounds, strict=True):
            model = copy.deepcopy(template).train()
            model.load_state_dict({name: value.clone() for name, value in shared.items()})
            trace = done.trace
            order = zip(trace.order[1], trace.draws[1], strict=True)
            steps = [(trace.inputs[index], trace.labels[index], draws) for (index,), draws in order]
            sgd = torch.optim.SGD(model.parameters(), 0.1, 0.5, weight_decay=0.01)
            fade = 0.98**round
            local(model, generator if round else None, steps, sgd, 1.5 * fade, 0.5 * fade, 1.0)
            models.append(model)
            labels.append(run.data[client].train.labels)
        weights = [len(own) / sum(map(len, labels)) for own in labels]
        mixed = [{n: w * v for n, v in m.state_dict().items()} for m, w in zip(models, weights, strict=True)]
        shared = {n: sum(part[n] for part in mixed) if v.is_floating_point() else v for n, v in shared.items()}  # type: ignore[misc]
        learn(generator, schedule(solver, round), models, labels, drawn(seed, round, labels), 2.0)
        assert_near({**network(run), **run.server.buffers}, shared, 1e-10)
        held = {name: dense(value) for name, value in run.server.own["generator"].items()}
        assert_near(held, generator.named(), 1e-8)  # batch norm leaves of the first bias rounding alone
    assert not torch.allclose(start["features.weight"], generator.named()["features.weight"], rtol=1e-2)


def schedule(solver: torch.optim.Optimizer, round: int) -> torch.optim.Optimizer:
    for group in solver.param_groups:
        group["lr"] = 0.02 * 0.98**round
    return solver


def drawn(seed: int, round: int, labels: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the server draws: labels that some client of the round has, and noise."""
    draw = stream(seed, "generator", round)
    present = torch.bincount(torch.cat(labels), minlength=3).clamp(max=1).float()
    found = []
    for _ in range(3):
        y = torch.multinomial(present, 5, replacement=True, generator=draw)
        found.append((y, torch.randn(5, 2, generator=draw).double()))
    return found


@pytest.mark.parametrize(("settings", "rounds"), [({"alpha": 0.0, "beta": 0.0}, 2), ({}, 1)], ids=["off", "first"])
def test_without_generated_features_it_is_fedavg(settings: dict[str, Any], rounds: int) -> None:
    ours, theirs = fed(small(**settings, sampler="sequential")), fed(FedAvg(**LOCAL, sampler="sequential"))
    for _ in range(rounds):
        for run in (ours, theirs):
            run.run_round([0, 2])
    assert_near(network(ours), network(theirs), 1e-13)


def test_the_server_is_told_how_many_images_of_each_label_a_client_has() -> None:
    run = fed(small())
    for _ in range(2):
        for number, own in enumerate(run.data):
            view, _ = run.observe(number)
            counts = torch.bincount(own.train.labels, minlength=3).double()
            sent = dense(view.shared[SHARES]) - dense(view.update[SHARES])
            torch.testing.assert_close(sent * len(own.train), counts, rtol=1e-12, atol=1e-12)
        run.run_round()
        every = torch.bincount(torch.cat([own.train.labels for own in run.data]), minlength=3)
        torch.testing.assert_close(dense(run.server.shared[SHARES]), every / every.sum(), check_dtype=False)


def test_clients_of_fedgen_send_a_classifier_and_receive_the_generator_too() -> None:
    run = fed(small())
    plain = sum(value.numel() for value in worlds.task().parameters.values()) + 3
    generator = 4 * (2 + 3) + 4 + 4 * 4 + 16 * 4 + 16
    for expected in (plain + generator, plain + generator):  # what would be received now: after the first round
        record = run.step(evaluate=False)
        assert record.numbers_up == plain
        assert record.numbers_down == expected
    assert not fed(small()).download(0).received


def test_soft_labels_are_those_of_their_class() -> None:
    method = small()
    run = fed(method)
    run.run_round()
    task, down = run.client.task, run.download(1)
    labels, inputs = worlds.images(4, "soft").labels, worlds.images(4, "soft").inputs
    soft = nn.functional.one_hot(labels, 3).double()
    draws = method.draw(Batch(inputs, labels), task, stream(0, "draws"))
    step = Step(task, down.shared, down.received, {}, draws, 1)
    net = run.client.network(down.shared, task.buffers)
    first, second = (float(method.loss(net, Batch(inputs, y), step).detach()) for y in (labels, soft))
    assert first == pytest.approx(second, rel=1e-12)


def test_steps_are_the_codes_unless_told_otherwise() -> None:
    task = worlds.task()
    for settings, found in (({}, (20, None)), ({"epochs": 3}, (None, 3)), ({"epochs": 3, "steps": 1}, (1, None))):
        counting, main = FedGen(**settings).phases(task, 0)  # type: ignore[arg-type]
        assert (main.steps, main.epochs) == found
        assert (counting.steps, counting.batch_size) == (1, None)


def test_stacked_clients_train_alike() -> None:
    method = small(steps=3)
    runs = [fed(method), fed(method)]
    runs[1]._engine = choose("vmap", runs[1].client)
    assert runs[1]._engine.name == "vmap"
    for run in runs:
        for _ in range(2):
            run.run_round()
    assert_near(network(runs[1]), network(runs[0]), 1e-12)


def test_its_loss_is_plain_where_nothing_is_generated() -> None:
    task = worlds.task()
    assert small().uses_plain_cross_entropy(task, 0)
    assert not small().uses_plain_cross_entropy(task, 1)
    assert small(alpha=0.0, beta=0.0).uses_plain_cross_entropy(task, 1)


def test_without_labels_clients_count_alike() -> None:
    run = fed(small())
    rounds = run.run_round()
    noisy = [replace(done.upload, update={**done.upload.update, SHARES: torch.ones(3).double()}) for done in rounds]
    run = fed(small())
    after = run.client.method.aggregate(run.server, noisy, run.client.task)
    assert all(bool(dense(value).isfinite().all()) for value in after.own["generator"].values())


def test_a_federation_read_back_goes_on_as_the_whole_one(tmp_path: Path) -> None:
    whole, again = read_back(lambda: fed(small()), tmp_path, [0, 1], ([1, 2],))
    assert_same(network(again), network(whole))  # type: ignore[arg-type]
    for name, payload in whole.server.own.items():
        assert_same(again.server.own[name], payload)


def test_a_network_without_a_linear_classifier_is_refused() -> None:
    task = replace(build("tiny", num_classes=3, seed=0), head="body.conv1.")
    with pytest.raises(ValueError, match=r"expected a network with a linear layer 'body.conv1.' as its classifier"):
        Client(task, small())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1.0}, "alpha: expected a number >= 0, got -1"),
        ({"server_batch": 1}, "server_batch: expected a whole number >= 2, got 1"),
        ({"noise": 0}, "noise: expected a whole number >= 1, got 0"),
        ({"parametrization": Hypernetwork.example()}, "'direct'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**settings)
