"""A forward that fixes single precision hides nothing, and one that can't run in double is refused for that reason."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support import recorded as support
from torch import Tensor, nn
from torch.nn import functional

import hyperleak
from attacks.result import Reconstruction
from attacks.verification.confirmation import confirm
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.screening import Screener, Screening
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.runtime.double_precision import WAY_ON
from fl.seeds import stream

MATRIX = torch.linalg.qr(torch.randn(24, 24, generator=stream(0, "matrix")))[0]
Forward = Callable[["Network", Tensor], Tensor]


class Network(nn.Module):
    """Two linear layers, put together by a function."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(196, 24), nn.Linear(24, 10)
        self.run, self.matrix = run, MATRIX.clone()

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Recurrent(nn.Module):
    """A recurrent layer whose first state is made in forward, on a series of one step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.last = kind(196, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 24)
        given = (state, state.clone()) if isinstance(self.layer, nn.LSTM) else state
        returned: Tensor = self.layer(x.flatten(2), given)[0]
        return self.last(returned[:, -1])


class Elman(nn.Module):
    """A loop over the steps of a series, here one, that keeps all states."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h, self.last = nn.Linear(196, 24), nn.Linear(24, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        state, kept = torch.zeros(len(x), 24), torch.empty(len(x), 1, 24)
        for step in range(1):
            state = torch.tanh(self.i(x.flatten(2)[:, step]) + self.h(state))
            kept[:, step] = state
        return self.last(kept.sum(1))


def normalized(network: Network, x: Tensor) -> Tensor:
    h = network.hidden(x)
    return network.last((h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype))


def written(network: Network, x: Tensor) -> Tensor:
    h = network.hidden(x)
    gate = (h >= 0).float()
    gate[:, :3] = h[:, :3]
    return network.last((gate * h) @ network.matrix)


FIXED: dict[str, Forward] = {
    "float()": lambda n, x: n.last(n.hidden(x.float())),
    "to(float32)": lambda n, x: n.last(n.hidden(x.to(torch.float32))),
    "to(tensor)": lambda n, x: n.last(n.hidden(x.to(n.matrix))),
    "type(FloatTensor)": lambda n, x: n.last(n.hidden(x.type(torch.FloatTensor))),
    "type('torch.FloatTensor')": lambda n, x: n.last(n.hidden(x.type("torch.FloatTensor"))),
    "type_as": lambda n, x: n.last(n.hidden(x.type_as(n.matrix))),
    "softmax(dtype)": lambda n, x: n.last(torch.softmax(n.first(x.flatten(1)), -1, dtype=torch.float32)),
    "ones_like(dtype)": lambda n, x: n.last(
        n.first(x.flatten(1)) @ torch.ones_like(n.matrix, dtype=torch.float32).triu()
    ),
    "matrix": lambda n, x: n.last(n.hidden(x) @ n.matrix),
    "matrix of a closure": lambda n, x: n.last(functional.linear(n.hidden(x), MATRIX)),
    "made in forward": lambda n, x: n.last(torch.addmm(torch.zeros(24), n.hidden(x), torch.eye(24))),
    "written into": written,
    "normalized": normalized,
    "logits.float()": lambda n, x: n.last(n.hidden(x)).float(),
}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return build().eval()


def screened(model: nn.Module, **settings: object) -> Screening:
    return Screener(model=lambda: model, input_shape=support.SHAPE, **settings)(support.recorded(model))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", FIXED)
def test_one_picture_is_found_whatever_precision_forward_fixes(way: str) -> None:
    found = screened(seeded(lambda: Network(FIXED[way])))
    assert found.reason == "an image is recovered, and the update confirms it (analytic)", found.tried


@pytest.mark.parametrize("build", [lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU), Elman])
def test_states_that_forward_makes_do_not_hide_a_series(build: Callable[[], nn.Module]) -> None:
    found = screened(seeded(build), seconds=20)  # on a busy machine a series takes more than the default
    assert found.reason == "an image is recovered, and the update confirms it (analytic)", found.tried


def test_attacks_on_whole_networks_go_through_a_forward_that_fixes_its_precision() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 16, 5), nn.Linear(1600, 10)

        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.leaky_relu(self.first(x.to(dtype=torch.float32)), 0.2)
            return torch.log_softmax(self.last(h.flatten(1)), 1, dtype=torch.float32)

    model = seeded(Convolutions)
    update = support.recorded(model)
    report = hyperleak.audit(
        model,
        update=(dict(update.before), dict(update.after)),
        input_shape=support.SHAPE,
        method={"name": "fedavg", "lr": 0.1, "steps": 1},
        attacks=["rconv"],
    )
    assert report.findings[0].verdict.startswith("the attack confirms that what it recovered is right")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pixels_that_forward_rounds_are_no_picture(dtype: torch.dtype) -> None:
    """The layer takes rounded ones: of bright pictures bfloat16 is off by more than a quarter of a level."""
    for cast in (lambda x: x.to(dtype).float(), lambda x: x.to(dtype).to(x.dtype)):
        found = screened(seeded(lambda cast=cast: Network(lambda n, x: n.last(n.hidden(cast(x))))))  # type: ignore[misc]
        assert (found.verdict, {one.kind for one in found.exposures}) == ("leaked", {"features", "labels"})


def test_a_loss_with_weights_of_classes_is_taken() -> None:
    weights = torch.linspace(0.5, 1.5, 10)

    def weighed(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, weight=weights)

    model = support.dense_network()
    inputs, labels = support.examples(1)
    after = copy.deepcopy(model)
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    weighed(after(inputs), labels).backward()
    optimizer.step()
    halves = [{name: value.detach().clone() for name, value in m.state_dict().items()} for m in (model, after)]
    facts = TrainingFacts(optimizer="sgd", lr=0.1, steps=1, examples=1)
    update = RecordedUpdate(before=halves[0], after=halves[1], training=facts)
    found = Screener(model=lambda: model, input_shape=support.SHAPE, loss=weighed)(update)
    assert (found.verdict, found.exposures[-1].kind) == ("leaked", "images"), found


class SingleOnly(torch.autograd.Function):
    """Doubles numbers in single precision."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, "made for float32"
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class SingleBackward(torch.autograd.Function):
    """Multiplies by a matrix, whose precision its gradient fixes."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x @ MATRIX

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad @ MATRIX.T


REFUSED: dict[str, tuple[Forward, str]] = {
    "function": (lambda n, x: n.last(SingleOnly.apply(n.hidden(x))), "AssertionError: made for float32"),
    "backward": (lambda n, x: n.last(SingleBackward.apply(n.hidden(x))), "RuntimeError: expected m1 and m2"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_a_network_that_can_not_run_in_double_precision_is_refused_for_that(way: str) -> None:
    run, said = REFUSED[way]
    model = seeded(lambda: Network(run))
    found = screened(model)
    assert found.verdict == "not decided"  # as its first layer has one direction
    for reason in found.tried.values():
        assert "does not run in double precision (float64)" in reason
        assert said in reason
        assert WAY_ON in reason
    update = support.recorded(model)
    report = hyperleak.audit(
        model,
        update=(dict(update.before), dict(update.after)),
        input_shape=support.SHAPE,
        method={"name": "fedavg", "lr": 0.1, "steps": 1},
        attacks=["analytic", "rconv", "cascade", {"name": "ig", "iterations": 3}],
    )
    *solving, search = report.findings
    assert all("does not run in double precision" in finding.verdict for finding in solving)
    assert "failed" not in search.verdict


@pytest.mark.parametrize("way", REFUSED)
def test_nothing_is_confirmed_of_a_network_that_can_not_run_in_double_precision(way: str) -> None:
    inputs, labels = support.examples(1)
    view, _ = from_batch(seeded(lambda: Network(REFUSED[way][0])), inputs, labels, method=FedAvg(lr=0.1, steps=1))
    claimed = confirm(view, Reconstruction(inputs=inputs, labels=labels, objective=0.0, verified=True))
    assert isinstance(claimed, Reconstruction)
    assert claimed.verified is None
    assert "not confirmed: the network does not run in double precision" in claimed.note
