"""Optimizers take a batch of trials from one iterate to the next, row by row: Adam and L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from attacks.gradient_matching.engine.problem import INPUTS, LABELS, PRIVATE, Variables


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
        """Return H g (B, n), with H the inverse Hessian of L-BFGS in its compact form (Byrd et al., 1994).

        Let S and Y be the kept steps and changes of the gradient, R the upper triangle of S^T Y, and D its diagonal.
        With p = S^T g and q = Y^T g,

            H g = gamma g + S R^-T ((D + gamma Y^T Y) R^-1 p - gamma q) - gamma Y R^-1 p.

        Args:
            gradient: g (B, n).
            step: the last step (B, n).
            change: what the gradient changed by in it (B, n).
        """
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


LAST_LR_DROP = 7 / 8
"""Share of a search after which the step size falls for the last time."""


class OptimizerSettings(Protocol):
    """The settings of `GradientMatching` that an optimizer reads; they are documented there."""

    @property
    def iterations(self) -> int:
        """Length of the search."""

    @property
    def optimizer(self) -> Literal["adam", "lbfgs"]:
        """Which optimizer."""

    @property
    def lr(self) -> float:
        """Step size of images."""

    @property
    def signed(self) -> bool:
        """Whether images take steps by the sign of their gradient."""

    @property
    def schedule(self) -> Literal["step", "cosine", "none"]:
        """How the step size falls."""

    @property
    def warmup(self) -> int:
        """Iterations in which the step size rises."""

    @property
    def last_lr(self) -> float:
        """Share of the step size at the end of a cosine."""

    @property
    def langevin(self) -> float:
        """Noise of each step, as a share of the step size."""

    @property
    def label_lr(self) -> float:
        """Step size of label logits."""

    @property
    def history_size(self) -> int:
        """Pairs that L-BFGS keeps."""

    @property
    def max_step(self) -> float:
        """Longest step of L-BFGS."""

    def private_step(self, name: str) -> float:
        """Return the step size of the private tensor `name`."""


class Optimizer(Protocol):
    """Takes steps on the variables of a batch, whose rows do not know of each other."""

    @property
    def final_phase_start(self) -> int:
        """The iteration from which the step size has all but fallen; 0 where it does not fall."""

    def step(self, variables: Variables, grads: Variables) -> Variables:
        """Return the next iterate from the gradients at this one; both by variable, one row for each trial."""

    def select(self, rows: Tensor) -> None:
        """Go on with the trials `rows` (an index tensor) only."""


def make_optimizer(settings: OptimizerSettings, noise: Sequence[torch.Generator]) -> Optimizer:
    """Return the optimizer that the settings name.

    Args:
        settings: of the search.
        noise: one generator for each trial, of the noise of Langevin steps; empty where none is added.
    """
    return Adam(settings, noise) if settings.optimizer == "adam" else LBFGSOptimizer(settings)


class Adam:
    """Adam (Kingma and Ba, ICLR 2015), row by row.

    With the gradient g (its sign for images, where the search is `signed`) and moments m, v:

        m <- 0.9 m + 0.1 g,   v <- 0.999 v + 0.001 g^2,
        z <- z - lr lr_factor m' / (sqrt(v') + 1e-8),

    where m', v' are m and v without their bias towards zero. Images, label logits and private tensors have a step size
    lr of their own. Langevin noise, `lr lr_factor langevin N(0, 1)`, is added to images.
    """

    def __init__(self, settings: OptimizerSettings, noise: Sequence[torch.Generator]) -> None:
        self.settings = settings
        self.noise = list(noise)
        self.first_moment: Variables = {}
        self.second_moment: Variables = {}
        self.steps = 0
        self.step_sizes: dict[str, float] = {}

    @property
    def final_phase_start(self) -> int:
        """The iteration from which the step size has all but fallen; 0 where it does not fall."""
        return 0 if self.settings.schedule == "none" else math.ceil(LAST_LR_DROP * self.settings.iterations)

    def lr_factor(self) -> float:
        """Return the share of the step size that the next step takes."""
        settings = self.settings
        done = self.steps / settings.iterations
        factor = 1.0
        if settings.schedule == "step":
            factor = 0.1 ** sum(done >= mark for mark in (3 / 8, 5 / 8, LAST_LR_DROP))
        elif settings.schedule == "cosine":
            factor = settings.last_lr + (1 - settings.last_lr) * (1 + math.cos(math.pi * done)) / 2
        rise = min(settings.warmup, settings.iterations // 2)  # a short search takes steps of the full size as well
        return factor * min(1.0, (self.steps + 1) / (rise + 1))

    def step(self, variables: Variables, grads: Variables) -> Variables:
        """Return the next iterate."""
        factor = self.lr_factor()
        self.steps += 1
        result = {}
        for k, g in grads.items():
            if k == INPUTS and self.settings.signed:
                g = g.sign()
            m = self.first_moment[k] = 0.9 * self.first_moment.get(k, torch.zeros_like(g)) + 0.1 * g
            v = self.second_moment[k] = 0.999 * self.second_moment.get(k, torch.zeros_like(g)) + 0.001 * g * g
            step = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            if k not in self.step_sizes:
                self.step_sizes[k] = self._step_size(k)
            result[k] = variables[k] - self.step_sizes[k] * factor * step
        if self.settings.langevin:
            size = result[INPUTS].shape[1:]
            noise = torch.stack([torch.randn(size, generator=draw) for draw in self.noise]).to(result[INPUTS])
            result[INPUTS] += self.settings.lr * factor * self.settings.langevin * noise
        return result

    def _step_size(self, variable: str) -> float:
        if variable in {INPUTS, LABELS}:
            return self.settings.lr if variable == INPUTS else self.settings.label_lr
        return self.settings.private_step(variable.removeprefix(PRIVATE))

    def select(self, rows: Tensor) -> None:
        """Go on with these trials."""
        self.noise = [self.noise[i] for i in rows.tolist()] if self.noise else []
        self.first_moment = {k: v[rows] for k, v in self.first_moment.items()}
        self.second_moment = {k: v[rows] for k, v in self.second_moment.items()}


class LBFGSOptimizer:
    """L-BFGS over all variables of a trial together, as one vector."""

    final_phase_start = 0

    def __init__(self, settings: OptimizerSettings) -> None:
        self.solver = BatchedLBFGS(settings.history_size, settings.lr, settings.max_step)

    def step(self, variables: Variables, grads: Variables) -> Variables:
        """Return the next iterate."""
        count = len(next(iter(grads.values())))
        step = self.solver.step(torch.cat([g.reshape(count, -1) for g in grads.values()], dim=1))
        parts = step.split([g[0].numel() for g in grads.values()], dim=1)
        return {k: variables[k] + part.view_as(variables[k]) for k, part in zip(grads, parts, strict=True)}

    def select(self, rows: Tensor) -> None:
        """Go on with these trials."""
        self.solver.select(rows)
