"""The last step to rounding: positions taken for certain, one linear system, and a check that needs no truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks.analytic.maxpool.equations import SMALLEST, Equations, Preconditioner, Prior, System
from attacks.analytic.maxpool.position_flips import Flips

TIE = 1e-5
"""Of the outputs' root mean square: two positions that differ by less are equal but for rounding."""
AT_ONCE = 2**24
"""Numbers of patches, at most, for as many filters as are decided at once; for one filter it may be more."""


@dataclass(frozen=True)
class Fit:
    """An input of the layer, and how well it explains what is known.

    Attributes:
        x: (I, H, W).
        shares: 1 at the positions it passes on (O, K, P).
        gradient: what it leaves of the gradient, relative to it.
        forward: what it leaves of the pooled outputs, relative to them.
    """

    x: Tensor
    shares: Tensor
    gradient: float
    forward: float

    @property
    def error(self) -> float:
        """Both together; what is not a number is worst."""
        total = self.gradient + self.forward
        return total if total == total else float("inf")


def fit(known: Equations, x: Tensor, shares: Tensor | None = None) -> Fit:
    """`x` with the positions it passes on itself, or with `shares` for the gradient."""
    shares = passed(known, x) if shares is None else shares
    missed = known.layer.pooled_outputs(x) - known.target
    missed = torch.where(known.seen, missed, missed.clamp_min(0))
    left = known.residual(x, shares)
    gradient = float(left.norm() / known.gradient.norm())
    return Fit(x, shares, gradient, float(known.average(missed.square()).sqrt() / known.forward_scale))


def explained(known: Equations, x: Tensor) -> Fit:
    """`x` with the positions it passes on, or, if that explains more, with near ties as the gradient has them."""
    own = fit(known, x)
    told = fit(known, x, decided(known, own))
    return told if told.error < own.error else own


def passed(known: Equations, x: Tensor) -> Tensor:
    """1 at the first position of each cell whose output is the largest up to rounding (O, K, P)."""
    if not known.layer.searched:
        return known.start
    outputs = known.layer.outputs(x)
    largest = outputs >= outputs.amax(-1, keepdim=True) - TIE * known.forward_scale
    return one_hot(largest.long().argmax(-1), outputs.shape[-1]).to(x)


def settle(known: Equations, x: Tensor, rounds: int = 8, prior: Prior | None = None, within: float = math.inf) -> Fit:
    """The best of: `x`, and the solutions of the linear systems of the positions found so far.

    Filters that the gradient confirms are trusted up to rounding, the others by what they leave; where two positions
    of a cell are close enough to be mistaken, the gradient decides. Of a layer without positions every system changes
    only how far filters are trusted, from `solvable` on.

    Args:
        known: the layer's equations.
        x: where to begin.
        rounds: linear systems at most.
        prior: what is expected of X beside them.
        within: what the solution of a system may leave unexplained for another one to follow.
    """
    best = now = fit(known, x)
    tried: list[Tensor] = []
    for _ in range(rounds):
        shares = decided(known, now)
        if known.layer.searched and any(torch.equal(shares, other) for other in tried):
            break
        tried.append(shares)
        system = system_of(known, replace(now, shares=shares), prior)
        by: Preconditioner = "whole" if prior is not None or not known.layer.searched else "channels"
        now = explained(known, system.solve(now.x, 1e-12 if prior is None else 1e-6, preconditioner=by))
        if not now.error < min(0.9 * best.error, within):
            return now if now.error < best.error else best
        best = now
    return best


def solvable(known: Equations, prior: Prior | None = None) -> Fit:
    """The input of a layer without positions where its equations are off by rounding alone, as they mostly are.

    Trusted less at the start, the gradient would win that trust back only slowly: the outputs, often as many as there
    are unknowns, are explained by what leaves a thousandth of it.
    """
    noise = known.floor.expand(len(known.gradient))
    system = System.of(known, known.start, noise, SMALLEST * known.forward_scale, prior=prior, fine=True)
    return fit(known, system.solve(known.layer.weight.new_zeros(known.layer.shape), 1e-12, preconditioner="whole"))


def system_of(known: Equations, now: Fit, prior: Prior | None = None) -> System:
    """The linear system of the positions in `now`, each filter trusted as far as the gradient confirms it."""
    left = known.residual(now.x, now.shares).square().mean(1).sqrt()
    noise = left.maximum(known.floor)
    forward = known.forward_scale * min(max(now.forward, 1e-6), 1e-4)
    return System.of(known, now.shares, noise, forward, prior=prior, fine=True)


def unbent(known: Equations, found: Fit) -> tuple[Equations, Fit]:
    """The same with outputs moved to the other side of the activation's bend where that explains the gradient better.

    Outputs too small for their sign to be known give their filter a signal that is off by the ratio of the two slopes.
    """
    doubtful = known.doubt != 1
    cells = torch.einsum("okp,kpm->okm", found.shares, known.layer.patches(found.x)[known.layer.cells])
    left = known.residual(found.x, found.shares)
    factor = torch.ones_like(known.signal)
    for o in doubtful.any(1).nonzero().flatten().tolist():
        at = doubtful[o].nonzero().flatten()
        for _ in range(len(at)):
            change = known.signal[o, at] * factor[o, at] * (_other(known.doubt[o, at], factor[o, at]) - 1)
            after = (left[o] - change[:, None] * cells[o, at]).square().sum(-1)
            best = int(after.argmin())
            if not after[best] < 0.5 * left[o].square().sum():
                break
            left[o] -= change[best] * cells[o, at[best]]
            factor[o, at[best]] *= _other(known.doubt[o, at[best]], factor[o, at[best]])
    if bool((factor == 1).all()):
        return known, found
    moved = replace(known, signal=known.signal * factor, target=known.target / factor, loose=known.loose / factor)
    return moved, fit(moved, found.x, found.shares)


def _other(doubt: Tensor, factor: Tensor) -> Tensor:
    """What moves an output to the other side of the bend, from the side it is on."""
    return torch.where(factor == 1, doubt, 1 / doubt)


def decided(known: Equations, now: Fit, tries: int = 64) -> Tensor:
    """The positions of `now` (O, K, P), with those changed that are nearly as large and explain the gradient better."""
    if not known.layer.searched:
        return now.shares
    outputs = known.layer.outputs(now.x)
    reach = (10 * max(now.forward, 1e-6)) * known.forward_scale
    near = outputs >= outputs.amax(-1, keepdim=True) - reach
    cells = known.layer.patches(now.x)[known.layer.cells]
    shares, left = now.shares.clone(), known.residual(now.x, now.shares)
    near &= near.sum(-1, keepdim=True) > 1
    for some in torch.arange(len(near), device=near.device).split(max(1, AT_ONCE // cells.numel())):
        asked = torch.zeros_like(near)
        asked[some] = near[some]
        flips = Flips.of(asked, shares, cells, known.signal, left, 1e-6 * known.gradient_scale)
        for _ in range(tries):
            made = flips.best()
            if made is None:
                break
            flips, filters, at, position = made
            shares[filters, at] = one_hot(position, shares.shape[-1]).to(shares)
    return shares
