"""Single places of an image: the levels that the channels of a pixel may be on, one combination after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import LARGEST, Prior
from attacks.analytic.maxpool.integer_decoding import LOOSE, WORSE, judged
from attacks.analytic.maxpool.likelihood import APART, LEAST, deviation, likeliest, usual
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.refinement import TIE
from attacks.analytic.maxpool.solution import Doubt, Solved

MANY = 6
"""Places looked at, the loosest first, of those that have a number left loose by `decode`."""
ROUNDS = 4
"""Times that all of them are gone through at most."""
WIDE = 4.0
"""Standard deviations by which the channels of a pixel may be away from what the other pixels lead to expect."""
MOST = 250_000
"""Combinations of levels looked at of one place that one cell sees, fewer where several do."""
KEPT, TRIED = 500, 4
"""Combinations whose outputs and whose being expected are likeliest, and of these what is tried on the equations."""
AT_ONCE = 4_000_000
"""Numbers computed together."""


def revised(now: Solved, prior: Prior, levels: Levels) -> Solved:
    """The same with its loosest pixels on the likeliest levels around what is expected, where equations leave a choice.

    In a corner few outputs see a pixel (without padding one of each filter), and pooling passes few of these on: what
    others were no larger than is an inequality, which tells something too, but no step from a neighbouring solution
    finds. All channels of one place are few enough to go through what they may be, with the positions that follow.

    Args:
        now: a solution near the truth.
        prior: what is expected of the input.
        levels: of its pixels.

    Returns:
        `now` itself where nothing is searched for, it is on no levels, or its equations stay unsatisfied. Of others, a
        pixel that is on another level where about as much is explained is not fixed, and nothing is that was not; of
        what is unlikely beforehand not all is looked at.
    """
    known, x = now.known, now.found.x
    if not known.layer.searched or not levels.hold(x) or x.numel() > LARGEST:
        return now
    allowed = now.bound if now.satisfied else WORSE * now.found.error
    loose = (now.deviations() / levels.step).amax(0).flatten()
    places = loose.argsort(descending=True)[: min(MANY, int((loose > LOOSE).sum()))].tolist()
    best, doubt = now, Doubt.none(x)
    for _ in range(ROUNDS):
        before = best
        for place in places:
            around = Place(best, prior, levels, place)
            doubt |= around.doubt
            best, more = likeliest(best, around.others(), prior, allowed)
            doubt |= more
        if best is before:
            break
    if not best.satisfied:
        return now
    if best is not now or now.fixed is None:
        best = judged(best, levels)
    return best.doubted(doubt, now)  # what was open stays so


@dataclass(frozen=True)
class Place:
    """What the channels of one pixel change, in whole steps, if all others stay.

    Attributes:
        now: the solution.
        prior: what is expected of the input.
        levels: of its pixels.
        place: which pixel, counted along the plane.
    """

    now: Solved
    prior: Prior
    levels: Levels
    place: int

    def others(self) -> Iterator[Solved]:
        """What the likeliest steps lead to."""
        steps, explained = self._explained
        order = steps[(explained + self._unexpected(steps)).argsort()]
        number, (row, column) = self.levels.number(self.now.found.x), divmod(self.place, self.now.found.x.shape[2])
        for step in order[order.any(1)][:TRIED]:
            other = number.clone()
            other[:, row, column] += step
            yield self.now.at(self.levels.values(other))

    @property
    def doubt(self) -> Doubt:
        """Of the numbers that are on another level where about as much is explained."""
        steps, explained = self._explained
        as_much = steps[explained < explained[~steps.any(1)] + APART**2]
        taken = self.now.found.shares[:, self._cells].argmax(-1)

        def elsewhere(part: Tensor) -> Tensor:
            return ((self._taken(part) != taken) & self.now.known.seen[:, self._cells]).flatten(1).any(1)

        moved = self._in_parts(elsewhere, as_much, self._added.shape[1])
        return Doubt(self._at((as_much != 0).any(0)), self._at((as_much[moved] != 0).any(0)))

    def _at(self, channels: Tensor) -> Tensor:
        """Those numbers of the input that are of the place and of some of its `channels` (I,): (I, H, W)."""
        result = torch.zeros_like(self.now.found.x, dtype=torch.bool)
        result.flatten(1)[:, self.place] = channels
        return result

    @cached_property
    def _explained(self) -> tuple[Tensor, Tensor]:
        """The likeliest steps (n, I), with none at all, and what they leave (n,), as `misfit` counts it."""
        steps = self._combinations
        missed = self._in_parts(self._missed, steps, self._added.shape[1])
        order = (missed + self._unexpected(steps)).argsort()
        kept = torch.cat([order[:KEPT], (~steps.any(1)).nonzero().flatten()]).unique()
        return steps[kept], missed[kept] + self._in_parts(
            self._unexplained, steps[kept], math.prod(self._added.shape[2:])
        )

    def _in_parts(self, measure: Callable[[Tensor], Tensor], steps: Tensor, size: int) -> Tensor:
        """A measure of steps (n, I), of which each takes as many numbers as `size` for each output of these cells."""
        count = max(1, AT_ONCE // max(len(self.now.known.signal) * len(self._cells) * size, 1))
        return torch.cat([measure(part) for part in steps.split(count)])

    @cached_property
    def _scale(self) -> float:
        return usual(self.now.known, self.now.found)

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Those of the input that are moved (I,), and by how much in a step."""
        channels, plane = len(self.now.found.x), self.now.found.x[0].numel()
        return torch.arange(channels) * plane + self.place, self.levels.step.flatten()

    @cached_property
    def _own(self) -> tuple[Tensor, Tensor]:
        """Precision (I, I), and precision times mean (I,), that the other pixels lead to expect, in steps from now."""
        return self.prior.around(self.now.found.x, *self._numbers)

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
            least, top = -int(own), self.levels.count - 1 - int(own)
            low = min(max(math.floor(middle - reach), least), top)
            high = max(min(math.ceil(middle + reach), top), least)
            inside = torch.arange(low, high + 1).to(centre)
            ranges.append(inside if 0 in inside else torch.cat([inside, inside.new_zeros(1)]))
        return torch.cartesian_prod(*ranges).view(-1, len(centre))

    @cached_property
    def _units(self) -> Tensor:
        """What a step of each channel adds to the patches (L, M, I)."""
        return self.now.known.layer.moved(*self._numbers)

    @cached_property
    def _cells(self) -> Tensor:
        """The cells that see the place (k,)."""
        seen = self._units.abs().flatten(1).sum(1) > 0
        return seen[self.now.known.layer.cells].any(1).nonzero().flatten()

    @cached_property
    def _added(self) -> Tensor:
        """What a step of each channel adds to the patches of these cells (k, P, M, I)."""
        return self._units[self.now.known.layer.cells[self._cells]]

    @cached_property
    def _outputs(self) -> tuple[Tensor, Tensor]:
        """How far outputs exceed their cells' targets (O, k, P), and what a step of each channel adds (O, k, P, I)."""
        known = self.now.known
        slope = torch.einsum("om,kpmi->okpi", known.layer.filters, self._added)
        return known.excess(self.now.found.x)[:, self._cells], slope

    def _excess(self, steps: Tensor) -> Tensor:
        """How far the outputs exceed their cells' targets (n, O, k, P)."""
        now, slope = self._outputs
        return now + torch.einsum("okpi,ni->nokp", slope, steps)

    def _missed(self, steps: Tensor) -> Tensor:
        """What these steps (n, I) leave of the outputs (n,), as `misfit` counts it."""
        known, cells = self.now.known, self._cells
        off = self._excess(steps).amax(-1)
        off = torch.where(known.seen[:, cells], off, off.clamp_min(0)) / (deviation(known)[:, cells] * self._scale)
        return 2 * torch.log1p(off.square()).sum((1, 2))

    def _unexpected(self, steps: Tensor) -> Tensor:
        """What speaks against these steps (n, I) beforehand (n,)."""
        precision, pulled = self._own
        return ((steps @ precision - 2 * pulled) * steps).sum(-1)

    def _taken(self, steps: Tensor) -> Tensor:
        """The positions that these steps (n, I) lead to (n, O, k)."""
        near = TIE * self.now.known.forward_scale * self.now.found.shares[:, self._cells]  # of equal ones as it is now
        return (self._excess(steps) + near).argmax(-1)

    def _unexplained(self, steps: Tensor) -> Tensor:
        """What these steps (n, I) leave of the gradient (n,), as `misfit` counts it."""
        known, found, cells = self.now.known, self.now.found, self._cells
        patches = known.layer.patches(found.x)[known.layer.cells[cells]]  # (k, P, M)
        signal = known.signal[:, cells]
        taken = self._taken(steps)
        each = torch.arange(len(cells)).to(taken)
        before = torch.einsum("okp,kpm->okm", found.shares[:, cells], patches)
        moved = patches[each, taken] - before + torch.einsum("nokmi,ni->nokm", self._added[each, taken], steps)
        left = known.residual(found.x, found.shares) - torch.einsum("ok,nokm->nom", signal, moved)
        return known.gradient.shape[1] * torch.log((left.square() / known.rounded).mean(-1) + LEAST).sum(-1)
