from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from reference.plain_training import train
from support import worlds
from support.compare import assert_near

from fl.client import Client, gather, local_update
from fl.methods.fedavg import FedAvg
from fl.optim import OptimState, optimise
from fl.sampling import plan
from fl.seeds import stream
from fl.tensors import LowRank, dense
from fl.types import Group, Phase

DATA = worlds.images(10)


class Adam(FedAvg):
    def phases(self, task: Any, round: int) -> tuple[Phase, ...]:
        group = Group(lr=0.01, weight_decay=self.weight_decay, max_norm=self.max_norm)
        return (Phase(groups=(group,), optimizer="adam", epochs=3, batch_size=4),)


class AdamW(FedAvg):
    def phases(self, task: Any, round: int) -> tuple[Phase, ...]:
        (phase,) = Adam.phases(self, task, round)  # type: ignore[arg-type]
        return (replace(phase, optimizer="adamw"),)


class Nesterov(FedAvg):
    def phases(self, task: Any, round: int) -> tuple[Phase, ...]:
        group = Group(lr=0.1, weight_decay=self.weight_decay, max_norm=self.max_norm)
        return (Phase(groups=(group,), momentum=0.9, nesterov=True, epochs=3, batch_size=4),)


def sgd(**settings: Any) -> tuple[FedAvg, Any]:
    method = FedAvg(lr=0.1, epochs=3, batch_size=4, **settings)
    return method, partial(torch.optim.SGD, lr=0.1, momentum=method.momentum, weight_decay=method.weight_decay)


CASES = {
    "plain": sgd(),
    "momentum": sgd(momentum=0.9),
    "decay": sgd(momentum=0.5, weight_decay=0.1),
    "clipped": sgd(momentum=0.5, weight_decay=0.1, max_norm=0.05),
    "not clipped": sgd(momentum=0.5, max_norm=1e6),
    "nesterov": (
        Nesterov(weight_decay=0.1, max_norm=0.05),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (Adam(), partial(torch.optim.Adam, lr=0.01)),
    "adam with decay": (Adam(weight_decay=0.1, max_norm=0.05), partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)),
    "adamw": (AdamW(weight_decay=0.1, max_norm=0.05), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)),
    "adamw without decay": (AdamW(), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_local_training_equals_torch_optim(name: str) -> None:
    method, optimizer = CASES[name]
    # a bias before batch norm has no gradient but rounding, which Adam divides by itself
    task = worlds.task(batch_norm="adam" not in name)
    client = Client(task, method)
    order = plan(method.phases(task, 0), len(DATA), stream(0, "order"))
    assert [len(index) for (index,) in order[0]] == [4, 4, 2] * 3
    batches = [(DATA.inputs[index], DATA.labels[index]) for (index,) in order[0]]
    expected = train(task.model.train(), batches, optimizer, method.max_norm)
    result = local_update(
        client, dict(task.parameters), {}, gather(DATA.inputs, DATA.labels, order), buffers=task.buffers, track=True
    )
    assert_near(result.trained(dict(task.parameters)), dict(expected.named_parameters()), 1e-10)
    assert_near(
        {k: v for k, v in result.buffers.items() if v.is_floating_point()},
        {k: v for k, v in expected.named_buffers() if v.is_floating_point()},
        1e-10,
    )
    if task.buffers:
        assert result.buffers["body.norm1.num_batches_tracked"] == 9


def test_adamw_is_torchs_to_rounding() -> None:
    groups = (Group(prefixes=("a",), lr=0.05, weight_decay=0.3), Group(lr=0.01))
    phase = Phase(groups=groups, optimizer="adamw", steps=1)
    start = {n: torch.randn(5, 3, generator=stream(0, n), dtype=torch.float64) for n in ("a", "b")}
    leaves = {n: v.clone().requires_grad_() for n, v in start.items()}
    settings: list[dict[str, Any]] = [
        {"params": [leaves["a"]], "lr": 0.05, "weight_decay": 0.3},
        {"params": [leaves["b"]], "lr": 0.01, "weight_decay": 0.0},
    ]
    solver, params, state = torch.optim.AdamW(settings), dict(start), OptimState()
    for step in range(20):
        grads = {n: torch.randn(5, 3, generator=stream(step, "g", n), dtype=torch.float64) for n in start}
        for n, leaf in leaves.items():
            leaf.grad = grads[n]
        solver.step()
        params, state = optimise(phase, phase.assign(params), params, grads, state)  # type: ignore
    assert_near(params, leaves, 1e-12)  # type: ignore[arg-type]


def test_groups_are_clipped_apart_and_move_by_their_own_rule() -> None:
    groups = (Group(prefixes=("a",), lr=1.0, max_norm=1.0), Group(lr=0.5, weight_decay=0.1))
    phase = Phase(groups=groups, steps=1)
    params = {"a": torch.zeros(2), "b": torch.ones(2), "still": torch.ones(1)}
    owners = phase.assign({"a": None, "b": None})
    grads = {"a": torch.tensor([30.0, 40.0]), "b": torch.tensor([30.0, 40.0])}
    moved, _ = optimise(phase, owners, params, grads, OptimState())  # type: ignore[arg-type]
    torch.testing.assert_close(moved["a"], torch.tensor([-0.6, -0.8]))
    torch.testing.assert_close(moved["b"], 1 - 0.5 * (torch.tensor([30.0, 40.0]) + 0.1))
    assert moved["still"] is params["still"]


def test_structured_parameters_move_as_dense_ones() -> None:
    base = torch.randn(6, 4, generator=stream(0, "base"), dtype=torch.float64)
    phase = Phase(groups=(Group(lr=0.1, weight_decay=0.2, max_norm=1.0),), momentum=0.9, nesterov=True, steps=5)
    one, other = {"w": LowRank.of(base)}, {"w": base}
    states = [OptimState(), OptimState()]
    for step in range(5):
        left = torch.randn(6, generator=stream(step, "left"), dtype=torch.float64)
        right = torch.randn(4, generator=stream(step, "right"), dtype=torch.float64)
        owners = phase.assign({"w": None})
        one, states[0] = optimise(phase, owners, one, {"w": LowRank.outer(left, right)}, states[0])  # type: ignore
        other, states[1] = optimise(phase, owners, other, {"w": torch.outer(left, right)}, states[1])  # type: ignore
    assert isinstance(one["w"], LowRank)
    assert len(one["w"].terms) == 5
    torch.testing.assert_close(dense(one["w"]), dense(other["w"]), rtol=1e-12, atol=1e-13)


def test_adam_refuses_structured_gradients() -> None:
    phase = Phase(groups=(Group(lr=0.1),), optimizer="adam", steps=1)
    weights = LowRank.of(torch.zeros(2, 2))
    with pytest.raises(TypeError, match="'w'"):
        optimise(phase, phase.assign({"w": None}), {"w": weights}, {"w": weights}, OptimState())


def test_adam_is_differentiable_where_the_gradient_is_zero() -> None:
    phase = Phase(groups=(Group(lr=0.1),), optimizer="adam", steps=1)
    g = torch.zeros(2, requires_grad=True)
    moved, _ = optimise(phase, phase.assign({"w": None}), {"w": torch.ones(2)}, {"w": g}, OptimState())
    (back,) = torch.autograd.grad(dense(moved["w"]).sum(), g)
    assert back.isfinite().all()
