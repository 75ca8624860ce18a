"""What weight decay alone takes off a parameter, against torch's optimizer on a gradient of zero."""

import math
import time

import pytest
import torch

from fl.local.weight_decay import decay_shares, without_decay
from fl.tensors import LowRank, Tensors, dense
from fl.types import Group, Phase

HEAD = Group(prefixes=("head.",), lr=0.1, weight_decay=1e-2)
REST = Group(lr=0.02, weight_decay=5e-3, max_norm=1.0)


def taken(lr: float, decay: float, steps: int, *, momentum: float = 0.0, nesterov: bool = False) -> float:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.SGD([weight], lr=lr, weight_decay=decay, momentum=momentum, nesterov=nesterov)
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        solver.step()
    return 1 - float(weight.detach())


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, True)])
def test_it_is_what_torchs_sgd_takes_off(momentum: float, nesterov: bool) -> None:
    phase = Phase(groups=(HEAD, REST), momentum=momentum, nesterov=nesterov, epochs=3)
    shares = decay_shares([phase], (((5,),) * 7,), ["head.weight", "body.weight"])
    assert shares["head.weight"] == pytest.approx(taken(0.1, 1e-2, 7, momentum=momentum, nesterov=nesterov), rel=1e-12)
    assert shares["body.weight"] == pytest.approx(taken(0.02, 5e-3, 7, momentum=momentum, nesterov=nesterov), rel=1e-12)


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.0)])
def test_of_millions_of_steps_it_is_told_at_once(optimizer: str, momentum: float) -> None:
    phase = Phase(groups=(Group(lr=1e-4, weight_decay=1e-3),), optimizer=optimizer, momentum=momentum, steps=10**6)
    began = time.process_time()
    share = decay_shares([phase], None, ["body.weight"])["body.weight"]
    assert time.process_time() - began < 1
    assert share == pytest.approx(1 - math.exp(-0.1 / (1 - momentum)), rel=1e-4)


def test_each_phase_starts_afresh_and_moves_its_own() -> None:
    phases = [Phase(groups=(HEAD,), momentum=0.5, epochs=1), Phase(groups=(HEAD, REST), momentum=0.5, epochs=1)]
    shares = decay_shares(phases, (((2,),) * 3, ((2,),) * 4), ["head.bias", "body.bias"])
    kept = (1 - taken(0.1, 1e-2, 3, momentum=0.5)) * (1 - taken(0.1, 1e-2, 4, momentum=0.5))
    assert shares["head.bias"] == pytest.approx(1 - kept, rel=1e-12)
    assert shares["body.bias"] == pytest.approx(taken(0.02, 5e-3, 4, momentum=0.5), rel=1e-12)


def test_what_stands_still_or_does_not_decay_has_none() -> None:
    phase = Phase(groups=(HEAD, Group(prefixes=("body.",), lr=0.1)), epochs=2)
    assert decay_shares([phase], (((1,),) * 9,), ["other", "body.weight"]) == {"other": 0.0, "body.weight": 0.0}


def test_what_can_not_be_told_is_left_out() -> None:
    epochs, steps = Phase(groups=(HEAD,), epochs=2), Phase(groups=(HEAD,), steps=2)
    assert decay_shares([epochs], None, ["head.bias", "body.bias"]) == {"body.bias": 0.0}
    assert decay_shares([steps], None, ["head.bias"])["head.bias"] == pytest.approx(taken(0.1, 1e-2, 2), rel=1e-12)
    adam = Phase(groups=(HEAD, Group(lr=0.1)), optimizer="adam", steps=2)
    assert decay_shares([adam], None, ["head.bias", "body.bias"]) == {"body.bias": 0.0}


def test_adamw_shrinks_apart_from_its_steps() -> None:
    group = Group(lr=0.1, weight_decay=0.2)
    phase = Phase(groups=(group,), optimizer="adamw", steps=4)
    share = decay_shares([phase], None, ["w"])["w"]
    start = {"w": torch.tensor([1.5, -2.0], dtype=torch.float64)}

    def update(decay: float) -> torch.Tensor:
        leaf = start["w"].clone().requires_grad_()
        solver = torch.optim.AdamW([leaf], lr=0.1, weight_decay=decay)
        for step in range(4):
            leaf.grad = torch.tensor([0.3, -1.0], dtype=torch.float64) * (step + 1)
            solver.step()
        return start["w"] - leaf.detach()

    assert share == pytest.approx(1 - (1 - 0.1 * 0.2) ** 4, rel=1e-12)
    left = dense(without_decay({"w": update(0.2)}, start, {"w": share})["w"])  # type: ignore[arg-type]
    steps = [1.0, 0.98, 0.98**2, 0.98**3]  # the first of four steps shrinks thrice after it was taken
    ups = [torch.tensor([0.3, -1.0], dtype=torch.float64) * (s + 1) for s in range(4)]
    m, v, expected = torch.zeros(2).double(), torch.zeros(2).double(), torch.zeros(2).double()
    for i, g in enumerate(ups):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        move = 0.1 * (m / (1 - 0.9 ** (i + 1))) / ((v / (1 - 0.999 ** (i + 1))).sqrt() + 1e-8)
        expected = expected + move * steps[3 - i]
    torch.testing.assert_close(left, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("structured", [False, True])
def test_an_update_without_decay_keeps_its_form_and_its_gradients(structured: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.rand(4, 3, generator=generator).double(), torch.rand(4, generator=generator).double()
    outer = LowRank.outer(bias, weight[0])
    moved = LowRank.of(weight) * 0.01 + outer if structured else weight * 0.01 + outer.dense()
    found = without_decay({"w": moved, "b": bias}, {"w": weight, "b": bias}, {"w": 0.01, "b": 0.0, "absent": 0.5})
    assert isinstance(found["w"], LowRank) == structured
    assert isinstance(moved, torch.Tensor) or found["w"].base is None  # type: ignore[union-attr]
    torch.testing.assert_close(dense(found["w"]), outer.dense(), rtol=1e-12, atol=1e-15)
    assert found["b"] is bias


def test_a_defense_lets_through_only_part_of_the_decay() -> None:
    weight, kept = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])

    def surrogate(made: Tensors) -> Tensors:
        return {n: dense(v) * kept for n, v in made.items()}

    found = without_decay({"w": weight * 0.5 * kept}, {"w": weight}, {"w": 0.5}, surrogate)
    assert torch.equal(dense(found["w"]), torch.zeros(2))
