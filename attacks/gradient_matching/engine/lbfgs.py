"""L-BFGS on a stack of independent problems at once."""

from __future__ import annotations

import torch
from torch import Tensor


class BatchedLBFGS:
    """One L-BFGS per row of a (T, D) matrix, without line search, as `torch.optim.LBFGS(lr=1)` runs it.

    Unlike torch's it has no absolute tolerance: its path does not depend on the unit of the objective, so that an
    attack is as strong on a small gradient as on a large one. The inverse Hessian is applied in its compact form
    (Byrd, Nocedal, Schnabel 1994, Eq. 3.1): four passes over the history for all problems together.

    Args:
        history: pairs of steps and gradient changes kept per problem.
        lr: length of a step, 1 for the quasi-Newton step itself.
        max_step: longest step, as the root of its mean square over a problem's entries; longer ones are shortened.
    """

    def __init__(self, history: int = 100, lr: float = 1.0, max_step: float = float("inf")) -> None:
        self.history, self.lr, self.max_step = history, lr, max_step
        self.count = 0
        self.last: tuple[Tensor, Tensor] | None = None

    def step(self, gradient: Tensor) -> Tensor:
        """Return the next move (T, D) from the gradient (T, D) at the present point."""
        if self.last is None:
            self._allocate(gradient)
            length = torch.clamp(1 / gradient.abs().sum(1, keepdim=True).clamp_min(1e-30), max=1.0)
            move = -gradient * length * self.lr
        else:
            move = -self._direction(gradient, self.last[0], gradient - self.last[1]) * self.lr
        length = move.square().mean(1, keepdim=True).sqrt()
        move = move * torch.clamp(self.max_step / length.clamp_min(1e-30), max=1.0)
        self.last = (move, gradient)
        return move

    def _allocate(self, gradient: Tensor) -> None:
        count, size = gradient.shape
        self.s, self.y = (gradient.new_zeros(count, self.history, size) for _ in range(2))
        # products of all kept pairs, in double: their triangular system is ill-conditioned long before they are
        self.sy, self.yy = (
            gradient.new_zeros(count, self.history, self.history, dtype=torch.float64) for _ in range(2)
        )
        self.gamma = gradient.new_ones(count, dtype=torch.float64)

    def _direction(self, gradient: Tensor, step: Tensor, change: Tensor) -> Tensor:
        product = (step * change).sum(1)
        good = product > 1e-10 * step.norm(dim=1) * change.norm(dim=1)  # curvature must be positive, in any unit
        step, change = step * good[:, None], change * good[:, None]
        slot = self.count % self.history
        self.count += 1
        self.s[:, slot], self.y[:, slot] = step, change
        used = min(self.count, self.history)
        order = torch.arange(self.count - used, self.count, device=gradient.device) % self.history  # oldest first
        on_s = (self.s[:, :used] @ torch.stack([change, gradient], -1)).double()
        on_y = (self.y[:, :used] @ torch.stack([change, gradient, step], -1)).double()
        self.sy[:, :used, slot], self.sy[:, slot, :used] = on_s[..., 0], on_y[..., 2]
        self.yy[:, :used, slot] = self.yy[:, slot, :used] = on_y[..., 0]
        norm = self.yy[:, slot, slot]
        self.gamma = torch.where(good, self.sy[:, slot, slot] / torch.where(good, norm, 1.0), self.gamma)

        sy = self.sy[:, order][:, :, order]
        diagonal = sy.diagonal(dim1=1, dim2=2)
        upper = sy.triu(1) + torch.diag_embed(torch.where(diagonal > 0, diagonal, 1.0))  # a skipped pair is all zero
        yy = self.yy[:, order][:, :, order]
        p, q = on_s[:, order, 1:], on_y[:, order, 1:2]
        gamma = self.gamma[:, None, None]
        u = torch.linalg.solve_triangular(upper, p, upper=True)
        w = torch.linalg.solve_triangular(upper.mT, diagonal[..., None] * u + gamma * (yy @ u - q), upper=False)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(used, device=order.device))
        w, u = (x[:, back, 0].to(gradient.dtype)[:, None] for x in (w, gamma * u))
        moved = (w @ self.s[:, :used] - u @ self.y[:, :used])[:, 0]
        return gradient * self.gamma[:, None].to(gradient.dtype) + moved

    def select(self, rows: Tensor) -> None:
        """Go on with the problems `rows` (an index tensor) only."""
        if self.last is not None:
            self.last = (self.last[0][rows], self.last[1][rows])
            self.s, self.y, self.sy, self.yy = self.s[rows], self.y[rows], self.sy[rows], self.yy[rows]
            self.gamma = self.gamma[rows]
