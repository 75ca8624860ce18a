"""FedRep by itself: two rounds by plain loops, who holds what, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reference import personal_rounds as plain
from support import worlds
from support.compare import assert_near, assert_same

from fl.methods.fedper import FedPer
from fl.methods.fedrep import FedRep
from fl.types import Scope


@pytest.mark.parametrize("method", [FedRep.example(), replace(FedRep.example(), head_lr=None, max_norm=None)])
def test_two_rounds_equal_head_epochs_then_body_epochs(method: FedRep) -> None:
    run = worlds.federation(method, rounds=0)
    model = worlds.task().model
    body = {n: v for n, v in plain.weights_of(model).items() if not n.startswith("head.")}
    heads = [{n: v for n, v in plain.weights_of(model).items() if n.startswith("head.")}] * 3
    common = {"momentum": 0.5, "weight_decay": 5e-4, "max_norm": method.max_norm}
    for _ in range(2):
        rounds, trained = run.run_round(), []
        for i, done in enumerate(rounds):
            local = plain.loaded(model, {**body, **heads[i]})
            head, rest = plain.fed(done.trace, 0), plain.fed(done.trace, 1)
            assert (len(head), len(rest)) == (2, 4)
            lr = 0.2 if method.head_lr else 0.1
            plain.sgd(local, lambda name: name.startswith("head."), head, lr=lr, **common)  # type: ignore[arg-type]
            plain.sgd(local, lambda name: not name.startswith("head."), rest, lr=0.1, **common)  # type: ignore[arg-type]
            after = plain.weights_of(local)
            heads[i] = {name: after[name] for name in heads[i]}
            trained.append({name: after[name] for name in body})
        body = plain.average(trained, [4, 4, 4])
        assert_near(run.server.shared, body, 1e-10)
        for state, own in zip(run.clients, heads, strict=True):
            assert_near(state.private, own, 1e-10)


def test_the_classifier_is_private_and_never_sent() -> None:
    method, task = FedRep(), worlds.task()
    private = {name for name in task.parameters if method.scope(name, task) is Scope.PRIVATE}
    assert private == {name for name in task.parameters if name.startswith("head.")}
    done = worlds.federation(FedRep.example(), rounds=0).train(0)
    assert set(done.upload.update) == set(task.parameters) - private


def test_without_head_epochs_it_is_fedper_with_its_classifier_at_rest() -> None:
    ours = worlds.federation(replace(FedRep.example(), head_epochs=0))
    theirs = worlds.federation(replace(FedPer.example(), head_lr=0.0))
    assert_same(ours.server.shared, theirs.server.shared)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="head_epochs: expected a whole number >= 0, got -1"):
        FedRep(head_epochs=-1)
    with pytest.raises(ValueError, match=r"head_lr: expected a number >= 0 or null, got -0\.1"):
        FedRep(head_lr=-0.1).phases(worlds.task(), 0)


def test_constants_are_the_authors() -> None:
    head, body = FedRep().phases(worlds.task(), 0)
    assert (head.epochs, body.epochs, head.batch_size, head.momentum) == (10, 1, 10, 0.5)
    assert [group.lr for group in (*head.groups, *body.groups)] == [0.01, 0.0, 0.01]
