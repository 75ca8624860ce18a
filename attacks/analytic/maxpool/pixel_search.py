r"""Exhaustive search over the levels of one pixel at a time, all channels at once.

In a corner few outputs see a pixel (without padding one of each filter), and pooling passes few of these on: what
others were no larger than is an inequality, which tells something too, but no step from a neighboring solution finds.
The channels of one pixel are few enough to go through all combinations n (I,) of steps that the prior holds possible,
with the positions that follow from each. What a combination leaves is the `misfit` of the cells that see the pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.integer_decoding import MAX_ERROR_RATIO, MAX_ROUNDABLE_STD, mark_determined
from attacks.analytic.maxpool.lattice import RULED_OUT_DEVIATIONS
from attacks.analytic.maxpool.likelihood import (
    MIN_VARIANCE_RATIO,
    select_likeliest,
    target_deviation,
    typical_deviation,
)
from attacks.analytic.maxpool.normal_equations import MAX_DENSE_UNKNOWNS
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.refinement import TIE
from attacks.analytic.maxpool.solution import Ambiguity, LayerSolution

MAX_PIXELS = 6
"""Pixels looked at, the loosest first, of those that have a number left loose by `decode_levels`."""
MAX_ROUNDS = 4
"""Times that all of them are gone through."""
REACH = 4.0
"""Standard deviations by which the channels of a pixel may be away from what the other pixels lead to expect."""
MAX_COMBINATIONS = 250_000
"""Combinations of levels looked at of a pixel that one cell sees, fewer where several do."""
KEPT, TRIED = 500, 4
"""Combinations whose outputs and whose being expected are likeliest, and of these what is tried on the equations."""
CHUNK = 4_000_000
"""Numbers computed together."""


def search_pixels(now: LayerSolution, prior: GaussianPrior, levels: PixelLevels) -> LayerSolution:
    """Put the loosest pixels on their likeliest levels where the equations leave a choice; return the solution.

    Args:
        now: a solution near the truth.
        prior: what is expected of the input.
        levels: of its pixels.

    Returns:
        `now` itself where nothing is searched for, it is on no levels, or its equations stay unsatisfied. Of others, a
        pixel that is on another level where about as much is explained is not determined, and nothing is that was not;
        of what is unlikely beforehand not all is looked at.
    """
    equations, x = now.equations, now.fit.x
    if not equations.layer.positions_unknown or not levels.contain(x) or x.numel() > MAX_DENSE_UNKNOWNS:
        return now
    allowed = now.tolerance if now.is_satisfied else MAX_ERROR_RATIO * now.fit.error
    std = (now.deviations() / levels.step).amax(0).flatten()
    pixels = std.argsort(descending=True)[: min(MAX_PIXELS, int((std > MAX_ROUNDABLE_STD).sum()))].tolist()
    best, ambiguity = now, Ambiguity.none(x)
    for _ in range(MAX_ROUNDS):
        before = best
        for pixel in pixels:
            search = PixelSearch(best, prior, levels, pixel)
            ambiguity |= search.ambiguity
            best, more = select_likeliest(best, search.neighbors(), prior, allowed)
            ambiguity |= more
        if best is before:
            break
    if not best.is_satisfied:
        return now
    if best is not now or now.determined is None:
        best = mark_determined(best, levels)
    return best.with_ambiguity(ambiguity, now)  # what was open stays so


@dataclass(frozen=True)
class PixelSearch:
    """What the channels of one pixel change, in whole steps, if all others stay.

    Attributes:
        now: the solution.
        prior: what is expected of the input.
        levels: of its pixels.
        pixel: which one, counted along the plane.
    """

    now: LayerSolution
    prior: GaussianPrior
    levels: PixelLevels
    pixel: int

    def neighbors(self) -> Iterator[LayerSolution]:
        """Yield the solutions that the likeliest changes of the pixel lead to, each with at least one change."""
        steps, explained = self._likeliest_combinations
        order = steps[(explained + self._prior_penalty(steps)).argsort()]
        indices, (row, column) = self.levels.indices(self.now.fit.x), divmod(self.pixel, self.now.fit.x.shape[2])
        for step in order[order.any(1)][:TRIED]:
            moved = indices.clone()
            moved[:, row, column] += step
            yield self.now.with_input(self.levels.values(moved))

    @property
    def ambiguity(self) -> Ambiguity:
        """Which channels are on another level where about as much is explained."""
        steps, explained = self._likeliest_combinations
        as_much = steps[explained < explained[~steps.any(1)] + RULED_OUT_DEVIATIONS**2]
        positions = self.now.fit.selection[:, self._cells].argmax(-1)

        def at_other_positions(part: Tensor) -> Tensor:
            changed = self._positions_after(part) != positions
            return (changed & self.now.equations.target_known[:, self._cells]).flatten(1).any(1)

        moved = self._in_chunks(at_other_positions, as_much, self._patch_changes.shape[1])
        return Ambiguity(self._entries((as_much != 0).any(0)), self._entries((as_much[moved] != 0).any(0)))

    def _entries(self, channels: Tensor) -> Tensor:
        """Return a mask (I, H, W) of the pixel's entries in `channels` (I,)."""
        result = torch.zeros_like(self.now.fit.x, dtype=torch.bool)
        result.flatten(1)[:, self.pixel] = channels
        return result

    # ---- combinations of steps ---------------------------------------------------------------------------------------
    @cached_property
    def _likeliest_combinations(self) -> tuple[Tensor, Tensor]:
        """The likeliest combinations (n, I), with none at all, and what they leave (n,), as `misfit` counts it."""
        steps = self._combinations
        outputs = self._in_chunks(self._output_misfit, steps, self._patch_changes.shape[1])
        order = (outputs + self._prior_penalty(steps)).argsort()
        kept = torch.cat([order[:KEPT], (~steps.any(1)).nonzero().flatten()]).unique()
        size = math.prod(self._patch_changes.shape[2:])
        return steps[kept], outputs[kept] + self._in_chunks(self._gradient_misfit, steps[kept], size)

    @cached_property
    def _combinations(self) -> Tensor:
        """Steps (n, I) within what is expected, and none at all."""
        precision, shift = self._prior_in_steps
        covariance = torch.linalg.inv(precision)
        center, std = covariance @ shift, covariance.diagonal().sqrt()
        indices = self.levels.indices(self.now.fit.x).flatten(1)[:, self.pixel]
        most = int((MAX_COMBINATIONS / max(len(self._cells), 1)) ** (1 / len(center)))
        ranges = []
        for middle, width, own in zip(center.tolist(), std.tolist(), indices.tolist(), strict=True):
            reach = min(REACH * width, most / 2)
            least, top = -int(own), self.levels.count - 1 - int(own)
            low = min(max(math.floor(middle - reach), least), top)
            high = max(min(math.ceil(middle + reach), top), least)
            inside = torch.arange(low, high + 1).to(center)
            ranges.append(inside if 0 in inside else torch.cat([inside, inside.new_zeros(1)]))
        return torch.cartesian_prod(*ranges).view(-1, len(center))

    def _in_chunks(self, measure: Callable[[Tensor], Tensor], steps: Tensor, size: int) -> Tensor:
        """Evaluate a measure of steps (n, I) part by part; each step takes `size` numbers per output of these cells."""
        count = max(1, CHUNK // max(len(self.now.equations.signal) * len(self._cells) * size, 1))
        return torch.cat([measure(part) for part in steps.split(count)])

    # ---- what a combination leaves -----------------------------------------------------------------------------------
    def _prior_penalty(self, steps: Tensor) -> Tensor:
        """Return what speaks against these steps (n, I) beforehand (n,)."""
        precision, shift = self._prior_in_steps
        return ((steps @ precision - 2 * shift) * steps).sum(-1)

    def _output_misfit(self, steps: Tensor) -> Tensor:
        """Return what these steps (n, I) leave of the outputs (n,), as `misfit` counts it."""
        equations, cells = self.now.equations, self._cells
        off = self._excess_after(steps).amax(-1)
        off = torch.where(equations.target_known[:, cells], off, off.clamp_min(0))
        off = off / (target_deviation(equations)[:, cells] * self._typical_deviation)
        return 2 * torch.log1p(off.square()).sum((1, 2))

    def _gradient_misfit(self, steps: Tensor) -> Tensor:
        """Return what these steps (n, I) leave of the gradient (n,), as `misfit` counts it."""
        equations, fit, cells = self.now.equations, self.now.fit, self._cells
        patches = equations.layer.patches(fit.x)[equations.layer.cells[cells]]  # (k, P, M)
        positions = self._positions_after(steps)
        each = torch.arange(len(cells)).to(positions)
        before = torch.einsum("okp,kpm->okm", fit.selection[:, cells], patches)
        changes = torch.einsum("nokmi,ni->nokm", self._patch_changes[each, positions], steps)
        change = patches[each, positions] - before + changes
        residual = equations.residual(fit.x, fit.selection)
        residual = residual - torch.einsum("ok,nokm->nom", equations.signal[:, cells], change)
        relative = (residual.square() / equations.rounding_variance).mean(-1)
        return equations.gradient.shape[1] * torch.log(relative + MIN_VARIANCE_RATIO).sum(-1)

    def _positions_after(self, steps: Tensor) -> Tensor:
        """Return the positions that these steps (n, I) lead to (n, O, k); of equal ones the one selected now."""
        ties = TIE * self.now.equations.output_scale * self.now.fit.selection[:, self._cells]
        return (self._excess_after(steps) + ties).argmax(-1)

    def _excess_after(self, steps: Tensor) -> Tensor:
        """Return how far the outputs exceed their cells' targets after these steps (n, O, k, P)."""
        now, slope = self._excess
        return now + torch.einsum("okpi,ni->nokp", slope, steps)

    # ---- what the pixel touches --------------------------------------------------------------------------------------
    @cached_property
    def _typical_deviation(self) -> float:
        return typical_deviation(self.now.equations, self.now.fit)

    @cached_property
    def _entries_and_steps(self) -> tuple[Tensor, Tensor]:
        """Indices into the input of the pixel's entries (I,), and how much one step moves each."""
        channels, plane = len(self.now.fit.x), self.now.fit.x[0].numel()
        return torch.arange(channels) * plane + self.pixel, self.levels.step.flatten()

    @cached_property
    def _prior_in_steps(self) -> tuple[Tensor, Tensor]:
        """Precision (I, I), and precision times mean (I,), that the other pixels lead to expect, in steps from now."""
        return self.prior.step_moments(self.now.fit.x, *self._entries_and_steps)

    @cached_property
    def _all_patch_changes(self) -> Tensor:
        """What a step of each channel adds to the patches (L, M, I)."""
        return self.now.equations.layer.patch_changes(*self._entries_and_steps)

    @cached_property
    def _cells(self) -> Tensor:
        """The cells that see the pixel (k,)."""
        seen = self._all_patch_changes.abs().flatten(1).sum(1) > 0
        return seen[self.now.equations.layer.cells].any(1).nonzero().flatten()

    @cached_property
    def _patch_changes(self) -> Tensor:
        """What a step of each channel adds to the patches of these cells (k, P, M, I)."""
        return self._all_patch_changes[self.now.equations.layer.cells[self._cells]]

    @cached_property
    def _excess(self) -> tuple[Tensor, Tensor]:
        """How far outputs exceed their cells' targets (O, k, P), and what a step of each channel adds (O, k, P, I)."""
        equations = self.now.equations
        slope = torch.einsum("om,kpmi->okpi", equations.layer.filters, self._patch_changes)
        return equations.excess(self.now.fit.x)[:, self._cells], slope
