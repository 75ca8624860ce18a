"""Two kinds of equations are solved together as by the whole matrix."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.analytic.graph.joint_least_squares import GradientEquations, solve_together
from fl.seeds import stream

IMAGES, CHANNELS, SIDE = 2, 3, 4
POSITIONS = IMAGES * SIDE * SIDE


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(sum(shape), "joint"), dtype=torch.float64)


def as_images(rows: Tensor) -> Tensor:
    return rows.mT.reshape(CHANNELS, IMAGES, SIDE, SIDE).transpose(0, 1)


def as_rows(images: Tensor) -> Tensor:
    return images.transpose(0, 1).reshape(CHANNELS, POSITIONS).mT


class Mixing:
    """Numbers of one image, mixed."""

    def __init__(self, equations: int, true: Tensor) -> None:
        self.matrix = noise(equations, CHANNELS * SIDE * SIDE)
        self.count = IMAGES * equations
        self.wanted = self.push(true)

    def push(self, x: Tensor) -> list[Tensor]:
        return [x.flatten(1) @ self.matrix.mT]

    def pull(self, weights: Sequence[Tensor]) -> Tensor:
        return (weights[0] @ self.matrix).view(IMAGES, CHANNELS, SIDE, SIDE)

    def right_side(self) -> list[Tensor]:
        return self.wanted


def problem(equations: int, others: int, off: float = 0.0) -> tuple[GradientEquations, Mixing, Tensor]:
    """Equations of a gradient that tie positions of the same parity alone, others, and x (n H W, K)."""
    true = noise(POSITIONS, CHANNELS)
    matrix = noise(equations, POSITIONS)
    parity = torch.arange(POSITIONS) % 2
    matrix = matrix * (torch.arange(equations)[:, None] % 2 == parity)
    mixing = Mixing(others, as_images(true))
    right = matrix @ true + off * noise(equations, CHANNELS)
    return GradientEquations(matrix, right, as_images, as_rows), mixing, true


@pytest.mark.parametrize("equations", [0, 6, 24, 40])
def test_what_neither_kind_tells_alone_follows_from_both(equations: int) -> None:
    gradients, mixing, true = problem(equations, 52)
    assert torch.linalg.matrix_rank(gradients.matrix) <= min(equations, POSITIONS)
    found = solve_together(gradients, mixing, tolerance=1e-12)
    assert torch.allclose(found, true, atol=1e-6)
    few = problem(equations, 10)
    short = solve_together(few[0], few[1], tolerance=1e-12)
    assert (short is not None and torch.allclose(short, few[2], atol=1e-6)) == (equations == 40)


def test_directions_in_neither_kind_of_equations_are_left_open_and_not_set_to_zero() -> None:
    gradients, mixing, true = problem(24, 52)
    gradients.matrix[:, 3] = 0
    gradients = replace(gradients, right=gradients.matrix @ true)
    assert solve_together(gradients, mixing) is not None
    mixing.matrix.view(-1, CHANNELS, POSITIONS // IMAGES)[:, :, 3] = 0
    mixing.wanted = mixing.push(as_images(true))
    assert solve_together(gradients, mixing) is None


def test_of_contradicting_equations_the_weighted_misfit_is_least() -> None:
    """Its derivative is zero: what gradients leave pulls against what the others leave, by a weight of 1 or less."""
    gradients, mixing, true = problem(30, 52, off=0.1)
    found = solve_together(gradients, mixing, tolerance=1e-13)
    assert float((found - true).norm()) > 1e-3
    by_gradient = gradients.matrix.mT @ (gradients.right - gradients.matrix @ found)
    left = [t - f for t, f in zip(mixing.right_side(), mixing.push(as_images(found)), strict=True)]
    by_others = as_rows(mixing.pull(left))
    weight = -float((by_gradient * by_others).sum() / by_others.square().sum())
    assert 1e-3 <= weight <= 1
    assert torch.allclose(by_gradient, -weight * by_others, atol=1e-8)


def test_it_goes_on_from_a_start_and_ends_at_its_tolerance() -> None:
    gradients, mixing, true = problem(30, 52)
    rough = solve_together(gradients, mixing, tolerance=1e-1)
    fine = solve_together(gradients, mixing, rough, 1e-12)
    assert torch.allclose(fine, true, atol=1e-6)
    assert not torch.allclose(rough, true, atol=1e-6)
    assert torch.equal(solve_together(gradients, mixing, true, 1e-6), solve_together(gradients, mixing, true, 1e-3))
