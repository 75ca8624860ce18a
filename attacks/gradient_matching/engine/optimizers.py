"""How a search moves from one iterate to the next, row by row of a stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from attacks.gradient_matching.engine.lbfgs import StackedLBFGS
from attacks.gradient_matching.engine.problem import INPUTS, LABELS, PRIVATE, Variables

LAST_FALL = 7 / 8
"""Share of a search after which the step size falls for the last time."""


class Settings(Protocol):
    """What an optimizer asks of a search's settings (`attacks.gradient_matching.engine.base.Matching`)."""

    @property
    def iterations(self) -> int:
        """Length of the search."""

    @property
    def schedule(self) -> str:
        """How the step size falls: none, step or cosine."""

    @property
    def lr(self) -> float:
        """Step size of images."""

    @property
    def last_lr(self) -> float:
        """Share of the step size at the end of a cosine."""

    @property
    def label_lr(self) -> float:
        """Step size of labels."""

    @property
    def warmup(self) -> int:
        """Iterations in which the step size rises."""

    @property
    def signed(self) -> bool:
        """Whether images move by the signs of their gradient."""

    @property
    def langevin(self) -> float:
        """Noise of each step, as a share of the step size."""

    @property
    def history(self) -> int:
        """Steps that L-BFGS remembers."""

    @property
    def max_step(self) -> float:
        """Longest step of L-BFGS."""

    def private_step(self, name: str) -> float:
        """Step size of a private tensor."""


class Adam:
    """Adam, row by row; images optionally by sign, everything else at its own step size."""

    def __init__(self, settings: Settings, noise: Sequence[torch.Generator]) -> None:
        self.settings = settings
        self.noise = list(noise)
        self.first: Variables = {}
        self.second: Variables = {}
        self.steps = 0
        self.sizes: dict[str, float] = {}

    @property
    def settled(self) -> int:
        """The iteration from which the step size has all but fallen; 0 where it does not fall."""
        return 0 if self.settings.schedule == "none" else math.ceil(LAST_FALL * self.settings.iterations)

    def factor(self) -> float:
        """The share of the step size that the next step takes."""
        settings = self.settings
        done = self.steps / settings.iterations
        factor = 1.0
        if settings.schedule == "step":
            factor = 0.1 ** sum(done >= mark for mark in (3 / 8, 5 / 8, LAST_FALL))
        elif settings.schedule == "cosine":
            factor = settings.last_lr + (1 - settings.last_lr) * (1 + math.cos(math.pi * done)) / 2
        rise = min(settings.warmup, settings.iterations // 2)  # a short search takes steps of the full size as well
        return factor * min(1.0, (self.steps + 1) / (rise + 1))

    def move(self, variables: Variables, grads: Variables) -> Variables:
        """The next iterate."""
        factor = self.factor()
        self.steps += 1
        result = {}
        for k, g in grads.items():
            if k == INPUTS and self.settings.signed:
                g = g.sign()
            m = self.first[k] = 0.9 * self.first.get(k, torch.zeros_like(g)) + 0.1 * g
            v = self.second[k] = 0.999 * self.second.get(k, torch.zeros_like(g)) + 0.001 * g * g
            step = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            if k not in self.sizes:
                self.sizes[k] = self._size(k)
            result[k] = variables[k] - self.sizes[k] * factor * step
        if self.settings.langevin:
            size = result[INPUTS].shape[1:]
            noise = torch.stack([torch.randn(size, generator=draw) for draw in self.noise]).to(result[INPUTS])
            result[INPUTS] += self.settings.lr * factor * self.settings.langevin * noise
        return result

    def _size(self, variable: str) -> float:
        """The step size of a variable."""
        if variable in {INPUTS, LABELS}:
            return self.settings.lr if variable == INPUTS else self.settings.label_lr
        return self.settings.private_step(variable.removeprefix(PRIVATE))

    def keep(self, rows: Tensor) -> None:
        """Go on with these trials."""
        self.noise = [self.noise[i] for i in rows.tolist()] if self.noise else []
        self.first = {k: v[rows] for k, v in self.first.items()}
        self.second = {k: v[rows] for k, v in self.second.items()}


class Quasi:
    """L-BFGS over all variables of a trial together."""

    settled = 0

    def __init__(self, settings: Settings) -> None:
        self.solver = StackedLBFGS(settings.history, settings.lr, settings.max_step)

    def move(self, variables: Variables, grads: Variables) -> Variables:
        """The next iterate."""
        count = len(next(iter(grads.values())))
        move = self.solver.step(torch.cat([g.reshape(count, -1) for g in grads.values()], dim=1))
        parts = move.split([g[0].numel() for g in grads.values()], dim=1)
        return {k: variables[k] + part.view_as(variables[k]) for k, part in zip(grads, parts, strict=True)}

    def keep(self, rows: Tensor) -> None:
        """Go on with these trials."""
        self.solver.keep(rows)
