"""Single places of an image: all levels that the channels of a pixel may be on, one combination after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.exact.decode import judged
from attacks.exact.equations import Prior
from attacks.exact.fixed import ON
from attacks.exact.flat import APART
from attacks.exact.levels import Levels
from attacks.exact.likely import LEAST, deviation, misfit, usual
from attacks.exact.solved import Solved

LOOSE = 1 / 6
"""Standard deviation, in steps between two levels, from which a place is looked at."""
MANY = 6
"""Places looked at, the loosest first."""
ROUNDS = 4
"""Times that all of them are gone through at most."""
WIDE = 4.0
"""Standard deviations by which the channels of a pixel may be away from what the other pixels lead to expect."""
MOST, AT_ONCE = 250_000, 4096
"""Combinations tried of one place, and computed together."""
KEPT, TRIED = 2000, 4
"""Combinations whose outputs are likeliest, and of these what is tried on the equations themselves."""


def revised(now: Solved, prior: Prior, levels: Levels) -> Solved:
    """The same with single pixels on the likeliest of all their levels, where the equations leave something open.

    In a corner one output of each filter sees a pixel, and pooling passes few of these on: what others were no larger
    than is an inequality, which tells something too, but no step from a neighbouring solution finds. All channels of
    one place are few enough to go through what they may be, with the positions that follow from it.

    Args:
        now: a solution near the truth.
        prior: what is expected of the input.
        levels: of its pixels.

    Returns:
        `now` itself where it is on no levels, or nothing is likelier. A pixel that is on another level where about as
        much is explained is not fixed.
    """
    even = bool(((now.found.x - levels.nearest(now.found.x)).abs() < ON * levels.step).all())
    if not now.satisfied or not now.known.layer.searched or not even:
        return now
    loose = (now.deviations() / levels.step).amax(0).flatten()
    places = loose.argsort(descending=True)[: min(MANY, int((loose > LOOSE).sum()))].tolist()
    best, opened = now, torch.zeros_like(now.found.x, dtype=torch.bool)
    for _ in range(ROUNDS):
        before = best
        for place in places:
            best = _likeliest(best, prior, levels, place, opened)
        if best is before:
            break
    if now.fixed is not None and torch.equal(best.found.shares, now.found.shares):  # fixed by the same equations
        best = replace(best, fixed=now.fixed & (best.found.x == now.found.x), spread=now.spread)
    elif best is not now:
        best = judged(best, levels)
    return best if best.fixed is None else replace(best, fixed=best.fixed & ~opened)


def _likeliest(now: Solved, prior: Prior, levels: Levels, place: int, opened: Tensor) -> Solved:
    """The likeliest that a change of one place leads to; notes in `opened` what explains about as much."""
    scale = usual(now.known, now.found)
    around = Place(now, prior, levels, place, scale)
    told = misfit(now.known, now.found, scale)
    best, least, number = now, told + prior.against(now.found.x), levels.number(now.found.x)
    row, column = divmod(place, now.found.x.shape[2])
    for steps in around.likeliest():
        other = number.clone()
        other[:, row, column] += steps
        found = now.at(levels.values(other))
        explained = misfit(found.known, found.found, scale)
        if explained < told + APART**2:
            opened |= other != number
        if explained + prior.against(found.found.x) < least and found.satisfied:
            least, best = explained + prior.against(found.found.x), found
    return best


@dataclass(frozen=True)
class Place:
    """What the channels of one pixel change, in whole steps, if all others stay.

    Attributes:
        now: the solution.
        prior: what is expected of the input.
        levels: of its pixels.
        place: which pixel, counted along the plane.
        scale: by how much outputs miss their targets as a rule, in standard deviations.
    """

    now: Solved
    prior: Prior
    levels: Levels
    place: int
    scale: float

    def likeliest(self) -> list[Tensor]:
        """Steps of each channel (I,), the likeliest first; never none at all."""
        steps = self._combinations
        missed = torch.cat([self._missed(part) for part in steps.split(AT_ONCE)])
        score = missed + self._unexpected(steps)
        kept = score.argsort()[:KEPT]
        steps = steps[kept]
        score = score[kept] + torch.cat([self._unexplained(part) for part in steps.split(AT_ONCE // 64)])
        order = [steps[i] for i in score.argsort().tolist()[: TRIED + 1]]
        return [found for found in order if bool(found.any())][:TRIED]

    @cached_property
    def _step(self) -> Tensor:
        """Between neighbouring levels (I,)."""
        return self.levels.step.flatten()

    @cached_property
    def _own(self) -> tuple[Tensor, Tensor]:
        """Precision (I, I), and precision times mean (I,), that the other pixels lead to expect, in steps from now."""
        x, step, prior = self.now.found.x.flatten(1), self._step, self.prior
        precision = prior.channels * prior.pixels[self.place, self.place]
        pulled = (prior.right - prior @ x)[:, self.place]
        return precision * step[:, None] * step, pulled * step

    @cached_property
    def _combinations(self) -> Tensor:
        """Steps (n, I) within what is expected, and none at all."""
        precision, pulled = self._own
        covariance = torch.linalg.inv(precision)
        centre, spread = covariance @ pulled, covariance.diagonal().sqrt()
        number = self.levels.number(self.now.found.x).flatten(1)[:, self.place]
        most = int((MOST / max(len(self._cells), 1)) ** (1 / len(centre)))
        ranges = []
        for middle, width, own in zip(centre.tolist(), spread.tolist(), number.tolist(), strict=True):
            reach = min(WIDE * width, most / 2)
            low = max(math.floor(middle - reach), -int(own))
            high = min(math.ceil(middle + reach), self.levels.count - 1 - int(own))
            inside = torch.arange(min(low, high), max(low, high) + 1).to(centre)
            ranges.append(inside if 0 in inside else torch.cat([inside, inside.new_zeros(1)]))
        return torch.cartesian_prod(*ranges).view(-1, len(centre))

    @cached_property
    def _units(self) -> Tensor:
        """What a step of each channel adds to the patches (L, M, I)."""
        units = torch.zeros(len(self._step), *self.now.found.x.shape).to(self._step)
        units.flatten(2)[torch.arange(len(units)), torch.arange(len(units)), self.place] = self._step
        return torch.stack([self.now.known.layer.patches(x) for x in units], -1)

    @cached_property
    def _cells(self) -> Tensor:
        """The cells that see the place (k,)."""
        seen = self._units.abs().flatten(1).sum(1) > 0
        return seen[self.now.known.layer.cells].any(1).nonzero().flatten()

    @cached_property
    def _added(self) -> Tensor:
        """What a step of each channel adds to the patches of these cells (k, P, M, I)."""
        return self._units[self.now.known.layer.cells[self._cells]]

    def _excess(self, steps: Tensor) -> Tensor:
        """How far the outputs exceed their cells' targets (n, O, k, P)."""
        known = self.now.known
        slope = torch.einsum("om,kpmi->okpi", known.layer.filters, self._added)
        return known.excess(self.now.found.x)[:, self._cells] + torch.einsum("okpi,ni->nokp", slope, steps)

    def _missed(self, steps: Tensor) -> Tensor:
        """What these steps (n, I) leave of the outputs (n,), as `misfit` counts it."""
        known, cells = self.now.known, self._cells
        off = self._excess(steps).amax(-1)
        off = torch.where(known.seen[:, cells], off, off.clamp_min(0)) / (deviation(known)[:, cells] * self.scale)
        return 2 * torch.log1p(off.square()).sum((1, 2))

    def _unexpected(self, steps: Tensor) -> Tensor:
        """What speaks against these steps (n, I) beforehand (n,)."""
        precision, pulled = self._own
        return ((steps @ precision - 2 * pulled) * steps).sum(-1)

    def _unexplained(self, steps: Tensor) -> Tensor:
        """What these steps (n, I) leave of the gradient (n,), as `misfit` counts it."""
        known, found, cells = self.now.known, self.now.found, self._cells
        patches = known.layer.patches(found.x)[known.layer.cells[cells]]  # (k, P, M)
        signal = known.signal[:, cells]
        taken = self._excess(steps).argmax(-1)  # (n, O, k)
        each = torch.arange(len(cells)).to(taken)
        before = torch.einsum("okp,kpm->okm", found.shares[:, cells], patches)
        moved = patches[each, taken] - before + torch.einsum("nokmi,ni->nokm", self._added[each, taken], steps)
        left = known.residual(found.x, found.shares) - torch.einsum("ok,nokm->nom", signal, moved)
        return known.gradient.shape[1] * torch.log((left.square() / known.rounded).mean(-1) + LEAST).sum(-1)
