"""pFedMe by itself: two rounds and the models clients predict by, in plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference import personal_rounds as plain
from support import worlds
from support.compare import assert_near, assert_same
from torch import nn

from defenses.secagg import SecAgg
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.pfedme import PFedMe
from fl.seeds import derive_seed
from fl.simulation.client_round import RoundKey, prepare, train
from fl.simulation.protocol import Protocol
from fl.simulation.scores import scores
from fl.types import Batch

PLAIN = replace(PFedMe.example(), momentum=0.0, weight_decay=0.0, max_norm=None)


def federation(method: PFedMe, protocol: Protocol | None = None) -> Federation:
    data = [ClientData(worlds.images(4, "train", i), worlds.images(40, "test", i)) for i in range(3)]
    return Federation(Client(worlds.task(), method), data, protocol=protocol or Protocol())


def moreau(w: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], method: PFedMe) -> nn.Module:
    """Theta of w: gradient descent on the loss of one batch with its proximal term."""
    theta = plain.loaded(w, {})
    pull = (method.lam, plain.weights_of(w))
    plain.sgd(theta, lambda name: True, [batch] * method.inner_steps, lr=method.inner_lr, pulled=pull)
    return theta


def test_two_rounds_equal_plain_loops() -> None:
    run, model = worlds.federation(PLAIN, rounds=0), worlds.task().model
    for _ in range(2):
        trained = []
        for done in run.run_round():
            local = plain.loaded(model, {})
            batches = plain.fed(done.trace, 0)
            assert len(batches) == 4
            for batch in batches:
                near = plain.weights_of(moreau(local, batch, PLAIN))
                moved = {n: w - 0.1 * 2.0 * (w - near[n]) for n, w in plain.weights_of(local).items()}
                local = plain.loaded(local, moved)
            trained.append(plain.weights_of(local))
        mean, before = plain.average(trained, [4, 4, 4]), plain.weights_of(model)
        model = plain.loaded(model, {name: 0.3 * before[name] + 0.7 * mean[name] for name in mean})
        assert_near(run.server.shared, plain.weights_of(model), 1e-10)


def test_momentum_and_decay_are_those_of_sgd_on_the_envelope() -> None:
    method = replace(PLAIN, momentum=0.5, weight_decay=5e-4)
    done = worlds.federation(method, rounds=0).train(0)
    local = plain.loaded(worlds.task().model, {})
    optimizer = torch.optim.SGD(local.parameters(), 0.1, 0.5, weight_decay=5e-4)
    for batch in plain.fed(done.trace, 0):
        near = plain.weights_of(moreau(local, batch, method))
        for name, value in local.named_parameters():
            value.grad = 2.0 * (value.detach() - near[name])
        optimizer.step()
    assert_near(done.result.trained(worlds.task().parameters), plain.weights_of(local), 1e-10)  # type: ignore[arg-type]


def test_clients_predict_by_theta() -> None:
    method = replace(PLAIN, batch_size=None, inner_lr=0.4, inner_steps=5)
    run = federation(method)
    rounds = run.run_round(evaluate=True)
    everyone = plain.loaded(worlds.task().model, dict(run.server.shared))  # type: ignore[arg-type]
    for i, done in enumerate(rounds):
        own, before = run.data[i], worlds.task().parameters
        local = plain.loaded(everyone, done.result.trained(before))  # type: ignore[arg-type]
        batch = own.train.inputs, own.train.labels
        thetas = [moreau(start, batch, method) for start in (everyone, local)]
        expected = [plain.accuracy(theta, own.test.inputs, own.test.labels) for theta in thetas]
        assert [run.score(i), done.accuracy] == expected
    plainly = [plain.accuracy(everyone, one.test.inputs, one.test.labels) for one in run.data]
    assert run.accuracy() != plainly
    assert [run.score(i, adapted=False) for i in range(3)] == plainly


def test_adapting_ends_at_theta_and_changes_nothing() -> None:
    run = federation(PLAIN)
    rule = Client(run.client.base, run.client.method.adaptation_method())  # type: ignore[arg-type]
    begin = prepare(
        rule, run.clients[0], run.download(0), run.data[0].train, key=RoundKey(seed=derive_seed(0, "adapting"))
    )
    (batch,) = plain.fed(begin.trace, 0)
    before = dict(run.server.shared)
    theta = plain.weights_of(moreau(worlds.task().model, batch, PLAIN))
    assert_near(train(begin).result.trained(begin.download.shared), theta, 1e-10)
    run.accuracy()
    assert_same(run.server.shared, before)


FAR = replace(PLAIN, lam=0.1, inner_lr=0.4, inner_steps=60)


def test_who_never_took_part_is_scored_by_what_is_sent() -> None:
    run, whole = federation(replace(FAR, batch_size=None), Protocol(held_out_clients=1)), worlds.images(60, "whole")
    run.data = [*run.data[:2], ClientData(run.data[0].train, whole)]
    first = run.data[0].train
    images = Batch(torch.cat([first.inputs, whole.inputs]), torch.cat([first.labels, whole.labels]))
    assert scores(run)["unseen"] == (plain.accuracy(worlds.task().model, images.inputs, images.labels),)
    assert scores(run)["unseen"][0] != run.score(2, images)


def test_every_client_is_scored_by_its_own_model_on_the_images_of_all() -> None:
    whole = worlds.images(60, "whole")
    run = federation(FAR, Protocol(held_out_clients=1, global_test=whole))
    found = scores(run)["global"]
    assert found == tuple(run.score(i, whole) for i in (0, 1))
    assert found[0] != found[1]


def test_its_server_looks_at_the_mean_alone() -> None:
    assert PLAIN.aggregates_mean_only
    assert_near(
        worlds.federation(replace(PLAIN, beta=1.0), SecAgg(group_size=3)).server.shared,
        worlds.federation(replace(PLAIN, beta=1.0)).server.shared,
        1e-12,
    )


def test_constants_are_the_authors_and_others_are_refused() -> None:
    (phase,) = PFedMe().phases(worlds.task(), 0)
    assert (phase.groups[0].lr, phase.steps, phase.batch_size) == (0.005, 20, 20)
    assert (PFedMe().lam, PFedMe().inner_steps, PFedMe().inner_lr, PFedMe().beta) == (15.0, 5, 0.09, 1.0)
    assert PFedMe(epochs=2).steps is None
    for key in ("lam", "inner_lr", "beta"):
        with pytest.raises(ValueError, match=rf"{key}: expected a number > 0, got 0"):
            PFedMe(**{key: 0.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"inner_steps: expected a (whole )?number >= 1( or null)?, got 0"):
        PFedMe(inner_steps=0)
