"""The input of a convolution from what is known of it: which of the ways to take, and when to believe the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attacks.exact.annealing import SMALLEST, Start, anneal, temperatures
from attacks.exact.equations import Equations, Prior, System
from attacks.exact.polish import Fit, fit, settle, unbent
from attacks.exact.propagation import Schedule, State, image_prior, propagate
from attacks.exact.rowspace import from_rows

EXACT = 1e-5
"""Equations left unexplained by less than this share are taken for satisfied, in float32."""

COOLING = ((30.0, 0.65), (100.0, 0.75), (300.0, 0.85))
"""First temperature and factor of one annealing after the other, each slower."""

SCHEDULES = (
    Schedule(),
    Schedule(deviation=0.6, joint_from=1, noise=0.1, damping=0.3, factor=0.7),
    Schedule(deviation=0.6, joint_from=1, noise=1.0, damping=0.2, factor=0.75, iterations=60),
)
"""Of the propagation: each starts wider and moves more slowly than the one before."""


@dataclass(frozen=True)
class Solved:
    """A layer's input with the equations it answers, in which the sides of an activation's bend are settled.

    Attributes:
        known: the equations.
        found: the input, and what it leaves of them.
    """

    known: Equations
    found: Fit

    @classmethod
    def of(cls, known: Equations, found: Fit) -> Solved:
        """`found` with doubtful outputs on the side that it explains best."""
        return cls(*unbent(known, found))

    @property
    def satisfied(self) -> bool:
        """Whether what is known is explained up to rounding, or up to the gradient's own noise."""
        return self.found.error < max(EXACT, 10 * self.known.noise)

    @property
    def signal(self) -> Tensor:
        """What flows back into the input (I, H, W)."""
        layer = self.known.layer
        return layer.pull(layer.placed(self.found.shares * self.known.signal[..., None]))

    def deviations(self) -> Tensor:
        """How far each number of the input may be off (I, H, W), from how far the equations are and how they hang."""
        known, found = self.known, self.found
        noise = known.deviation(found.x, found.shares, known.residual(found.x, found.shares))
        least = max(known.noise, SMALLEST)  # with less, rounding would fill in what no equation determines
        noise = noise.maximum(least * known.gradient_scale)
        forward = known.forward_scale * max(found.forward, least)
        system = System.of(known, found.shares, noise, forward)
        matrix = system.dense()
        matrix.diagonal().add_(1e-15 * matrix.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed):
            return torch.full_like(found.x, float("inf"))
        return torch.cholesky_inverse(factor).diagonal().sqrt().view_as(found.x)

    def better(self, other: Solved | None) -> Solved:
        """The one that leaves less unexplained."""
        return self if other is None or self.found.error < other.found.error else other


def solve(known: Equations, statistics: tuple[Tensor, Tensor] | None = None) -> Solved:
    """The input of a convolution.

    Args:
        known: the layer's equations.
        statistics: mean and standard deviation (I,) of an image's normalisation for the first layer of a network; None
            for one further up, of whose input nothing is expected.
    """
    if not known.layer.searched:
        prior = None if statistics is None else image_prior(known.layer.shape, *statistics, 0.3).weakened(1e-5)
        return Solved.of(known, settle(known, known.layer.weight.new_zeros(known.layer.shape), prior=prior))
    return _hidden(known) if statistics is None else _pixels(known, *statistics)


def _hidden(known: Equations) -> Solved:
    closed = from_rows(known)
    best = None if closed is None else Solved.of(known, settle(known, closed))
    for first, factor in COOLING:
        if best is not None and best.satisfied:
            break
        x, _ = anneal(known, temperatures(first, factor), partial(_close, known))
        best = Solved.of(known, settle(known, x)).better(best)
    assert best is not None
    return best


def _pixels(known: Equations, mean: Tensor, std: Tensor) -> Solved:
    best: Solved | None = None
    for schedule in SCHEDULES:
        prior = image_prior(known.layer.shape, mean, std, schedule.deviation)
        best = _propagated(known, prior, schedule).better(best)
        if best.satisfied:
            break
    assert best is not None
    return best


def _propagated(known: Equations, prior: Prior, schedule: Schedule) -> Solved:
    """The best of the propagation's means and of what they lead to."""
    unknown = known.layer.shape[0] * known.layer.shape[1] * known.layer.shape[2]
    # where the outputs alone are more than enough, positions follow from a rough image
    attempt = 2e-2 if int(known.seen.sum()) > 2 * unknown else 1.5e-3
    best: Solved | None = None
    nearest, since = State.first(known), 0
    for state in propagate(known, prior, schedule):
        since = 0 if state.error < nearest.error else since + 1
        nearest = state if since == 0 else nearest
        if since > 4 or not state.error < 5 * nearest.error:
            break
        if state.error < attempt:
            attempt = state.error / 2
            best = _finished(known, state, prior).better(Solved(known, fit(known, state.mean)).better(best))
            if best.satisfied:
                break
    return best or _finished(known, nearest, prior)


def _finished(known: Equations, state: State, prior: Prior) -> Solved:
    """What soft and hard positions in turn make of a propagation's state, for as long as it gets better."""
    start = Start(state.mean, state.shares, state.left, known.forward_scale * state.error)
    best: Solved | None = None
    while True:
        close = partial(_close, known)
        x, shares = anneal(known, [1.0] * 4, close, steps=1, start=start, prior=prior.weakened(1e-3))
        now = Solved.of(known, settle(known, x, rounds=3, prior=prior.weakened(1e-5)))
        if best is not None and not now.found.error < 0.7 * best.found.error:
            return now.better(best)
        best, known, found = now, now.known, now.found
        if best.satisfied:
            return best
        noise = known.deviation(found.x, shares, known.residual(found.x, shares))
        start = Start(found.x, shares, noise, known.forward_scale * found.forward)


def _close(known: Equations, x: Tensor) -> bool:
    found = fit(known, x)
    return found.gradient < 1e-3 and found.forward < 1e-3
