"""The stacked L-BFGS against torch's, problem by problem."""

import pytest
import torch

from attacks.gradient_matching.engine.optimizers import BatchedLBFGS
from fl.seeds import stream

SIZE = 20


def quadratics(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = stream(0, "quadratics")
    a = torch.randn(count, SIZE, SIZE, generator=draw, dtype=torch.float64)
    b = torch.randn(count, SIZE, generator=draw, dtype=torch.float64)
    return a @ a.mT + torch.eye(SIZE, dtype=torch.float64), b


def theirs(a: torch.Tensor, b: torch.Tensor, history: int, steps: int) -> torch.Tensor:
    x = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([x], lr=1, max_iter=1, history_size=history, tolerance_grad=0, tolerance_change=0)

    def closure() -> torch.Tensor:
        solver.zero_grad()
        value = 0.5 * x @ a @ x - b @ x
        value.backward()
        return value

    for _ in range(steps):
        solver.step(closure)
    return x.detach()


@pytest.mark.parametrize("history", [3, 40])
def test_each_row_walks_as_torchs_own(history: int) -> None:
    a, b = quadratics(3)
    x, solver = torch.zeros(3, SIZE, dtype=torch.float64), BatchedLBFGS(history)
    for _ in range(25):
        x = x + solver.step((a @ x[..., None])[..., 0] - b)
    expected = torch.stack([theirs(a[i], b[i], history, 25) for i in range(3)])
    assert (x - expected).abs().max() < 1e-10


def test_dropped_rows_do_not_disturb_the_others() -> None:
    a, b = quadratics(3)
    x, solver = torch.zeros(3, SIZE, dtype=torch.float64), BatchedLBFGS(40)
    for step in range(20):
        if step == 7:
            rows = torch.tensor([0, 2])
            solver.select(rows)
            x, a, b = x[rows], a[rows], b[rows]
        x = x + solver.step((a @ x[..., None])[..., 0] - b)
    full_a, full_b = quadratics(3)
    expected = torch.stack([theirs(full_a[i], full_b[i], 40, 20) for i in (0, 2)])
    assert (x - expected).abs().max() < 1e-10


def test_a_pair_of_negative_curvature_is_skipped() -> None:
    solver = BatchedLBFGS(5)
    x = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    for _ in range(6):  # f = -|x|^2 / 2: every change of the gradient points against the step
        move = solver.step(-x)
        assert move.isfinite().all()
        x = x + move
    assert solver.sy.abs().max() == 0


def test_no_step_is_longer_than_asked() -> None:
    a, b = quadratics(3)
    x, solver = torch.zeros(3, SIZE, dtype=torch.float64), BatchedLBFGS(40, max_step=0.01)
    lengths = []
    for _ in range(60):
        move = solver.step((a @ x[..., None])[..., 0] - b)
        lengths.append(move.square().mean(1).sqrt())
        x = x + move
    reached = torch.stack(lengths)
    assert reached.max() <= 0.01 * (1 + 1e-12)
    assert (reached > 0.0099).any()
