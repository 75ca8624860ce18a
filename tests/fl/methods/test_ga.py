"""Generalization adjustment by itself: rounds by plain loops, and how weights move."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from support import unequal, worlds
from support.compare import assert_near
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fl.federation import Federation
from fl.methods.fedavg import FedAvg
from fl.methods.ga import GA
from fl.simulation.client_round import Round
from fl.tensors import dense
from fl.types import Batch

SIZES = (3, 4, 7)
federation = partial(unequal.federation, sizes=SIZES)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of all images, running statistics as they were."""
    return nn.functional.cross_entropy(copy.deepcopy(model)(batch.inputs), batch.labels)


class Plain:
    """FedAvg with modules and torch.optim, weights by the authors' rule written out."""

    def __init__(self, run: Federation, method: GA) -> None:
        self.run, self.method = run, method
        self.model = copy.deepcopy(run.client.task.model).train()
        self.before: dict[int, float] = {}
        self.weights = [1 / len(SIZES)] * len(SIZES)

    def trained(self, done: Round) -> nn.Module:
        m, model = self.method, copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), m.lr, m.momentum, weight_decay=m.weight_decay)
        for (index,) in done.trace.order[1]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(done.trace.inputs[index]), done.trace.labels[index]).backward()
            assert m.max_norm is not None
            clip_grad_norm_(model.parameters(), m.max_norm)
            optimizer.step()
        return model

    def round(self, rounds: list[Round], number: int) -> dict[int, float]:
        """One round; returns the losses by the network received."""
        received, gaps, models = {}, {}, {}
        with torch.no_grad():
            for done in rounds:
                i = done.upload.client
                images = self.run.data[i].train
                received[i] = float(loss(self.model, images))
                gaps[i] = received[i] - self.before.get(i, received[i])
                with torch.enable_grad():
                    models[i] = self.trained(done)
                self.before[i] = float(loss(models[i], images))
            most = max(abs(gap) for gap in gaps.values())
            assert self.method.rounds is not None
            step = self.method.step_size * (1 - (number - 1) / self.method.rounds)
            for i, gap in gaps.items():
                if most:
                    self.weights[i] = min(1.0, max(0.0, self.weights[i] + step / len(SIZES) * gap / most))
            self.weights = [w / sum(self.weights) for w in self.weights]
            whole = sum(self.weights[i] for i in models)
            for name, value in self.model.state_dict().items():
                if value.is_floating_point():
                    parts = [self.weights[i] / whole * model.state_dict()[name] for i, model in models.items()]
                    value.copy_(torch.stack(parts).sum(0))
        return received


@pytest.mark.parametrize(("rate", "batch_norm"), [(1.0, False), (1.0, True), (0.67, False)])
def test_rounds_equal_plain_loops(rate: float, batch_norm: bool) -> None:
    method = replace(GA.example(), step_size=0.9)
    run = federation(method, client_fraction=rate, task=worlds.task(batch_norm=batch_norm))
    plain = Plain(run, method)
    for number in range(4):
        rounds = run.run_round()
        received = plain.round(rounds, number)
        for done in rounds:
            i, sent = done.upload.client, {name: float(dense(v)) for name, v in done.upload.extra["loss"].items()}
            assert sent == {"received": pytest.approx(received[i]), "trained": pytest.approx(plain.before[i])}
        assert_near(run.server.shared, dict(plain.model.named_parameters()), 1e-10)
        statistics = {name: value for name, value in plain.model.named_buffers() if value.is_floating_point()}
        assert_near({name: run.server.buffers[name] for name in statistics}, statistics, 1e-10)
        assert dense(run.server.own["shares"]["share"]).tolist() == pytest.approx(plain.weights, rel=1e-9)
    assert max(plain.weights) - min(plain.weights) > 0.05


def test_without_steps_clients_count_alike() -> None:
    settings = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
    ours = federation(GA(step_size=0.0, **settings), sizes=(4, 4, 4))  # type: ignore[arg-type]
    theirs = federation(FedAvg(**settings), sizes=(4, 4, 4))  # type: ignore[arg-type]
    for run in (ours, theirs):
        for _ in range(3):
            run.run_round()
    assert_near(ours.server.shared, theirs.server.shared, 1e-12)
    uneven = federation(GA(step_size=0.0, **settings))  # type: ignore[arg-type]
    before = dense(uneven.server.shared["head.bias"])
    moves = torch.stack([dense(done.upload.update["head.bias"]) for done in uneven.run_round()])
    torch.testing.assert_close(dense(uneven.server.shared["head.bias"]), before - moves.mean(0))


def test_ga_moves_weights_by_the_generalization_gaps() -> None:
    method, everyone = GA(step_size=0.3, rounds=10), torch.arange(3)
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    gaps = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
    expected = torch.tensor([1 / 3 + 0.1, 1 / 3, 1 / 3 - 0.05], dtype=torch.float64)
    torch.testing.assert_close(method.adjust_weights(even, everyone, gaps, 0), expected / expected.sum())
    half = torch.tensor([1 / 3 + 0.05, 1 / 3, 1 / 3 - 0.025], dtype=torch.float64)
    torch.testing.assert_close(method.adjust_weights(even, everyone, gaps, 5), half / half.sum())
    assert torch.equal(method.adjust_weights(even, everyone, gaps, 12), even)
    assert torch.equal(method.adjust_weights(even, everyone, 0 * gaps, 0), even)
    cut = replace(method, step_size=3.0).adjust_weights(even, everyone, gaps, 0)
    torch.testing.assert_close(cut, torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64))


def test_what_travels_and_what_the_server_sees() -> None:
    run = worlds.federation(GA.example())
    view, truth = run.observe(1)
    size = sum(value.numel() for value in run.server.shared.values())
    assert run.download(1).numbers() == size
    assert run.train(1).upload.numbers() == size + 2
    assert set(view.update) == {*run.server.shared, "loss/received", "loss/trained"}
    assert not view.private
    assert not truth.private


def test_looks_move_nothing_and_tuning_has_none() -> None:
    task = worlds.task(batch_norm=True)
    ours, theirs = (federation(kind.example(), task=task).run_round()[0] for kind in (GA, FedAvg))
    counts = [int(one.result.buffers["body.norm1.num_batches_tracked"]) for one in (ours, theirs)]
    assert counts[0] == counts[1]
    (phase,) = GA().fine_tuning_phases(worlds.task(), 3)
    assert (phase.epochs, phase.records_direction_as) == (3, None)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="step_size: expected a number >= 0, got -1"):
        GA(step_size=-1)
    with pytest.raises(ValueError, match=r"rounds: expected a (whole )?number >= 1( or null)?, got 0"):
        GA(rounds=0)
