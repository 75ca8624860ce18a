"""pFedHN against a plain module with torch.optim on both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.pfedhn_round import Hyper, Local, step, train
from support import worlds
from support.compare import assert_near, assert_same

from fl.federation import Federation
from fl.methods.pfedhn import PFedHN
from fl.models import build
from fl.parametrization import Parametrization
from fl.simulation import checkpoint
from fl.simulation.client_round import Round
from fl.simulation.protocol import Protocol
from fl.tensors import Tensors, dense
from fl.types import Scope

SMALL = {"embedding": 3, "hidden": (6, 5), "steps": 4, "batch_size": 3, "lr": 0.1, "server_lr": 0.2}


def fed(**settings: Any) -> tuple[PFedHN, Federation]:
    method = PFedHN(**{**SMALL, **settings})
    return method, worlds.federation(method, rounds=0)


def batches(done: Round) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(done.trace.inputs[index], done.trace.labels[index]) for (index,) in done.trace.order[0]]


def reference(run: Federation, method: PFedHN) -> tuple[Hyper, torch.optim.Optimizer]:
    task = run.client.task
    shapes = {n: v.shape for n, v in task.parameters.items() if method.scope(n, task) is Scope.SHARED}
    hyper = Hyper({n: dense(v) for n, v in run.server.own["hypernetwork"].items()}, shapes)
    return hyper, torch.optim.SGD(hyper.parameters(), 0.2, 0.9, weight_decay=1e-3)


@pytest.mark.parametrize("head", ["shared", "private"])
@pytest.mark.parametrize("clip", [50.0, 0.05])
def test_one_client_a_round_is_the_authors_loop(head: Any, clip: float) -> None:
    method, run = fed(head=head, max_norm=clip, server_max_norm=clip)
    hyper, solver = reference(run, method)
    heads: list[Tensors] = [run.private_init] * 3
    assert set(run.private_init) == ({"head.weight", "head.bias"} if head == "private" else set())
    for client in (2, 0, 2, 1):
        sent = {name: value.detach() for name, value in hyper(client).items()}
        assert_near(run.download(client).shared, sent, 1e-12)
        (done,) = run.run_round([client])
        constants = Local(method.lr, method.momentum, method.weight_decay, clip)
        end = train(run.client.task.model, sent, heads[client], batches(done), constants)  # type: ignore[arg-type]
        heads[client] = {name: end[name] for name in run.private_init}
        step(hyper, solver, [(client, {name: sent[name] - end[name] for name in sent})], clip)
        assert_near(run.server.own["hypernetwork"], hyper.named(), 1e-10)  # type: ignore[arg-type]
        assert_near(run.clients[client].private, heads[client], 1e-10)


def test_several_clients_a_round_make_one_step_on_their_mean() -> None:
    method, run = fed()
    hyper, solver = reference(run, method)
    for numbers in ([0, 2], [0, 1, 2]):
        rounds = run.run_round(numbers)
        asked = [(d.upload.client, {n: dense(v) for n, v in d.upload.update.items()}) for d in rounds]
        step(hyper, solver, asked, 50.0)
        assert_near(run.server.own["hypernetwork"], hyper.named(), 1e-10)  # type: ignore[arg-type]


def test_a_step_brings_what_is_generated_nearer_to_what_the_client_trained() -> None:
    _, run = fed(server_lr=1e-3, server_momentum=0.0, server_decay=0.0)
    before = run.download(1).shared
    (done,) = run.run_round([1])
    after, target = run.download(1).shared, done.result.trained(before)

    def away(shared: Tensors) -> float:
        return float(sum((dense(v) - dense(target[n])).square().sum() for n, v in shared.items()))

    assert away(after) < away(before)


def test_one_who_never_takes_part_gets_what_the_mean_embedding_generates() -> None:
    method, run = fed()
    outside = Federation(run.client, run.data, protocol=Protocol(held_out_clients=1))
    outside.run_round()
    own = outside.server.own["hypernetwork"]
    assert dense(own["embeddings"]).shape == (2, 3)
    expected = method.generator(run.client.task, 2).generate(own, dense(own["embeddings"]).mean(0))
    assert_same(outside.download(2).shared, expected)  # type: ignore[arg-type]
    assert len(outside.record().further["unseen"]) == 1


@pytest.mark.parametrize(("head", "numbers"), [("shared", 121_182), ("private", 120_332)])
def test_the_authors_settings_and_what_travels(head: Any, numbers: int) -> None:
    task = build("simple-cnn", num_classes=10, channels=(16, 32))
    method = PFedHN(head=head)
    (phase,) = method.phases(task, 0)
    assert (phase.steps, phase.batch_size, phase.momentum) == (50, 64, 0.9)
    assert [(g.lr, g.weight_decay, g.max_norm) for g in phase.groups][-1] == (5e-3, 5e-5, 50.0)
    assert [g.max_norm for g in phase.groups[:-1]] == ([None] if head == "private" else [])
    (group,) = method._server_phase().groups
    assert (group.lr, group.weight_decay) == (0.05 if head == "private" else 0.01, 1e-3)
    hyper = method.generator(task, 50)
    assert (hyper.embedding, hyper.hidden) == (13, (100,) * 4)
    assert sum(shape.numel() for shape in hyper.shapes.values()) == numbers


def test_the_record_counts_the_network_and_not_the_hypernetwork() -> None:
    _, run = fed(head="private")
    record = run.step()
    shared = sum(v.numel() for n, v in run.client.task.parameters.items() if not n.startswith("head."))
    assert record.numbers_up == record.numbers_down == shared
    assert run.server.shared == {}


def test_batch_norm_is_averaged_as_by_fedavg() -> None:
    run = worlds.federation(PFedHN(**SMALL), task_=worlds.task(batch_norm=True), rounds=0)  # type: ignore[arg-type]
    before = run.server.buffers["body.norm1.running_mean"]
    rounds = run.run_round()
    change = sum(d.upload.buffers["body.norm1.running_mean"] for d in rounds) / 3
    torch.testing.assert_close(run.server.buffers["body.norm1.running_mean"], before - change, rtol=1e-12, atol=0)


def test_a_federation_read_back_goes_on_as_the_whole_one(tmp_path: Path) -> None:
    _, whole = fed()
    whole.run_round()
    checkpoint.save(tmp_path / "state.npz", whole)
    whole.run_round()
    _, again = fed()
    checkpoint.load(tmp_path / "state.npz", again)
    again.run_round()
    assert_same(again.server.own["hypernetwork"], whole.server.own["hypernetwork"])
    assert_same(again.server.own["optimizer"], whole.server.own["optimizer"])


def test_epochs_replace_the_steps() -> None:
    task = worlds.task()
    assert PFedHN(epochs=3).phases(task, 0)[0].epochs == 3
    assert PFedHN(steps=7).phases(task, 0)[0].steps == 7
    assert replace(PFedHN(), steps=1, epochs=None).phases(task, 0)[0].steps == 1
    assert PFedHN().fine_tuning_phases(task, 2)[0].epochs == 2


def test_another_generator_on_the_clients_is_refused() -> None:
    class Other(Parametrization):
        pass

    with pytest.raises(ValueError, match="'direct'"):
        PFedHN(parametrization=Other())
