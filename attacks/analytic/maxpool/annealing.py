"""Which position of each cell was passed on, by annealed variational expectation-maximisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import SMALLEST, Equations, Preconditioner, Prior, System

STILL = 1e-3
"""Change of the probabilities over a stretch in which X did not move, times its temperature: about the evidence,
below which colder ones would change little."""


def temperatures(first: float, factor: float) -> list[float]:
    """A falling sequence from `first` to 1, which is held for a while."""
    falling = []
    while first > 1:
        falling.append(first)
        first *= factor
    return [*falling, *[1.0] * 6]


@dataclass(frozen=True)
class Start:
    """Where an annealing begins.

    Attributes:
        x: (I, H, W).
        shares: probability of every position (O, K, P).
        noise: standard deviation of each filter's gradient equations (O,).
        forward: standard deviation of the forward equations.
    """

    x: Tensor
    shares: Tensor
    noise: Tensor
    forward: Tensor

    @classmethod
    def blank(cls, known: Equations) -> Start:
        """Nothing known."""
        x = known.layer.weight.new_zeros(known.layer.shape)
        return cls(x, known.start, known.gradient_scale, known.forward_scale)


def anneal(
    known: Equations,
    temperatures: Sequence[float],
    done: Callable[[Tensor], bool],
    *,
    steps: int = 2,
    start: Start | None = None,
    prior: Prior | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer's input X (I, H, W) and the probability of every position (O, K, P).

    Alternates X, the mean given the positions' probabilities, with the probabilities given X. Each filter has a noise
    of its own, estimated anew in every step: filters whose positions are right become exact equations, X follows
    from them, and the rest with it. High temperatures keep all positions open at first.

    Args:
        known: the layer's equations.
        temperatures: one per stretch.
        done: tells from X whether the search is over.
        steps: per stretch.
        start: where to begin; None is nothing known and every position alike.
        prior: what is expected of X beside the equations.
    """
    start = Start.blank(known) if start is None else start
    x, shares, noise, forward = start.x, start.shares, start.noise, start.forward
    preconditioner: Preconditioner = "mean" if prior is None else "channels"
    exceeded = None
    for temperature in temperatures:
        before = x, shares
        for _ in range(steps):
            x = System.of(known, shares, noise, forward, exceeded, prior).solve(x, preconditioner=preconditioner)
            excess = known.excess(x)
            shares, left = _expected(known, x, excess, shares, noise, forward, temperature)
            exceeded = (excess > 0).to(shares)
            noise = known.deviation(x, shares, left).maximum(known.floor)
            missed = known.average((shares * excess.square()).sum(-1)).sqrt()
            forward = missed.clamp_min(SMALLEST * known.forward_scale)
        if done(x) or (torch.equal(x, before[0]) and bool(temperature * (shares - before[1]).abs().max() < STILL)):
            break
    return x, shares


def _expected(
    known: Equations, x: Tensor, excess: Tensor, shares: Tensor, noise: Tensor, forward: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Probabilities cell after cell, each given the others' (O, K, P), and what of the gradient is left (O, M)."""
    cells = known.layer.patches(x)[known.layer.cells]  # (K, P, M)
    above = excess.clamp_min(0).square()
    missed = excess.square() * known.seen[..., None] + above * ~known.seen[..., None]
    energy = (missed + above.sum(-1, keepdim=True) - above) / (2 * (forward**2 + known.loose**2)[..., None])
    within = cells @ cells.mT  # (K, P, P)
    weight = known.signal / noise.square()[:, None]
    against = energy + 0.5 * (known.signal * weight)[..., None] * within.diagonal(dim1=1, dim2=2)
    left, shares = known.residual(x, shares), shares.clone()
    for _ in range(2):
        for k in range(cells.shape[0]):
            signal, before = known.signal[:, k, None], shares[:, k]
            along = left @ cells[k].mT + signal * (before @ within[k])  # of what is left without this cell
            now = torch.softmax((weight[:, k, None] * along - against[:, k]) / temperature, -1)
            left.addmm_(signal * (before - now), cells[k])
            shares[:, k] = now
    return shares, left
