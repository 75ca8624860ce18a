"""Gradients come first, then known outputs, then single numbers and signs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks.analytic.graph.equation_sets import EquationSet, equation_sets
from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.layer_solves import KnownSignal, SolvedInput, estimate_error, solve_input
from attacks.base import Reconstruction
from fl.capture import from_batch


def layer_of(signal: Tensor, images: Tensor) -> LayerEquations:
    """A 3x3 convolution with these inputs (1, K, H, W) and signals (1, C, H, W)."""
    inner = torch.nn.grad.conv2d_weight(images, (signal.shape[1], images.shape[1], 3, 3), signal, padding=1)
    shapes = images.shape, signal.shape
    return LayerEquations("layer", torch.randn_like(inner), inner, (1, 1), (1, 1), (1, 1), 1, *shapes)


def known_signal(outputs: int, noise: float = 0.0) -> tuple[KnownSignal, Tensor]:
    """What flows back into a convolution of so many outputs on 4 by 4 positions, and what it takes."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(1, 4, 4, 4, generator=draw, dtype=torch.float64).relu()
    signal = torch.randn(1, outputs, 4, 4, generator=draw, dtype=torch.float64)
    layer = layer_of(signal, images)
    layer.gradient.add_(noise * torch.randn(layer.gradient.shape, generator=draw, dtype=torch.float64))
    return KnownSignal(layer, signal), images


def kinds(sets: list[EquationSet]) -> list[tuple[bool, bool]]:
    """Whether known outputs, and single numbers or signs, are asked."""
    return [(equations.others is not None, equations.entries is not None) for equations in sets]


def test_signs_are_asked_where_a_rectifier_made_the_input_and_what_is_above_is_precise() -> None:
    """Without outputs gradients are asked first, and signs after that."""
    signals = [known_signal(2)[0]]
    assert kinds(list(equation_sets(signals, None, rectified=True, precise=True))) == [(False, False), (False, True)]
    assert kinds(list(equation_sets(signals, None, rectified=False, precise=True))) == [(False, False)]
    assert kinds(list(equation_sets(signals, None, rectified=True, precise=False))) == [(False, False)]


def test_signs_alone_make_up_for_equations_that_are_missing() -> None:
    """Of 16 numbers, half of them zero, 18 equations are few where they must not be below zero."""
    known, images = known_signal(2)
    *_, signs = equation_sets([known], None, rectified=True, precise=True)
    found = solve_input([known], signs.others, signs.entries)
    assert found is not None
    assert torch.allclose(found.values, images, atol=1e-6)


@pytest.mark.parametrize("outputs", [2, 4])
def test_the_error_of_an_input_is_estimated_by_what_it_leaves_and_by_the_system(outputs: int) -> None:
    """Of few equations little is left, and the input is off by much more."""
    known, images = known_signal(outputs, noise=1e-4)
    found = solve_input([known])
    assert isinstance(found, SolvedInput)
    off = float((found.values - images).norm() / images.norm())
    assert off / 3 < estimate_error([known], found) < 3 * off


def test_outputs_fill_in_for_directions_that_gradients_leave_open() -> None:
    """Thirteen channels behind a stride tell thirteen of sixteen positions apart, and counts do not show that."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 13, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(13, 96, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(96, 10),
        )
    coarse = torch.rand(1, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    images = functional.interpolate(coarse, size=8, mode="bilinear").mul(255).round() / 255
    view, _ = from_batch(model, images, torch.tensor([3]))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.verified is True
    assert list(found.private) == ["features/0.weight"]  # down to the picture
    assert found.inputs is not None
    assert torch.allclose(found.inputs, images, atol=1e-4)
