"""pFedSim by itself: warm-up and personal rounds by plain loops, who counts how much, and what travels."""

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
from torch import Tensor, nn

from fl.client import Client
from fl.federation import Federation
from fl.methods.bases.personal_models import last_model
from fl.methods.fedavg import FedAvg
from fl.methods.pfedsim import PFedSim, classifier_similarity
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.simulation.protocol import Protocol
from fl.tensors import dense

SAME = {**unequal.LOCAL, "weight_decay": 5e-4}
METHOD = replace(PFedSim.example(), max_norm=None)
federation = partial(unequal.federation, test=20)


class Reference:
    """The server in lists of weights, with the matrix of similarities in full."""

    def __init__(self, model: nn.Module, clients: int) -> None:
        self.net = model
        self.models = [plain.weights_of(model) for _ in range(clients)]
        self.s = [[float(i == j) for j in range(clients)] for i in range(clients)]

    def sent(self, i: int) -> dict[str, Tensor]:
        phi = [-math.log(1 - min(0.9999, s)) for s in self.s[i]]
        mean = {n: sum(p / sum(phi) * m[n] for p, m in zip(phi, self.models, strict=True)) for n in self.models[0]}
        return {n: self.models[i][n] if n.startswith("head.") else value for n, value in mean.items()}  # type: ignore[misc]

    def train(self, i: int, sent: dict[str, Tensor], batches: plain.Batches) -> None:
        local = plain.loaded(self.net, sent)
        plain.sgd(local, lambda name: True, batches, lr=0.1, momentum=0.5, weight_decay=5e-4)
        self.models[i] = plain.weights_of(local)

    def compare(self, clients: list[int]) -> None:
        for i in clients:
            for j in clients:
                if i != j:
                    rows = zip(self.models[i]["head.weight"], self.models[j]["head.weight"], strict=True)
                    cosines = [float(x @ y / (x.norm() * y.norm())) for x, y in rows]
                    self.s[i][j] = max(0.0, sum(cosines) / len(cosines))


def test_rounds_equal_plain_loops() -> None:
    run, reference = federation(replace(METHOD, warmup=1)), Reference(worlds.task().model, 3)
    warm = run.run_round([0, 2])
    for i, done in zip((0, 2), warm, strict=True):
        reference.train(i, reference.models[1], plain.fed(done.trace, 0))
    common = plain.average([reference.models[0], reference.models[2]], [3, 5])
    reference.models = [common] * 3
    for clients in ([0, 1], [1, 2], [0, 1, 2]):
        sent = [reference.sent(i) for i in range(3)]
        for i in range(3):
            assert_near(run.download(i).shared, sent[i], 1e-10)
        for i, done in zip(clients, run.run_round(clients), strict=True):
            reference.train(i, sent[i], plain.fed(done.trace, 0))
        reference.compare(clients)
    for i in range(3):
        assert_near(run.download(i).shared, reference.sent(i), 1e-10)
        assert_near(last_model(run.server, i), reference.models[i], 1e-10)


def test_all_rounds_of_warm_up_are_fedavg() -> None:
    runs = [federation(kind) for kind in (PFedSim(**SAME, warmup=2), FedAvg(**SAME))]
    for _ in range(2):
        for run in runs:
            run.run_round([0, 2])
    assert_same(runs[0].server.shared, runs[1].server.shared)
    assert_near(runs[0].download(1).shared, runs[1].server.shared, 1e-12)
    runs[0].run_round()
    assert_near(runs[0].server.shared, runs[1].server.shared, 1e-12)


def test_strangers_do_not_count_and_opposites_neither() -> None:
    run = federation(METHOD)
    run.run_round([0])
    run.run_round([1])
    for i in (0, 1):
        assert_near(run.download(i).shared, {n: last_model(run.server, i)[n] for n in run.server.shared}, 1e-12)
    weights = torch.eye(3, 5)
    assert float(classifier_similarity(weights, -weights)) == 0
    assert float(classifier_similarity(weights, weights)) == 1
    assert float(classifier_similarity(weights, weights * torch.tensor([[1.0], [-1.0], [2.0]]))) == pytest.approx(1 / 3)


def test_equal_clients_share_one_network() -> None:
    run = federation(METHOD)
    data = run.data[0]
    run = Federation(run.client, [data, data], client_fraction=1.0)
    run.run_round([0, 1])
    both = [last_model(run.server, i) for i in (0, 1)]
    assert dense(run.server.own["similarity"]["matrix"])[0, 1] > 0.5
    sent = run.download(0).shared
    assert all(dense(value).isfinite().all() for value in sent.values())
    assert_same({"head.weight": sent["head.weight"]}, {"head.weight": both[0]["head.weight"]})


def test_what_travels_is_as_much_as_with_fedavg_and_statistics_go_with_the_extractor() -> None:
    task = worlds.task(batch_norm=True)
    ours, theirs = (federation(kind, task=task) for kind in (METHOD, FedAvg(**SAME)))
    records = [run.step(evaluate=False) for run in (ours, theirs)]
    assert records[0].numbers_down == records[1].numbers_down
    assert records[0].numbers_up == records[1].numbers_up
    view, truth = ours.observe(1)
    assert view.private == truth.private == view.received == {}
    row = dense(ours.server.own["similarity"]["matrix"])[1]
    phi = -torch.log(1 - row)
    every = [last_model(ours.server, i) for i in range(3)]
    for name, value in ours.download(1).buffers.items():
        if value.is_floating_point():
            expected = sum(p / phi.sum() * dense(m[name]) for p, m in zip(phi, every, strict=True))
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


def test_clients_predict_by_what_they_ended_with() -> None:
    run = federation(replace(METHOD, warmup=1, lr=0.5))
    run.run_round()
    assert_same(run.prediction_download(0).shared, run.server.shared)
    run.run_round()
    rounds = run.run_round(evaluate=True)
    assert run.accuracy() == [done.accuracy for done in rounds]
    for i in range(3):
        assert_same(run.prediction_download(i).shared, {n: last_model(run.server, i)[n] for n in run.server.shared})


def test_a_client_that_never_takes_part_gets_the_mean() -> None:
    run = federation(METHOD, protocol=Protocol(held_out_clients=1))
    run.run_round()
    every = [last_model(run.server, i) for i in (0, 1)]
    assert_near(run.download(2).shared, {n: (dense(every[0][n]) + dense(every[1][n])) / 2 for n in every[0]}, 1e-12)


def test_a_run_read_back_goes_on_as_it_would_have(tmp_path: Path) -> None:
    run, again = read_back(lambda: federation(METHOD), tmp_path)
    for i in range(3):
        assert_same(run.download(i).shared, again.download(i).shared)


def test_pfedsim_refuses_what_it_can_not_compare() -> None:
    with pytest.raises(ValueError, match="warmup: expected a whole number >= 0, got -1"):
        PFedSim(warmup=-1)
    with pytest.raises(ValueError, match="expected parametrization 'direct': pFedSim compares"):
        PFedSim(parametrization=Hypernetwork.example())
    with pytest.raises(ValueError, match="expected a network with a linear classifier called 'end', got none"):
        Client(replace(worlds.task(), head="end."), PFedSim())
