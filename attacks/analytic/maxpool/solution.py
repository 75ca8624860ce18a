"""A layer's input, and when to believe it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import LARGEST, SMALLEST, Equations, System
from attacks.analytic.maxpool.refinement import Fit, decided, fit, unbent
from attacks.analytic.maxpool.spd_linalg import Factor

ASTRAY = 1e-3
"""Of the outputs' root mean square: a cell that misses its target by more has not found its position."""
EXACT = 1e-5
"""Equations left unexplained by less than this share are taken for satisfied, in float32."""


@dataclass(frozen=True)
class Doubt:
    """Which numbers of an input are on another level in another one that explains about as much.

    Attributes:
        numbers: which (I, H, W).
        elsewhere: those of them for which it passes on other positions (I, H, W): what inequalities rule out at the
            positions found says nothing of it.
    """

    numbers: Tensor
    elsewhere: Tensor

    @classmethod
    def none(cls, x: Tensor) -> Doubt:
        """Of no number of an input like `x` (I, H, W)."""
        empty = torch.zeros_like(x, dtype=torch.bool)
        return cls(empty, empty)

    @classmethod
    def between(cls, now: Solved, other: Solved) -> Doubt:
        """Of what differs in `other`, which explains about as much."""
        numbers = other.found.x != now.found.x
        moved = (other.found.shares != now.found.shares).any(-1) & now.known.seen  # of others only a bound is known
        return cls(numbers, numbers & moved.any())

    def __or__(self, other: Doubt) -> Doubt:
        """Of both."""
        return Doubt(self.numbers | other.numbers, self.elsewhere | other.elsewhere)


@dataclass(frozen=True)
class Solved:
    """A layer's input with the equations it answers, in which the sides of an activation's bend are settled.

    Attributes:
        known: the equations.
        found: the input, and what it leaves of them.
        fixed: which numbers all inputs on the same levels that explain the equations share, at the positions found
            (I, H, W); None where it was not looked at, or the input is on no levels.
        spread: how far each of them may be off (I, H, W), where that was looked at on the way: by what was left then.
        disputed: which of them are on another level in what explains about as much at other positions (I, H, W), as far
            as that was looked at.
    """

    known: Equations
    found: Fit
    fixed: Tensor | None = None
    spread: Tensor | None = None
    disputed: Tensor | None = None

    @classmethod
    def of(cls, known: Equations, found: Fit) -> Solved:
        """`found` with doubtful outputs on the side that it explains best."""
        return cls(*unbent(known, found))

    def at(self, x: Tensor) -> Solved:
        """The same with another input, at the positions that follow from it."""
        return Solved(self.known, fit(self.known, x, decided(self.known, fit(self.known, x))))

    @property
    def satisfied(self) -> bool:
        """Whether what is known is explained up to rounding, or up to the gradient's own noise."""
        return self.found.error < self.bound

    @property
    def bound(self) -> float:
        """What may be left unexplained, at most, where what is known is explained."""
        return max(EXACT, 5 * self.known.noise)

    @property
    def proven(self) -> bool:
        """Whether all is explained, and by nothing else."""
        return self.satisfied and self.fixed is not None and bool(self.fixed.all())

    @property
    def progress(self) -> str:
        """How far the search got, in words."""
        missed = (self.known.layer.pooled_outputs(self.found.x) - self.known.target).abs()
        far = missed > ASTRAY * self.known.forward_scale + 5 * self.known.loose
        count = int((far & self.known.seen).sum())
        cells = f"{count} of {int(self.known.seen.sum())} pooling cells open, " if self.known.layer.searched else ""
        return f"{cells}{self.found.error:.1e} of the equations unexplained"

    @property
    def signal(self) -> Tensor:
        """What flows back into the input (I, H, W)."""
        layer = self.known.layer
        return layer.pull(layer.placed(self.found.shares * self.known.signal[..., None]))

    def system(self) -> System:
        """The equations at the positions found, each trusted as far as it is explained."""
        known, found = self.known, self.found
        noise = known.deviation(found.x, found.shares, known.residual(found.x, found.shares))
        noise = noise.maximum(known.floor)  # with less, rounding would fill in what no equation determines
        forward = known.forward_scale * max(found.forward, known.noise, SMALLEST)
        return System.of(known, found.shares, noise, forward, fine=True)

    def deviations(self) -> Tensor:
        """How far each number of the input may be off (I, H, W), from how far the equations are and how they hang.

        As it was seen on the way, if it was.
        """
        if self.spread is not None:
            return self.spread
        found, matrix = self.found, self.system().dense()
        matrix.diagonal().add_(1e-15 * matrix.diagonal().mean())
        factor = Factor.of(matrix)
        if factor is None:
            return torch.full_like(found.x, float("inf"))
        return factor.variances().sqrt().view_as(found.x)

    def off(self, most: float = 30.0) -> Tensor:
        """How far each number of the input may be off (I, H, W), relative to their root mean square.

        From the gradient's equations alone, which keep channels apart; where these leave a number open, or
        too nearly so (`most` times), it is the share of the equations left unexplained. Where no positions are in
        question, and there are few enough numbers, from all; then what is not known at all is off by as much as it is.
        """
        if not self.known.layer.searched and self.found.x.numel() <= LARGEST:
            return (self.deviations() / self.found.x.square().mean().sqrt()).nan_to_num(1.0).clamp_max(1.0)
        left = max(self.found.gradient, self.known.noise)
        matrix = self.system().plane
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed.any()):
            return torch.full_like(self.found.x, left)
        alone = torch.cholesky_inverse(factor).diagonal(dim1=-2, dim2=-1).sqrt() / self.found.x.square().mean().sqrt()
        alone = torch.where(alone < most * left, alone, left)
        return alone.view(-1, *self.found.x.shape[1:]).expand_as(self.found.x)

    def doubted(self, doubt: Doubt, before: Solved | None = None) -> Solved:
        """The same with nothing fixed that is in doubt, nor what was not fixed or was disputed `before`."""
        fixed, disputed = self.fixed, doubt.elsewhere
        for one in (self, before):
            if one is not None and one.disputed is not None:
                disputed = disputed | one.disputed
        if fixed is not None:
            fixed = fixed & ~doubt.numbers & ~disputed
            fixed = fixed if before is None or before.fixed is None else fixed & before.fixed
        return replace(self, fixed=fixed, disputed=disputed)

    def better(self, other: Solved | None) -> Solved:
        """The one that leaves less unexplained."""
        return self if other is None or self.found.error < other.found.error else other
