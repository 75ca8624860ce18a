"""SCAFFOLD by itself: rounds by plain loops, both options, and what its server sees."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import unequal, worlds
from support.compare import assert_near, assert_same
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from attacks.labels.recovery import recover_labels
from attacks.update.observed_update import ObservedUpdate
from fl.local.weight_decay import decay_shares
from fl.methods.fedavg import FedAvg
from fl.methods.scaffold import Scaffold
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.simulation.client_round import Round
from fl.tensors import dense
from fl.types import Phase, Task

SIZES = (3, 4, 5)
federation = partial(unequal.federation, sizes=SIZES)


class Plain:
    """Algorithm 1 with modules, `loss.backward()` and torch.optim."""

    def __init__(self, method: Scaffold, task: Task) -> None:
        self.method, self.model = method, copy.deepcopy(task.model)
        empty = [torch.zeros_like(p) for p in self.model.parameters()]
        self.c = [v.clone() for v in empty]
        self.own = [[v.clone() for v in empty] for _ in SIZES]

    def client(self, number: int, done: Round) -> tuple[list[Tensor], list[Tensor]]:
        """What client `number` changes of the parameters and of its control variate on the batches of its round."""
        m, model = self.method, copy.deepcopy(self.model)
        start = [p.detach().clone() for p in self.model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), m.lr, m.momentum, weight_decay=m.weight_decay)
        steps = done.trace.order[-1]
        if m.option == "I":
            whole = nn.functional.cross_entropy(self.model(done.trace.inputs), done.trace.labels)
            fresh = list(torch.autograd.grad(whole, list(self.model.parameters())))
        for (index,) in steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(done.trace.inputs[index]), done.trace.labels[index]).backward()
            for p, c, own in zip(model.parameters(), self.c, self.own[number], strict=True):
                assert p.grad is not None
                p.grad += c - own
            if m.max_norm is not None:
                clip_grad_norm_(model.parameters(), m.max_norm)
            optimizer.step()
        if m.option == "II":
            far, speed = 0.0, 0.0
            for _ in steps:  # what these steps would come to along one direction
                speed = m.momentum * speed + 1
                far += m.lr * speed
            moved = zip(start, model.parameters(), self.own[number], self.c, strict=True)
            fresh = [own - c + (x - y.detach()) / far for x, y, own, c in moved]
        change = [new - old for new, old in zip(fresh, self.own[number], strict=True)]
        self.own[number] = fresh
        return [p.detach() - x for p, x in zip(model.parameters(), start, strict=True)], change

    def round(self, rounds: list[Round]) -> None:
        """The server's step on what the clients of `rounds` send."""
        sent = [self.client(done.upload.client, done) for done in rounds]
        with torch.no_grad():
            for i, p in enumerate(self.model.parameters()):
                p += self.method.server_lr * sum(x[i] for x, _ in sent) / len(sent)
                self.c[i] = self.c[i] + sum(c[i] for _, c in sent) / len(SIZES)


PLAIN = {"momentum": 0.0, "max_norm": None, "weight_decay": 0.0}


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("settings", [PLAIN, {}], ids=["as published", "momentum, decay, clipping"])
@pytest.mark.parametrize("rate", [1.0, 0.67])
def test_rounds_equal_plain_loops(option: Any, settings: dict[str, Any], rate: float) -> None:
    method = replace(Scaffold.example(), option=option, **settings)
    run = federation(method, client_fraction=rate)
    plain = Plain(method, worlds.task())
    names = list(worlds.task().parameters)
    for _ in range(3):
        rounds = run.run_round()
        assert len(rounds) == round(rate * 3)
        plain.round(rounds)
        assert_near(run.server.shared, dict(plain.model.named_parameters()), 1e-10)
        assert_near(run.server.own["control"], dict(zip(names, plain.c, strict=True)), 1e-10)
    for state, own in zip(run.clients, plain.own, strict=True):
        assert_near(state.memory["control"], dict(zip(names, own, strict=True)), 1e-10)


def test_the_servers_variate_is_the_mean_of_the_clients() -> None:
    run = federation(Scaffold.example(), client_fraction=0.67)
    for _ in range(3):
        run.run_round()
    for name, value in run.server.own["control"].items():
        whole = torch.stack([dense(state.memory["control"][name]) for state in run.clients])
        torch.testing.assert_close(dense(value), whole.mean(0), rtol=1e-10, atol=1e-14)


def test_the_first_round_is_fedavg() -> None:
    settings = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
    ours, theirs = (worlds.federation(kind(**settings)) for kind in (Scaffold, FedAvg))  # type: ignore[arg-type]
    assert_near(ours.server.shared, theirs.server.shared, 1e-12)
    ours.run_round()
    theirs.run_round()
    assert float((dense(ours.server.shared["head.weight"]) - dense(theirs.server.shared["head.weight"])).norm()) > 1e-4


@pytest.mark.parametrize("option", ["I", "II"])
def test_what_travels_and_what_the_server_sees(option: Any) -> None:
    run = worlds.federation(replace(Scaffold.example(), option=option))
    view, truth = run.observe(1)
    size = sum(value.numel() for value in run.server.shared.values())
    assert run.download(1).numbers() == 2 * size
    assert run.train(1).upload.numbers() == 2 * size
    assert set(view.update) == {*run.server.shared, *(f"control/{name}" for name in run.server.shared)}
    assert_same(view.received["control"], run.server.own["control"])
    assert set(view.private) == {f"memory/control/{name}" for name in run.server.shared}
    assert set(truth.private) == set(view.private)


def test_a_look_at_all_images_moves_no_running_statistics() -> None:
    task = worlds.task(batch_norm=True)
    first, second = (federation(replace(Scaffold.example(), option=o), task=task).run_round() for o in ("I", "II"))  # type: ignore[arg-type]
    for mine, other in zip(first, second, strict=True):
        assert_same(mine.result.buffers, other.result.buffers)


@pytest.mark.parametrize("option", ["I", "II"])
def test_generated_and_private_parameters(option: Any) -> None:
    method = replace(Scaffold.example(), option=option, parametrization=Hypernetwork.example())
    run = worlds.federation(method, rounds=2)
    assert set(run.server.own["control"]) == set(run.server.shared)
    assert not set(run.private_init) & set(run.clients[0].memory["control"])
    assert all(dense(value).isfinite().all() for value in run.server.shared.values())


def test_no_epoch_and_tuning() -> None:
    run = worlds.federation(replace(Scaffold.example(), epochs=0))
    assert not any(dense(value).any() for value in run.server.own["control"].values())
    (phase,) = Scaffold(option="I").fine_tuning_phases(worlds.task(), 3)
    assert phase.epochs == 3
    assert phase.records_direction_as is None


def test_the_look_counts_for_no_decay() -> None:
    first, second = (replace(Scaffold.example(), option=o).phases(worlds.task(), 0) for o in ("I", "II"))  # type: ignore[arg-type]
    steps = (((2,),) * 4,)
    shares = decay_shares(second, steps, ["head.weight"])
    assert shares["head.weight"] > 0
    assert decay_shares(first, (((4,),), *steps), ["head.weight"]) == pytest.approx(shares)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="option: expected 'I' or 'II', got 'III'"):
        Scaffold(option="III")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="server_lr: expected a number > 0, got 0"):
        Scaffold(server_lr=0.0)
    with pytest.raises(ValueError, match="expected lr > 0, got 0"):
        Scaffold(lr=0.0)
    with pytest.raises(ValueError, match="expected steps=1 in a phase that keeps its direction, got 2"):
        Phase(groups=(), steps=2, records_direction_as="x")


def test_no_label_is_read_off_steps_that_memory_bends() -> None:
    plain = federation(FedAvg(lr=0.1, steps=1, batch_size=None)).observe(0, data=worlds.images(1, "one"))[0]
    run = federation(Scaffold(lr=0.1, steps=1, batch_size=None, option="I"))
    first = run.observe(0, data=worlds.images(1, "one"))[0]
    run.run_round()
    view = run.observe(0, data=worlds.images(1, "one"))[0]
    assert recover_labels(ObservedUpdate(plain)) is not None
    assert recover_labels(ObservedUpdate(first)) is not None  # there is nothing to remember yet
    assert recover_labels(ObservedUpdate(view)) is None
