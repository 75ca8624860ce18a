from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from reference.plain_training import train
from support import worlds
from support.compare import assert_near

from fl.client import Client, LocalInput, LocalTraining, gather_batches, local_update
from fl.engines import EngineName
from fl.federation import ClientData, Federation
from fl.local.optimizers import OptimState, optimize
from fl.local.sampling import plan_batches
from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.methods.fedbabu import FedBABU
from fl.methods.scaffold import Scaffold
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense
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


OPTIM = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def adaptive(name: str, **settings: Any) -> tuple[FedAvg, Any]:
    method = FedAvg(lr=0.01, epochs=3, batch_size=4, optimizer=name, **settings)  # type: ignore[arg-type]
    eps = {} if method.eps is None else {"eps": method.eps}
    return method, partial(OPTIM[name], lr=0.01, weight_decay=method.weight_decay, **eps)


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
    **{f"{name} by its setting": adaptive(name) for name in OPTIM},
    **{f"{name} by its setting, with decay": adaptive(name, weight_decay=0.1, max_norm=0.05) for name in OPTIM},
    **{f"{name} by its setting, with eps": adaptive(name, eps=0.01) for name in OPTIM},
    "adamw without decay": (AdamW(), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_local_training_equals_torch_optim(name: str) -> None:
    method, optimizer = CASES[name]
    # a bias before batch norm has no gradient but rounding, which Adam divides by itself
    task = worlds.task(batch_norm=not any(other in name for other in OPTIM))
    client = Client(task, method)
    order = plan_batches(method.phases(task, 0), len(DATA), stream(0, "order"))
    assert [len(index) for (index,) in order[0]] == [4, 4, 2] * 3
    batches = [(DATA.inputs[index], DATA.labels[index]) for (index,) in order[0]]
    expected = train(task.model.train(), batches, optimizer, method.max_norm)
    start = LocalInput(shared=dict(task.parameters), buffers=task.buffers)
    fed = gather_batches(DATA.inputs, DATA.labels, order)
    result = local_update(client, start, fed, LocalTraining(track_statistics=True))
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
        params, state = optimize(phase, phase.assign(params), params, grads, state)  # type: ignore
    assert_near(params, leaves, 1e-12)  # type: ignore[arg-type]


def test_groups_are_clipped_apart_and_move_by_their_own_rule() -> None:
    groups = (Group(prefixes=("a",), lr=1.0, max_norm=1.0), Group(lr=0.5, weight_decay=0.1))
    phase = Phase(groups=groups, steps=1)
    params = {"a": torch.zeros(2), "b": torch.ones(2), "still": torch.ones(1)}
    owners = phase.assign({"a": None, "b": None})
    grads = {"a": torch.tensor([30.0, 40.0]), "b": torch.tensor([30.0, 40.0])}
    moved, _ = optimize(phase, owners, params, grads, OptimState())  # type: ignore[arg-type]
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
        one, states[0] = optimize(phase, owners, one, {"w": LowRank.outer(left, right)}, states[0])  # type: ignore
        other, states[1] = optimize(phase, owners, other, {"w": torch.outer(left, right)}, states[1])  # type: ignore
    assert isinstance(one["w"], LowRank)
    assert len(one["w"].terms) == 5
    torch.testing.assert_close(dense(one["w"]), dense(other["w"]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", list(OPTIM))
def test_adaptive_optimizers_refuse_structured_gradients(name: str) -> None:
    phase = Phase(groups=(Group(lr=0.1),), optimizer=name, steps=1)
    weights = LowRank.of(torch.zeros(2, 2))
    with pytest.raises(TypeError, match=f"{name}.*'w'"):
        optimize(phase, phase.assign({"w": None}), {"w": weights}, {"w": weights}, OptimState())


@pytest.mark.parametrize("name", list(OPTIM))
def test_adaptive_optimizers_are_differentiable_where_the_gradient_is_zero(name: str) -> None:
    phase = Phase(groups=(Group(lr=0.1),), optimizer=name, steps=1)
    g = torch.zeros(2, requires_grad=True)
    moved, _ = optimize(phase, phase.assign({"w": None}), {"w": torch.ones(2)}, {"w": g}, OptimState())
    (back,) = torch.autograd.grad(dense(moved["w"]).sum(), g)
    assert back.isfinite().all()


@pytest.mark.parametrize("name", list(OPTIM))
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_what_an_attacker_predicts_is_what_was_sent(name: str, decay: float) -> None:
    method = FedAvg(optimizer=name, lr=0.01, weight_decay=decay, steps=3, batch_size=2)  # type: ignore[arg-type]
    view, truth = worlds.federation(method).observe(1)
    for key, value in predict(view, truth.candidate()).items():
        assert torch.equal(dense(value), dense(view.update[key]))


@pytest.mark.parametrize("name", list(OPTIM))
@pytest.mark.parametrize("engine", ["vmap", "factored"])
def test_engines_train_alike(name: str, engine: EngineName) -> None:
    def moved(engine: EngineName) -> Tensors:
        method = FedAvg(optimizer=name, lr=0.01, weight_decay=0.1, epochs=2, batch_size=2)  # type: ignore[arg-type]
        data = [ClientData(worlds.images(n, "train"), worlds.images(2, "test", n)) for n in (3, 4, 5)]
        run = Federation(Client(worlds.task(), method), data, engine=engine)
        run.run_round()
        run.run_round()
        return run.server.shared

    assert_near(moved(engine), moved("loop"), 1e-9)


def test_optimizer_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ValueError, match="momentum 0 with optimizer 'adam'"):
        FedBABU(optimizer="adam")
    with pytest.raises(ValueError, match="optimizer 'sgd' for scaffold, got 'adam'"):
        Scaffold(optimizer="adam")
    with pytest.raises(ValueError, match="weights from a hypernetwork"):
        FedAvg(optimizer="adam", parametrization=Hypernetwork())
    with pytest.raises(ValueError, match="'sgd', 'adam', 'adamw', 'rmsprop' or 'adagrad', got 'lion'"):
        FedAvg(optimizer="lion")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps only with an adaptive optimizer"):
        FedAvg(eps=0.1)


def test_every_method_by_fedavg_takes_an_optimizer_or_says_that_it_does_not() -> None:
    for kind in map(methods.get, methods.names()):
        if not issubclass(kind, FedAvg):
            continue
        made = replace(kind.example(), momentum=0.0, optimizer="sgd")
        for name in OPTIM:
            if name in kind.optimizers:
                phases = replace(made, optimizer=name).phases(worlds.task(), kind.example().first_round)
                assert any(phase.optimizer == name for phase in phases), kind.name
            else:
                with pytest.raises(ValueError, match=f"for {kind.name}, got '{name}'"):
                    replace(made, optimizer=name)
