"""FedAMP by itself: rounds by plain loops, what travels, and what it comes to at its ends."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from reference import personal_rounds as plain
from support import unequal, worlds
from support.compare import assert_near, assert_same
from support.unequal import read_back
from torch import Tensor

from fl.methods.bases.personal_models import last_model
from fl.methods.fedamp import FedAMP
from fl.methods.fedavg import FedAvg
from fl.methods.local import Local
from fl.simulation.protocol import Protocol
from fl.tensors import dense, squared_distance

SIZES = (3, 4, 5)
SAME = {**unequal.LOCAL, "weight_decay": 5e-4}
METHOD = replace(FedAMP.example(), sigma=0.5, lam=0.9)
federation = partial(unequal.federation, test=20)


def flat(model: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in model.values()])


def cloud(models: list[dict[str, Tensor]], i: int, method: FedAMP) -> dict[str, Tensor]:
    """u_i, from the columns of xi."""
    xi = [0.0] * len(models)
    for j, model in enumerate(models):
        if j != i:
            squared = float((flat(models[i]) - flat(model)).norm() ** 2)
            xi[j] = method.alpha * math.exp(-squared / method.sigma) / method.sigma
    if sum(xi) > 1:
        xi = [share / sum(xi) for share in xi]
    xi[i] = 1 - sum(xi)
    return {name: sum(share * m[name] for share, m in zip(xi, models, strict=True)) for name in models[0]}  # type: ignore[misc]


@pytest.mark.parametrize("settings", [{}, {"alpha": 2.0, "sigma": 1.0}], ids=["as it is", "others for more than 1"])
def test_rounds_equal_plain_loops(settings: dict[str, float]) -> None:
    method = replace(METHOD, max_norm=None, **settings)  # type: ignore[arg-type]
    run, net = federation(method), worlds.task().model
    models = [plain.weights_of(net) for _ in SIZES]
    for drawn in ([0, 1, 2], [0, 2], [1, 2]):
        sent = [cloud(models, i, method) for i in range(3)]
        for i in range(3):
            assert_near(run.download(i).shared, sent[i], 1e-10)
        for i, done in zip(drawn, run.run_round(drawn), strict=True):
            local = plain.loaded(net, sent[i])
            pulled = (method.lam / method.alpha, sent[i])
            common = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4}
            plain.sgd(local, lambda name: True, plain.fed(done.trace, 0), **common, pulled=pulled)  # type: ignore[arg-type]
            models[i] = plain.weights_of(local)
        for i in range(3):
            assert_near(last_model(run.server, i), models[i], 1e-10)
    near = [float((flat(models[0]) - flat(models[j])).norm() ** 2) for j in (1, 2)]
    shares = [method.attention(apart) for apart in near]
    assert 0.01 < shares[0] != pytest.approx(shares[1], rel=0.01)


def test_far_from_all_others_a_client_is_alone() -> None:
    method = FedAMP(**SAME, sigma=1e-9, lam=0.0)  # type: ignore[arg-type]
    runs = [federation(kind) for kind in (method, Local(**SAME))]  # type: ignore[arg-type]
    for _ in range(3):
        found = [[done.accuracy for done in run.run_round(evaluate=True)] for run in runs]
    assert found[0] == found[1]
    for i in range(3):
        assert_near(last_model(runs[0].server, i), runs[1].clients[i].private, 1e-12)


def test_where_distance_does_not_count_it_is_fedavg() -> None:
    task = worlds.task(batch_norm=True)
    method = FedAMP(**SAME, sigma=1e15, alpha=1e15 / 3, lam=0.0)  # type: ignore[arg-type]
    runs = [federation(kind, sizes=(4, 4, 4), task=task) for kind in (method, FedAvg(**SAME))]  # type: ignore[arg-type]
    for _ in range(2):
        for run in runs:
            run.run_round()
    ours, theirs = (run.download(1) for run in runs)
    assert_near(ours.shared, theirs.shared, 1e-10)
    floating = [n for n, v in theirs.buffers.items() if v.is_floating_point()]
    assert len(floating) > 0
    assert_near({n: ours.buffers[n] for n in floating}, {n: theirs.buffers[n] for n in floating}, 1e-10)


def test_what_travels_is_as_much_as_with_fedavg_and_the_server_sees_no_more() -> None:
    ours, theirs = (federation(kind) for kind in (METHOD, FedAvg(**SAME)))  # type: ignore[arg-type]
    records = [run.step(evaluate=False) for run in (ours, theirs)]
    assert records[0].numbers_down == records[1].numbers_down
    assert records[0].numbers_up == records[1].numbers_up
    view, truth = ours.observe(1)
    assert view.private == truth.private == view.received == {}
    assert_same(view.shared, ours.download(1).shared)
    before, after = last_model(ours.server, 1), ours.train(1).upload.update
    assert any(not torch.equal(dense(view.shared[n]), dense(before[n])) for n in after)


def test_clients_predict_by_what_they_ended_with() -> None:
    run = federation(replace(METHOD, lr=0.5, sigma=5.0))
    rounds = run.run_round(evaluate=True)
    own = [
        plain.loaded(worlds.task().model, {n: dense(v) for n, v in last_model(run.server, i).items()}) for i in range(3)
    ]
    tests = [one.test for one in run.data]
    expected = [plain.accuracy(model, test.inputs, test.labels) for model, test in zip(own, tests, strict=True)]
    assert run.accuracy() == [done.accuracy for done in rounds] == expected
    assert any(
        not torch.equal(dense(run.download(0).shared[n]), dense(v)) for n, v in last_model(run.server, 0).items()
    )


def test_a_client_that_never_takes_part_gets_the_mean() -> None:
    run = federation(METHOD, protocol=Protocol(held_out_clients=1))
    run.run_round()
    every = [last_model(run.server, i) for i in (0, 1)]
    expected = {n: (dense(every[0][n]) + dense(every[1][n])) / 2 for n in every[0]}
    assert_near(run.download(2).shared, expected, 1e-12)


def test_a_run_read_back_goes_on_as_it_would_have(tmp_path: Path) -> None:
    run, again = read_back(lambda: federation(METHOD), tmp_path, then=([1, 2],))
    for i in range(3):
        assert_same(last_model(run.server, i), last_model(again.server, i))


def test_steps_along_the_plain_gradient_and_settings_out_of_range() -> None:
    assert METHOD.follows_loss_gradient(1)
    assert not METHOD.follows_loss_gradient(2)
    assert replace(METHOD, lam=0.0).follows_loss_gradient(None)
    for key in ("alpha", "sigma"):
        with pytest.raises(ValueError, match=f"{key}: expected a number > 0, got 0"):
            FedAMP(**{key: 0.0})
    with pytest.raises(ValueError, match=r"lam: expected a (whole )?number >= 0( or null)?, got -1"):
        FedAMP(lam=-1.0)


def test_no_more_models_are_made_than_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = federation(METHOD, sizes=(2,) * 8), list[int]()
    model, measured = FedAMP.model, list[int]()
    monkeypatch.setattr(FedAMP, "model", lambda self, *a: (made.append(a[1]), model(self, *a))[1])
    monkeypatch.setattr("fl.methods.fedamp.squared_distance", lambda *a: (measured.append(1), squared_distance(*a))[1])
    run.client_fraction = 0.25
    record = run.step(evaluate=False)
    assert set(made) == {*record.clients, *run.sampled_clients(1)}
    assert len(made) == 3 * 2  # at the start, with the update, in the record for the round to come
    assert len(measured) == 2 * 8 * len(run.server.shared)
