from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same, tensors
from support.probes import PROBES, FedPerNorm
from torch import nn

from fl.client import Client, gather_batches
from fl.defense import Defense
from fl.gradient import autograd_derivative, func_derivative
from fl.local.sampling import batch_sizes, sequential_order
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfedzero import HyperFedZero
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.seeds import stream
from fl.simulation.client_round import RoundKey, prepare, train
from fl.tensors import dense
from fl.types import Batch, Candidate, Scope, Task
from fl.view import ThreatModel

METHOD = FedAvg(lr=0.1, momentum=0.5, epochs=2, batch_size=2)


@dataclass(frozen=True, kw_only=True)
class Flip(Defense):
    """Feeds every batch with fresh noise on it: the truth is what was fed."""

    name: ClassVar[str] = "flip"

    def transform_batch(self, batch: Batch, task: Task, generator: torch.Generator) -> Batch:
        noise = torch.rand(batch.inputs.shape, generator=generator, dtype=batch.inputs.dtype)
        return Batch((batch.inputs + noise) / 2, nn.functional.one_hot(batch.labels, worlds.CLASSES).double())


@dataclass(frozen=True, kw_only=True)
class Wider(Defense):
    """Puts a layer in front of the network."""

    name: ClassVar[str] = "wider"

    def wrap_model(self, model: nn.Module) -> nn.Module:
        layer = nn.utils.skip_init(nn.Conv2d, 1, 1, 1, dtype=torch.float64)
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        return nn.Sequential(layer, model)


def test_the_update_is_before_minus_after() -> None:
    run = worlds.federation(METHOD)
    done = run.train(0)
    trained = done.result.trained(run.server.shared)
    for name, value in done.upload.update.items():
        assert torch.equal(dense(run.server.shared[name]) - dense(value), dense(trained[name]))
        assert dense(value).any()


def test_one_step_is_the_learning_rate_times_the_gradient() -> None:
    run = worlds.federation(METHOD, rounds=0)
    client = Client(run.client.base, FedAvg(lr=0.1, steps=1, batch_size=None))
    data = worlds.images(1)
    update = train(prepare(client, run.clients[0], run.download(0), data)).upload.update
    model = run.client.base.model.train()
    model.zero_grad()
    nn.functional.cross_entropy(model(data.inputs), data.labels).backward()
    expected = {name: 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert_near(update, expected, 1e-12)


def test_the_trace_replays_the_client() -> None:
    run = worlds.federation(METHOD)
    trace = run.train(2).trace
    data = run.data[2].train
    assert torch.equal(data.inputs[trace.indices], trace.inputs)
    assert torch.equal(data.labels[trace.indices], trace.labels)
    assert batch_sizes(trace.order) == (((2,),) * 4,)
    other = train(prepare(run.client, run.clients[2], run.download(2), data, key=RoundKey(client=1, round=1))).trace
    assert str(other.order) != str(trace.order)


def test_what_a_defense_feeds_is_the_truth() -> None:
    run = worlds.federation(METHOD, Flip())
    view, truth = run.observe(1)
    assert len(truth.inputs) == 8
    assert truth.labels.shape == (8, worlds.CLASSES)
    assert not torch.equal(truth.inputs[:4], truth.inputs[4:])
    assert view.batch_size == 8
    assert_same(predict(view, truth.candidate()), view.update)
    assert torch.equal(truth.trace.indices.sort().values, torch.arange(4).repeat_interleave(2))


def test_a_defense_may_wrap_the_model() -> None:
    run = worlds.federation(METHOD, Wider())
    view, truth = run.observe(0)
    assert set(view.update) == {"0.weight", "0.bias", *(f"1.{name}" for name in view.task.parameters)}
    assert_same(predict(view, truth.candidate()), view.update)


@pytest.mark.parametrize("probe", ["fedavg+norm", "fedper+norm", "fedprox+hfn", "dp-sgd+hyperfl"])
def test_both_derivatives_agree(probe: str) -> None:
    p = PROBES[probe]
    view, truth = worlds.federation(p.method, p.defense, p.task).observe(1)
    one, other = (predict(view, truth.candidate(), derivative=d) for d in (autograd_derivative, func_derivative))
    assert_near(one, other, 1e-12)


def test_second_derivatives_are_right() -> None:
    view, truth = worlds.federation(METHOD).observe(1)
    guess = worlds.images(4, "guess").inputs.requires_grad_()

    def of(inputs: torch.Tensor) -> torch.Tensor:
        predicted = predict(view, replace(truth.candidate(), inputs=inputs))
        return torch.stack([(dense(v) - dense(view.update[k])).square().sum() for k, v in predicted.items()]).sum()

    (found,) = torch.autograd.grad(of(guess), guess)
    direction = torch.randn(guess.shape, generator=stream(0), dtype=torch.float64)
    step = 1e-6
    with torch.no_grad():
        slope = (of(guess + step * direction) - of(guess - step * direction)) / (2 * step)
    torch.testing.assert_close((found * direction).sum(), slope, rtol=1e-5, atol=1e-10)


def test_soft_labels_are_candidates_too() -> None:
    view, truth = worlds.federation(METHOD).observe(1)
    labels = nn.functional.one_hot(truth.labels, worlds.CLASSES).double().requires_grad_()
    predicted = predict(view, replace(truth.candidate(), labels=labels))
    assert_near(predicted, view.update, 1e-12)
    (g,) = torch.autograd.grad(dense(predicted["head.bias"]).square().sum(), labels)
    assert g.any()


class TestThreatModel:
    def view(self, method: Any = METHOD, **settings: Any) -> Any:
        probe = method if isinstance(method, tuple) else (method, worlds.task())
        return worlds.federation(probe[0], None, probe[1]).observe(1, threat=ThreatModel(**settings))

    def test_by_default_the_server_knows_sizes_only(self) -> None:
        view, _ = self.view(HyperFL.example())
        assert view.labels is None
        assert view.order is None
        assert view.draws is None
        assert view.private_init is None
        assert view.history == ()
        assert view.batch_size == 4
        assert view.schedule == (((2,), (2,)), ((2,),) * 4)
        assert view.private == {"embedding": (3,), "head.weight": (3, 16), "head.bias": (3,)}

    def test_nothing_private_is_in_the_view(self) -> None:
        view, truth = self.view(HyperFL.example())
        secrets = [truth.inputs, *truth.private.values(), *truth.extractor.values()]
        for value in tensors(view):
            assert not any(value.shape == s.shape and torch.equal(value, dense(s)) for s in secrets)

    def test_what_is_known_is_a_copy(self) -> None:
        view, truth = self.view(knows_labels=True, knows_order=True)
        assert torch.equal(view.labels, truth.labels)
        assert view.labels.data_ptr() != truth.labels.data_ptr()
        assert str(view.order) == str(truth.trace.order)

    def test_what_is_unknown_is_none(self) -> None:
        view, truth = self.view(knows_schedule=False, knows_batch_size=False, sees_buffers=False)
        assert view.schedule is None
        assert view.batch_size is None
        assert view.buffers_after is None
        with pytest.raises(ValueError, match="local schedule"):
            predict(view, replace(truth.candidate(), order=None))
        assert_same(predict(view, truth.candidate()), view.update)

    def test_known_draws_replay_the_method(self) -> None:
        method = HyperFedZero.example()
        view, truth = self.view(method, knows_randomness=True, knows_order=True)
        assert_same(predict(view, replace(truth.candidate(), order=None, draws=None)), view.update)
        blind, truth = self.view(method, knows_order=True)
        guess = predict(blind, replace(truth.candidate(), order=None, draws=None))
        assert any(not torch.equal(dense(value), dense(blind.update[name])) for name, value in guess.items())

    def test_where_private_tensors_started(self) -> None:
        view, _ = self.view(HyperFL.example(), knows_private_init=True)
        assert set(view.private_init) == set(view.private)

    def test_buffers_after_training(self) -> None:
        view, truth = self.view((METHOD, worlds.task(batch_norm=True)))
        run = worlds.federation(METHOD, None, worlds.task(batch_norm=True))
        assert_near(
            {"mean": view.buffers_after["body.norm1.running_mean"]},
            {"mean": run.train(1).result.buffers["body.norm1.running_mean"]},
            1e-14,
        )
        assert not any("norm" in name for name in truth.private)


def test_an_unknown_order_is_guessed_in_turn() -> None:
    view, truth = worlds.federation(METHOD).observe(1)
    assert view.schedule is not None
    guess = sequential_order(view.schedule, 4)
    one = predict(view, replace(truth.candidate(), order=None))
    assert_same(one, predict(view, replace(truth.candidate(), order=guess)))


def test_candidates_are_checked() -> None:
    view, truth = worlds.federation(HyperFL.example()).observe(1)
    candidate = truth.candidate()
    with pytest.raises(ValueError, match=r"private tensor 'head.weight' \(3, 16\), got none"):
        predict(view, Candidate(candidate.inputs, candidate.labels, {}))
    wrong = {**candidate.private, "head.bias": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"'head.bias' of shape \(3,\), got \(4,\)"):
        predict(view, replace(candidate, private=wrong))


def test_private_running_statistics_are_unknowns_in_evaluation_mode() -> None:
    method = FedPerNorm(lr=0.1, epochs=1, batch_size=2, train_mode=False)
    view, truth = worlds.federation(method, None, worlds.task(batch_norm=True)).observe(1)
    assert "body.norm1.running_var" in view.private
    assert "body.norm1.num_batches_tracked" not in view.private
    assert_same(predict(view, truth.candidate()), view.update)


def test_running_statistics_move_in_training_only() -> None:
    task = worlds.task(batch_norm=True)
    moved = worlds.federation(METHOD, None, task).train(0).result.buffers
    assert moved["body.norm1.num_batches_tracked"] > 0
    still = worlds.federation(replace(METHOD, train_mode=False), None, task).train(0).result.buffers
    assert torch.equal(still["body.norm1.running_mean"], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize(
    "drop", [nn.Dropout(0.5), nn.MultiheadAttention(64, 2, dropout=0.5), nn.LSTM(64, 64, 2, dropout=0.5)]
)
def test_dropout_in_train_mode_is_refused(drop: nn.Module) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.flatten, self.head = drop, nn.Flatten(), nn.Linear(64, worlds.CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.drop(self.flatten(x)))

    task = Task(Dropped(), (1, 8, 8), worlds.CLASSES)
    with pytest.raises(ValueError, match=r"without dropout in train mode, got \['drop'\]"):
        Client(task, METHOD)
    Client(task, replace(METHOD, train_mode=False))


def test_the_client_has_its_own_model() -> None:
    task = worlds.task()
    client = Client(task, METHOD)
    assert client.task.model is not task.model
    assert set(client.scopes(task.parameters).values()) == {Scope.SHARED}


def test_gather_gives_the_batches_of_an_order() -> None:
    data = worlds.images(4)
    order = (((torch.tensor([3, 1]),), (torch.tensor([0]),)),)
    (((first,), (second,)),) = gather_batches(data.inputs, data.labels, order)
    assert torch.equal(first.inputs, data.inputs[[3, 1]])
    assert torch.equal(second.labels, data.labels[[0]])


@dataclass(frozen=True, kw_only=True)
class Dice(Defense):
    """Draws a number at every step."""

    name: ClassVar[str] = "dice"

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
        return {} if generator is None else {"dice": torch.rand(len(batch), generator=generator)}


@pytest.mark.parametrize(("method", "defense"), [(METHOD, Defense()), (METHOD, Dice()), (HyperFedZero.example(), None)])
def test_batches_are_taken_once_more_only_where_something_is_drawn(
    method: Any, defense: Defense | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sizes, take = worlds.federation(method, defense or Defense()), [], Batch.take

    def counted(self: Batch, index: torch.Tensor) -> Batch:
        sizes.append(len(index))
        return take(self, index)

    monkeypatch.setattr(Batch, "take", counted)
    done = run.train(0)
    drawn = [bool(draws) for steps in done.trace.draws for draws in steps]
    fed = [len(batch) for steps in done.trace.order for step in steps for batch in step]
    assert len(set(drawn)) == 1
    assert sizes == (fed + fed if drawn[0] else fed)
    assert len(drawn) == sum(map(len, done.trace.order))
    assert drawn[0] == (not (method is METHOD and type(defense) is Defense))


class FeatureNorm(nn.Module):
    """A classifier behind batch norm of 64 features, whose variance is over the images alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.utils.skip_init(nn.Linear, 64, worlds.CLASSES)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(x.flatten(1)))
        return out


def test_a_step_on_one_image_under_batch_norm_says_what_to_set() -> None:
    task = replace(worlds.task(), model=FeatureNorm().double())
    with pytest.raises(
        ValueError, match=r"expected 2 images or more in each step, got 1: batch norm.*train_mode: false"
    ):
        worlds.federation(replace(METHOD, batch_size=1), task_=task)


def test_what_a_loss_raises_is_not_made_its_own_cause() -> None:
    """Its traceback would lose what it was raised from."""
    own = ValueError("of my own")

    @dataclass(frozen=True, kw_only=True)
    class Refusing(FedAvg):
        name: ClassVar[str] = "refusing"

        def loss(self, network: Any, batch: Batch, step: Any) -> torch.Tensor:
            raise own

    with pytest.raises(ValueError, match="of my own") as caught:
        worlds.federation(Refusing(lr=0.1, epochs=1, batch_size=2)).train(0)
    assert caught.value is own
    assert own.__cause__ is None
