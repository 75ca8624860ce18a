"""Conjugate gradients solve a system, and go on from where they ended."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.analytic.graph.conjugate_gradients import ConjugateGradients, solve_by_conjugate_gradients
from fl.seeds import stream

SIZE = 30


class System:
    """A positive definite system that counts its products."""

    def __init__(self) -> None:
        root = torch.randn(SIZE, SIZE, generator=stream(0, "system"), dtype=torch.float64)
        self.matrix = root @ root.mT + SIZE * torch.eye(SIZE, dtype=torch.float64)
        self.right = torch.randn(SIZE, 2, generator=stream(1, "system"), dtype=torch.float64)
        self.products = 0

    def product(self, x: Tensor) -> Tensor:
        self.products += 1
        return self.matrix @ x

    def precondition(self, x: Tensor) -> Tensor:
        return x / self.matrix.diagonal()[:, None]


def test_asked_for_more_digits_iterations_go_on() -> None:
    once, stepwise = System(), System()
    whole = solve_by_conjugate_gradients(once.product, once.right, once.precondition, None, 1e-10)
    iterations = ConjugateGradients(stepwise.product, stepwise.right, stepwise.precondition)
    coarse, fine = iterations.solve(1e-3), iterations.solve(1e-10)
    assert whole is not None
    assert coarse is not None
    assert fine is not None
    exact = torch.linalg.solve(once.matrix, once.right)
    assert float((coarse - exact).norm()) > 1e-5 * float(exact.norm())
    assert float((fine - exact).norm()) < 1e-9 * float(exact.norm())
    assert torch.equal(fine, whole)
    assert stepwise.products == once.products


def test_a_start_at_the_solution_needs_no_iteration() -> None:
    system = System()
    exact = torch.linalg.solve(system.matrix, system.right)
    found = solve_by_conjugate_gradients(system.product, system.right, system.precondition, exact, 1e-8)
    assert found is not None
    assert torch.equal(found, exact)
    assert system.products == 1
