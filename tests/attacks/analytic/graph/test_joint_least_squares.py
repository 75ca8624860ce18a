"""Two kinds of equations are solved together as by the whole matrix."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.analytic.graph.block_matrices import BlockMatrix
from attacks.analytic.graph.joint_equations import GradientEquations, KnownEntries
from attacks.analytic.graph.joint_least_squares import JointSolver
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
    found = JointSolver(mixing).solve(gradients, tolerance=1e-12)
    assert torch.allclose(found, true, atol=1e-6)
    few = problem(equations, 10)
    short = JointSolver(few[1]).solve(few[0], tolerance=1e-12)
    assert (short is not None and torch.allclose(short, few[2], atol=1e-6)) == (equations == 40)


def test_directions_in_neither_kind_of_equations_are_left_open_and_not_set_to_zero() -> None:
    gradients, mixing, true = problem(24, 52)
    gradients.matrix[:, 3] = 0
    gradients = replace(gradients, right=gradients.matrix @ true)
    assert JointSolver(mixing).solve(gradients) is not None
    mixing.matrix.view(-1, CHANNELS, POSITIONS // IMAGES)[:, :, 3] = 0
    mixing.wanted = mixing.push(as_images(true))
    assert JointSolver(mixing).solve(gradients) is None


def test_of_contradicting_equations_the_weighted_misfit_is_least() -> None:
    """Its derivative is zero: what gradients leave pulls against what the others leave, by a weight of 1 or less."""
    gradients, mixing, true = problem(30, 52, off=0.1)
    found = JointSolver(mixing).solve(gradients, tolerance=1e-13)
    assert float((found - true).norm()) > 1e-3
    by_gradient = gradients.matrix.mT @ (gradients.right - gradients.matrix @ found)
    left = [t - f for t, f in zip(mixing.right_side(), mixing.push(as_images(found)), strict=True)]
    by_others = as_rows(mixing.pull(left))
    weight = -float((by_gradient * by_others).sum() / by_others.square().sum())
    assert 1e-3 <= weight <= 1
    assert torch.allclose(by_gradient, -weight * by_others, atol=1e-8)


def test_it_goes_on_from_a_start_and_ends_at_its_tolerance() -> None:
    gradients, mixing, true = problem(30, 52)
    rough = JointSolver(mixing).solve(gradients, tolerance=1e-1)
    fine = JointSolver(mixing).solve(gradients, rough, 1e-12)
    assert torch.allclose(fine, true, atol=1e-6)
    assert not torch.allclose(rough, true, atol=1e-6)
    ends = [JointSolver(mixing).solve(gradients, true, tolerance) for tolerance in (1e-6, 1e-3)]
    assert torch.equal(*ends)


def rectified(equations: int) -> tuple[GradientEquations, Tensor]:
    """Equations of a gradient alone, and x, half of which is zero."""
    true = noise(POSITIONS, CHANNELS).clamp_min(0)
    matrix = noise(equations, POSITIONS)
    return GradientEquations(matrix, matrix @ true, as_images, as_rows), true


def nothing_known(nonnegative: bool) -> KnownEntries:
    shape = IMAGES, CHANNELS, SIDE, SIDE
    return KnownEntries(torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64), nonnegative)


def test_numbers_known_outright_leave_few_equations_enough() -> None:
    """20 equations of a channel for 32 numbers, of which 16 are known."""
    true = noise(POSITIONS, CHANNELS)
    matrix = noise(20, POSITIONS)
    gradients = GradientEquations(matrix, matrix @ true, as_images, as_rows)
    images = as_images(true)
    known = torch.arange(SIDE * SIDE).view(SIDE, SIDE).expand_as(images) % 2 == 0
    entries = KnownEntries(known, images * known)
    assert entries.unknown_counts().tolist() == CHANNELS * [POSITIONS // 2]
    found = JointSolver(None, entries).solve(gradients, tolerance=1e-12)
    assert found is not None
    assert torch.allclose(found, true, atol=1e-8)
    wrong = JointSolver(None, nothing_known(False)).solve(gradients, tolerance=1e-12)
    assert wrong is None or not torch.allclose(wrong, true, atol=0.1)


def test_numbers_not_below_zero_follow_from_fewer_equations_than_there_are() -> None:
    """28 equations for 32 numbers, of which half are zero: without the signs any of many would do."""
    gradients, true = rectified(28)
    signed = JointSolver(None, nothing_known(True))
    found = signed.solve(gradients, tolerance=1e-12)
    assert found is not None
    assert torch.allclose(found, true, atol=1e-8)
    assert signed.zero is not None
    assert torch.equal(as_rows(signed.zero), true == 0)
    wrong = JointSolver(None, nothing_known(False)).solve(gradients, tolerance=1e-12)
    assert wrong is None or not torch.allclose(wrong, true, atol=0.1)


def test_bounds_from_above_count_as_well() -> None:
    gradients, true = rectified(22)
    loose, tight = nothing_known(True), replace(nothing_known(True), upper=1.5 * as_images(true))
    found = [JointSolver(None, entries).solve(gradients, tolerance=1e-12) for entries in (loose, tight)]
    off = [math.inf if x is None else float((x - true).norm() / true.norm()) for x in found]
    assert off[1] < 1e-6 < 0.1 < off[0]


def test_blocks_are_inverted_at_the_free_numbers_of_each_channel() -> None:
    draw = torch.Generator().manual_seed(0)
    a = torch.zeros(20, 10, dtype=torch.float64)  # three parts, two of one size
    parts = [torch.arange(4), torch.arange(4, 8), torch.arange(8, 10)]
    for rows, places in zip((slice(0, 6), slice(6, 12), slice(12, 20)), parts, strict=True):
        a[rows, places] = torch.randn(a[rows, places].shape, generator=draw, dtype=torch.float64)
    free = torch.rand(10, 150, generator=draw) < torch.linspace(0, 1, 150)  # from none to all
    free[:, :70] = False
    added, x = (torch.rand(10, 150, generator=draw, dtype=torch.float64) for _ in range(2))

    found = BlockMatrix.gram(a, parts).invert_restricted(free, added)(x)

    for k in range(150):
        at = free[:, k].nonzero()[:, 0]
        whole = (a.mT @ a)[at][:, at] + added[at, k].diag()
        assert torch.allclose(found[at, k], torch.linalg.solve(whole, x[at, k]), rtol=1e-8)
        assert not found[~free[:, k], k].any()


@pytest.mark.parametrize("equations", [24, 40])
def test_equations_that_tell_nothing_are_passed_over(equations: int) -> None:
    """None of a layer's numbers may have been sent, so that the one above says nothing of what it takes."""
    gradients, mixing, true = problem(equations, 52)
    mixing.matrix = torch.zeros_like(mixing.matrix)
    mixing.wanted = mixing.push(as_images(true))
    found = JointSolver(mixing).solve(gradients, tolerance=1e-12)
    assert (found is None) == (equations == 24)
    assert found is None or torch.allclose(found, true, atol=1e-6)
