"""L-BFGS on a stack of independent problems at once."""

from __future__ import annotations

import torch
from torch import Tensor


class StackedLBFGS:
    """One L-BFGS per row of a (T, D) matrix, without line search, as `torch.optim.LBFGS(lr=1)` runs it.

    Unlike torch's it has no absolute tolerance: its path does not depend on the unit of the objective, so that an
    attack is as strong on a small gradient as on a large one.

    Args:
        history: pairs of steps and gradient changes kept per problem.
        lr: length of a step, 1 for the quasi-Newton step itself.
    """

    def __init__(self, history: int = 100, lr: float = 1.0) -> None:
        self.history, self.lr = history, lr
        self.steps: list[Tensor] = []
        self.changes: list[Tensor] = []
        self.rho: list[Tensor] = []
        self.gamma: Tensor | None = None
        self.last: tuple[Tensor, Tensor] | None = None

    def step(self, gradient: Tensor) -> Tensor:
        """The next move (T, D) from the gradient (T, D) at the present point."""
        if self.last is None:
            length = torch.clamp(1 / gradient.abs().sum(1, keepdim=True).clamp_min(1e-30), max=1.0)
            move = -gradient * length * self.lr
        else:
            self._remember(self.last[0], gradient - self.last[1])
            move = -self._direction(gradient) * self.lr
        self.last = (move, gradient)
        return move

    def _remember(self, step: Tensor, change: Tensor) -> None:
        product = (step * change).sum(1)
        sizes = step.norm(dim=1) * change.norm(dim=1)
        good = product > 1e-10 * sizes  # curvature must be positive, whatever the unit
        rho = torch.where(good, 1 / torch.where(good, product, 1), 0)
        gamma = product / change.square().sum(1).clamp_min(1e-38)
        before = torch.ones_like(gamma) if self.gamma is None else self.gamma
        self.gamma = torch.where(good, gamma, before)
        if len(self.steps) == self.history:
            del self.steps[0], self.changes[0], self.rho[0]
        self.steps.append(step)
        self.changes.append(change)
        self.rho.append(rho)

    def _direction(self, gradient: Tensor) -> Tensor:
        """Two-loop recursion (Nocedal & Wright, Algorithm 7.4), row by row."""
        assert self.gamma is not None
        q, alphas = gradient, []
        for s, y, rho in zip(reversed(self.steps), reversed(self.changes), reversed(self.rho), strict=True):
            alpha = rho * (s * q).sum(1)
            alphas.append(alpha)
            q = torch.addcmul(q, alpha[:, None], y, value=-1)
        r = q * self.gamma[:, None]
        for s, y, rho, alpha in zip(self.steps, self.changes, self.rho, reversed(alphas), strict=True):
            beta = rho * (y * r).sum(1)
            r = torch.addcmul(r, (alpha - beta)[:, None], s)
        return r

    def keep(self, rows: Tensor) -> None:
        """Go on with the problems `rows` (an index tensor) only."""
        self.steps = [s[rows] for s in self.steps]
        self.changes = [y[rows] for y in self.changes]
        self.rho = [r[rows] for r in self.rho]
        self.gamma = None if self.gamma is None else self.gamma[rows]
        self.last = None if self.last is None else (self.last[0][rows], self.last[1][rows])
