"""Activations are undone by their values alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.recursive.layer_equations import invert_activation
from attacks.network.curved_activations import MonotoneActivation, ValleyActivation

LOWEST: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gelu": (functional.gelu, -0.7517915),
    "silu": (functional.silu, -1.2784645),
    "hard swish": (functional.hardswish, -1.5),
}


def valley(kind: str) -> ValleyActivation:
    run, lowest = LOWEST[kind]
    return ValleyActivation(run, torch.Size([4]), torch.tensor([lowest - 0.3, lowest + 0.2], dtype=torch.float64))


@pytest.mark.parametrize("kind", list(LOWEST))
def test_each_side_of_a_valley_is_undone_apart(kind: str) -> None:
    activation, (run, lowest) = valley(kind), LOWEST[kind]
    assert activation.lowest == pytest.approx(lowest, abs=1e-6)
    rising = torch.tensor([lowest + 0.01, -0.2, 0.0, 3.0], dtype=torch.float64)
    found, known = activation.inverse(run(rising))
    assert known.all()
    assert torch.allclose(found, rising, atol=1e-9)
    falling = torch.tensor([lowest - 0.01, lowest - 0.2, -2.4], dtype=torch.float64)
    assert torch.allclose(activation.falling_inverse(run(falling)), falling, atol=1e-9)


def test_values_that_no_smaller_input_has_are_told() -> None:
    falling = valley("silu").falling_inverse(torch.tensor([0.5, -0.1], dtype=torch.float64))
    assert falling[0] == -torch.inf
    assert functional.silu(falling[1]) == pytest.approx(-0.1)


def test_a_level_stretch_is_undone_to_its_end() -> None:
    end = valley("hard swish").falling_inverse(torch.zeros(1, dtype=torch.float64))
    assert end == pytest.approx(-3.0, abs=1e-6)


def test_nothing_is_known_below_the_lowest_value() -> None:
    values = functional.gelu(torch.tensor([-0.7, 0.3], dtype=torch.float64))
    values[0] -= 0.01
    _, known = valley("gelu").inverse(values)
    assert known.tolist() == [False, True]


def test_what_is_too_low_to_be_told_is_bounded() -> None:
    run = partial(torch.sub, other=1.0)
    activation = ValleyActivation(lambda x: run(x).square(), torch.Size([4]), torch.tensor([0.9, 1.2]).double())
    found, known = activation.inverse(torch.tensor([-1e-8, 4.0], dtype=torch.float64))
    assert known.tolist() == [False, True]
    assert found[0] == pytest.approx(1 + 2e-8**0.5)
    assert found[1] == pytest.approx(3)


@pytest.mark.parametrize("made", [nn.ELU(), nn.Softplus(), nn.SiLU()])
def test_large_inputs_are_found(made: nn.Module) -> None:
    near = torch.tensor([-1.4, -1.2], dtype=torch.float64)
    curved = MonotoneActivation(made, torch.Size([4]))
    activation = ValleyActivation(made, torch.Size([4]), near) if isinstance(made, nn.SiLU) else curved
    given = torch.tensor([-0.5, 39.0, 60.0, 3e4], dtype=torch.float64)
    found, known = activation.inverse(made(given))
    assert known.all()
    assert torch.allclose(found, given)


@pytest.mark.parametrize("together", [True, False])
def test_many_values_of_an_activation_of_few_numbers_take_few_runs(together: bool) -> None:
    runs = 0

    def made(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return nn.functional.elu(x if together else x.view(1, 2))  # as recorded of one image: takes no more

    given = torch.linspace(-3, 3, 200, dtype=torch.float64)
    activation = MonotoneActivation(made, torch.Size([2]))
    assert torch.allclose(activation(given), nn.functional.elu(given))
    assert (runs <= 4) == together


def test_a_level_top_bounds_nothing() -> None:
    inputs, _ = invert_activation(
        MonotoneActivation(nn.ReLU6(), torch.Size([3])), torch.tensor([0.0, 2.0, 6.0]).double()
    )
    assert inputs.known.tolist() == [False, True, False]
    assert inputs.values[0] == pytest.approx(0, abs=1e-15)
    assert inputs.values[2] > 6


@pytest.mark.parametrize("made", [nn.ELU(), nn.Softplus()])
def test_what_rises_is_undone_everywhere_but_at_level_ends(made: nn.Module) -> None:
    given = torch.tensor([-3.0, 0.1, 5.0, -60.0], dtype=torch.float64)
    found, known = MonotoneActivation(made, torch.Size([4])).inverse(made(given))
    assert known.tolist() == [True, True, True, False]
    assert torch.allclose(found[:3], given[:3], atol=1e-9)
