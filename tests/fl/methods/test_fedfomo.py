"""FedFomo by itself: rounds by plain loops, who is drawn, what is held out, what travels, and what others learn."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import personal_rounds as plain
from support import unequal, worlds
from support.compare import assert_near, assert_same
from support.probes import DPSGD
from support.unequal import read_back
from torch import Tensor, nn

from fl.federation import Federation
from fl.local.sampling import SubsetPhase
from fl.method import ServerState
from fl.methods.bases.personal_models import last_model
from fl.methods.fedavg import FedAvg
from fl.methods.fedfomo import FedFomo
from fl.methods.local import Local
from fl.models.hypernetworks.filter_hypernetwork import Filters
from fl.simulation.protocol import Protocol
from fl.simulation.scores import scores
from fl.tensors import Tensors, dense
from fl.types import Batch

SIZES = (4, 5, 6)
METHOD = replace(FedFomo.example(), max_norm=None, batch_size=2)
federation = partial(unequal.federation, sizes=SIZES, test=20, engine="loop")


def before_of(run: Federation, i: int) -> Tensors:
    """What the server says that client `i` trained from last."""
    return run.server.own.get(f"before.{i}", run.server.shared)


def loss(net: nn.Module, model: dict[str, Tensor], images: Batch) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(plain.loaded(net, model)(images.inputs), images.labels))


def mixture(
    net: nn.Module, before: dict[str, Tensor], models: list[dict[str, Tensor]], images: Batch
) -> tuple[list[float], dict[str, Tensor]]:
    """The weights of `models` and what a client makes of them."""
    found = []
    for model in models:
        apart = sum(float((model[n] - before[n]).square().sum()) for n in before) ** 0.5
        found.append((loss(net, before, images) - loss(net, model, images)) / apart if apart else 0.0)
    good = [max(w, 0.0) for w in found]
    mixed = dict(before)
    for w, model in zip(good, models, strict=True):
        if w:
            mixed = {n: v + w / sum(good) * (model[n] - before[n]) for n, v in mixed.items()}
    return found, mixed


def test_rounds_equal_plain_loops() -> None:
    run, net = federation(METHOD), worlds.task().model
    models, before = [plain.weights_of(net) for _ in SIZES], [plain.weights_of(net) for _ in SIZES]
    matrix, last, tried = torch.zeros(3, 3, dtype=torch.float64), list[int](), 0
    for round, drawn in enumerate(([0, 1, 2], [0, 2], [0, 1, 2], [1, 2])):
        chosen = {i: METHOD.sampled_peers(run.server, i) for i in drawn}
        assert all(set(chosen[i]) == set(last) - {i} for i in drawn)
        trained = list(models)
        for i, done in zip(drawn, run.run_round(drawn), strict=True):
            start = models[i]
            if round:
                held = run.data[i].train.take(torch.arange(1, SIZES[i], 2))
                found, start = mixture(net, before[i], [models[j] for j in (i, *chosen[i])], held)
                for j, w in zip((i, *chosen[i]), found, strict=True):
                    matrix[i, j] += w
                tried += sum(w > 0 for w in found)
                sent = dense(done.upload.extra["weights"]["models"])
                torch.testing.assert_close(sent, torch.tensor(found, dtype=torch.float64), rtol=1e-9, atol=1e-12)
            before[i] = start
            local = plain.loaded(net, start)
            batches = plain.fed(done.trace, len(done.trace.order) - 1)
            assert len(batches) == 2 * -(-((SIZES[i] + 1) // 2) // 2)
            plain.sgd(local, lambda name: True, batches, lr=0.1, momentum=0.5, weight_decay=5e-4)
            trained[i] = plain.weights_of(local)
        models, last = trained, drawn
        for i in range(3):
            assert_near(last_model(run.server, i), models[i], 1e-10)
            assert_near(before_of(run, i), before[i], 1e-10)
        torch.testing.assert_close(dense(run.server.own["affinity"]["matrix"]), matrix, rtol=1e-9, atol=1e-12)
    assert tried > 4
    assert float(matrix[0, 2]) != 0


def test_without_downloads_clients_train_alone_or_stand_still() -> None:
    method = replace(METHOD, downloads=0)
    run = federation(method)
    run.run_round()
    before = [last_model(run.server, i) for i in range(3)]
    alone = federation(Local(lr=0.1))
    assert set(run.download(0).received) == {"before"}
    rounds = run.run_round()
    for i, done in enumerate(rounds):
        (own,) = dense(done.upload.extra["weights"]["models"]).tolist()
        start = before[i] if own > 0 else alone.client.task.parameters
        assert_near(before_of(run, i), {n: start[n] for n in run.server.shared}, 1e-12)


def test_the_first_round_is_local_training_on_what_is_not_held_out() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "epochs": 2, "batch_size": None}
    ours = federation(FedFomo(**settings, weight_decay=0.0, every=2))
    theirs = federation(FedAvg(**settings))
    theirs.data = [replace(d, train=d.train.take(torch.arange(0, len(d.train), 2))) for d in theirs.data]
    first, second = (run.run_round() for run in (ours, theirs))
    for one, other in zip(first, second, strict=True):
        assert_near(one.upload.update, other.upload.update, 1e-12)
        assert not one.upload.extra


def test_what_is_held_out() -> None:
    settings: dict[str, Any] = {"groups": (), "epochs": 1, "every": 5}
    held, rest = (SubsetPhase(**settings, held_out=h) for h in (True, False))
    assert held.subset(11).tolist() == [4, 9]
    assert rest.subset(11).tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10]
    assert held.subset(4).tolist() == rest.subset(4).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="expected every >= 2, got 1"):
        SubsetPhase(**{**settings, "every": 1}, held_out=True)


def test_the_best_are_drawn_but_for_epsilon() -> None:
    run = federation(METHOD)
    own = dict(run.server.own)
    own["arrived"] = {"clients": torch.tensor([True] * 9 + [False])}
    matrix = torch.zeros(10, 10, dtype=torch.float64)
    matrix[3] = torch.tensor([0, 5, 0, 9, 3, -1, 4, 0, -2, 8])
    own["affinity"] = {"matrix": matrix}

    def lines(method: FedFomo, rounds: range) -> list[list[int]]:
        states = [ServerState({}, own=own, clients=10, round=r) for r in rounds]
        return [method.sampled_peers(state, 3) for state in states]

    greedy = lines(replace(METHOD, downloads=3, epsilon=0.0), range(5))
    assert greedy == [[1, 6, 4]] * 5
    free = lines(replace(METHOD, downloads=3, epsilon=1.0, decay=0.0), range(40))
    assert {number for line in free for number in line} == {0, 1, 2, 4, 5, 6, 7, 8}
    assert all(len(set(line)) == 3 for line in free)
    calming = lines(replace(METHOD, downloads=3, epsilon=0.3, decay=0.05), range(6, 12))
    assert calming == [[1, 6, 4]] * 6
    assert len(lines(replace(METHOD, downloads=20), range(1))[0]) == 8
    assert len({line[-1] for line in lines(replace(METHOD, downloads=4, epsilon=0.0), range(20))}) > 1  # 0, 2 and 7 tie


def test_other_clients_models_travel_and_are_counted() -> None:
    run = federation(METHOD)
    size = sum(value.numel() for value in run.server.shared.values())
    first, second = run.step(evaluate=False), run.step(evaluate=False)
    assert (first.numbers_up, second.numbers_up) == (size, size + 3)
    assert first.numbers_down == second.numbers_down == 4 * size  # what the next round will send
    sent = run.download(1)
    assert_same(sent.received["before"], before_of(run, 1))
    chosen = METHOD.sampled_peers(run.server, 1)
    assert sorted(chosen) == [0, 2]
    for k, other in enumerate(chosen):
        assert_same(sent.received[f"other.{k}"], {n: last_model(run.server, other)[n] for n in run.server.shared})
    assert_same(sent.shared, {n: last_model(run.server, 1)[n] for n in run.server.shared})
    view, truth = run.observe(1)
    assert {*view.update} == {*run.server.shared, "weights/models"}
    assert {*view.received} == {"before", "other.0", "other.1"}
    assert view.private == truth.private == {}


def test_running_statistics_are_the_clients_own() -> None:
    run = federation(METHOD, task=worlds.task(batch_norm=True))
    run.run_round()
    (done,) = run.run_round([1])
    (only,) = [
        p
        for p, phase in enumerate(METHOD.phases(run.client.task, 1))
        if phase.records_direction_as is None and phase.epochs
    ]
    steps = len(done.trace.order[only])
    counted = [v for n, v in done.result.buffers.items() if not v.is_floating_point()]
    assert all(int(value) == steps for value in counted)
    assert len(counted) > 0
    floating = {n: dense(v) for n, v in last_model(run.server, 1).items() if n in run.server.buffers}
    assert_near(floating, {n: done.result.buffers[n] for n in floating}, 1e-12)


def test_every_engine_trains_it() -> None:
    runs = [federation(METHOD, task=worlds.task(batch_norm=True), engine=engine) for engine in ("loop", "vmap")]
    for run in runs:
        run.run_round()
        run.run_round()
        run.run_round([0, 2])
    for i in range(3):
        assert_near(last_model(runs[1].server, i), last_model(runs[0].server, i), 1e-10)


def test_tuning_is_training_alone() -> None:
    protocol = Protocol(held_out_clients=1, fine_tune_epochs=1, global_test=worlds.images(30, "whole"))
    run = federation(METHOD, protocol=protocol)
    run.run_round()
    found = scores(run)
    assert len(found["tuned"]) == 2
    every = [last_model(run.server, i) for i in (0, 1)]
    expected = {n: (dense(every[0][n]) + dense(every[1][n])) / 2 for n in every[0]}
    assert_near(run.download(2).shared, expected, 1e-12)
    assert run.download(2).received == {}


def test_it_goes_with_a_generator() -> None:
    method = replace(METHOD, parametrization=Filters(embedding=3, block=(2, 2)))
    run = worlds.federation(method, task_=worlds.deeper(), rounds=3)
    assert set(before_of(run, 0)) == set(run.server.shared) != set(run.client.task.parameters)
    assert all(dense(value).isfinite().all() for value in last_model(run.server, 1).values())


def test_a_run_read_back_goes_on_as_it_would_have(tmp_path: Path) -> None:
    run, again = read_back(lambda: federation(METHOD), tmp_path, then=(None, None))
    for i in range(3):
        assert_same(last_model(run.server, i), last_model(again.server, i))


def test_fedfomo_refuses_settings_out_of_range() -> None:
    for settings, words in {
        ("epsilon", 1.5): "epsilon: expected a (whole )?number in [0, 1], got 1.5",
        ("decay", -1.0): "decay: expected a (whole )?number in [0, 1], got -1.0",
        ("downloads", -1): "downloads: expected a (whole )?number >= 0, got -1",
        ("every", 1): "every: expected a (whole )?number >= 2, got 1",
    }.items():
        with pytest.raises(ValueError, match=words.replace("[", r"\[")):
            FedFomo(**dict([settings]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its loss couples the samples of a batch; can't clip each"):
        worlds.federation(METHOD, DPSGD())
