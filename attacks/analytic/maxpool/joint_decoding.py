"""Levels of pixels and positions of pooling, decided together: where one is wrong, it makes the other look certain."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import LARGEST, Prior, System
from attacks.analytic.maxpool.flat_regions import FAR
from attacks.analytic.maxpool.integer_decoding import WORSE, judged
from attacks.analytic.maxpool.lattice import Array, Lattice
from attacks.analytic.maxpool.likelihood import deviation, likeliest, missed, usual
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.solution import Doubt, Solved
from attacks.analytic.maxpool.spd_linalg import Factor

LOOSE, OPEN = 0.01, 30.0
"""Standard deviation of a pixel, in steps between two levels: with less it is certain even beside wrong ones, with more
nothing tells which level it is on."""
MANY = (80, 250)
"""Pixels looked at, the loosest first; the second time where equations stay unsatisfied."""
REACH, MISSED = 4.0, 3.0
"""Standard deviations by which another position may fall short of the one taken, and times what its cell misses."""
CELLS, EACH, TRIED = 40, 8, 32
"""Positions changed that are followed, the most promising first; levels taken from each; and of all these tried."""
ROUNDS = 12
SHARPEST = 3e7
"""Inverse variance of a pixel, in steps, beyond which double precision does not suffice to tell the loosest ones."""


def together(now: Solved, prior: Prior, levels: Levels) -> Solved:
    """The likeliest of what a changed position, and the levels that follow from it, lead to, step by step.

    Near a solution all equations are linear in the steps by which its loosest pixels move. For every position that
    could as well be another one, and for none, the levels that explain the equations best are found as a closest-vector
    problem; the best of these are tried on the equations themselves, all positions decided anew, and judged by
    `misfit` and what `prior` expects.

    Args:
        now: a solution near the truth.
        prior: what is expected of the input.
        levels: of its pixels.

    Returns:
        `now` itself where its input is on no levels, or nothing is explained better. A pixel that is on another level
        where about as much is explained is not fixed.
    """
    best = start = now.at(levels.nearest(now.found.x))
    allowed = WORSE * max(now.found.error, now.known.noise)
    if now.found.x.numel() > LARGEST or not start.found.error < FAR * allowed:
        return now
    doubt = Doubt.none(start.found.x)
    for many in MANY:
        for _ in range(ROUNDS):
            before, pixels = best, _loosest(best, levels)[:many]  # anew: others are loose once less is unexplained
            others = Near.of(before, prior, levels, pixels).others() if len(pixels) else ()
            best, doubt = likeliest(before, others, prior, allowed if now.satisfied else math.inf)
            if best is before:
                break
        if best.satisfied:
            break
    if not best.satisfied and best.found.error > now.found.error:  # likelier, but led astray
        return now.doubted(Doubt.between(start, best))
    if best is not start or (now.fixed is None and torch.equal(start.found.x, now.found.x)):
        now = judged(best, levels)
    return now.doubted(doubt)


def _loosest(now: Solved, levels: Levels) -> Tensor:
    """Which pixels are not certain, counted along the input (n,), the loosest first."""
    noise, _, sure, _ = _weights(now)
    exact = replace(now.known, loose=sure.rsqrt())
    system = System.of(exact, now.found.shares, noise, noise.new_zeros(()), fine=True)
    step = levels.step.expand_as(now.found.x).flatten()
    loose = _deviations(system.dense() * step[:, None] * step, 2 / levels.count)
    loose = loose.masked_fill(loose >= OPEN, 0.0)
    return loose.argsort(descending=True)[: int((loose > LOOSE).sum())]


def _weights(now: Solved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How far the equations can be trusted.

    Returns:
        Standard deviation of the gradient's equations by filter (O,), inverse variance of each (O, M), that of the
        outputs (O, K), less where one misses its target already, and the same as if none did.
    """
    known, found = now.known, now.found
    scale = usual(known, found)
    fresh = 1 / (deviation(known) * scale).square()
    sure = fresh / (1 + (missed(known, found) / scale).square())
    noise = known.residual(found.x, found.shares).square().mean(1).sqrt().maximum(known.floor)
    sharp = known.sharpness(noise)
    trust = (1 if sharp is None else sharp) / noise[:, None].square().expand_as(known.gradient)
    return noise, trust, sure, fresh


@dataclass(frozen=True)
class Near:
    """The equations around a solution, in whole steps by which n of its pixels move.

    Attributes:
        now: the solution, its input on levels.
        levels: of its pixels.
        pixels: which ones, counted along the input (n,).
        patches: what a step of each adds to the patches at the positions of each cell (K, P, M, n).
        trust: inverse variance of the gradient's equations (O, M).
        sure: inverse variance of the outputs (O, K), less where one misses its target already.
        fresh: the same if a cell's position is another one (O, K).
        expected: precision (n, n), and precision times mean (n,), that the prior adds.
    """

    now: Solved
    levels: Levels
    pixels: Tensor
    patches: Tensor
    trust: Tensor
    sure: Tensor
    fresh: Tensor
    expected: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, now: Solved, prior: Prior, levels: Levels, pixels: Tensor) -> Near:
        """In steps of `pixels` (n,)."""
        known, found = now.known, now.found
        _, trust, sure, fresh = _weights(now)
        step = levels.step.expand_as(found.x).flatten()
        patches = known.layer.moved(pixels, step[pixels])[known.layer.cells]
        expected = prior.around(found.x, pixels, step[pixels])
        return cls(now, levels, pixels, patches, trust, sure * known.seen, fresh, expected)

    def others(self) -> Iterator[Solved]:
        """What the best levels of the likeliest positions lead to."""
        tried: set[bytes] = set()
        number = self.levels.number(self.now.found.x)
        for steps in self._candidates():
            if steps.any() and steps.tobytes() not in tried and len(tried) < TRIED:
                tried.add(steps.tobytes())
                other = number.clone()
                other.view(-1)[self.pixels] += torch.from_numpy(steps).to(other)
                yield self.now.at(self.levels.values(other.clamp(0, self.levels.count - 1)))

    def _candidates(self) -> list[Array]:
        """Steps (n,), those that leave least first."""
        even = _even(self._normal[0], 2 / self.levels.count)
        weaker = min(1.0, SHARPEST / float(even.diagonal().max()))
        lattice = Lattice((even * weaker).cpu().numpy())
        try:
            _ = lattice.reduced
        except np.linalg.LinAlgError:
            return []
        found: list[tuple[float, Array]] = []
        for told, right, left in heapq.nsmallest(CELLS, self._systems(), key=self._relaxed):
            whole, side = told + self.expected[0], right + self.expected[1]
            matrix, wanted = whole.cpu().numpy(), side.cpu().numpy()
            try:
                near = lattice.near(np.linalg.solve(matrix, wanted), matrix * weaker, EACH)
            except np.linalg.LinAlgError:
                continue
            found += [(float(steps @ (matrix @ steps - 2 * wanted)) + left, steps) for steps in near]
        return [steps for _, steps in sorted(found, key=lambda pair: pair[0])]

    def _relaxed(self, system: tuple[Tensor, Tensor, float]) -> float:
        """What real numbers would leave."""
        told, right, left = system
        whole, side = told + self.expected[0], right + self.expected[1]
        solution, failed = torch.linalg.solve_ex(whole, side)
        return math.inf if bool(failed) else left - float(side @ solution)

    def _systems(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Matrix, right-hand side and what is left, more than now, at the positions taken and with each changed."""
        told, right = self._normal
        yield told, right, 0.0
        known, root = self.now.known, self.trust.sqrt()
        for o, k, p in self._doubtful(torch.linalg.inv_ex(told + self.expected[0]).inverse):
            taken = int(self._taken[o, k])
            change = self.patches[k, p] - self.patches[k, taken]
            signal = known.signal[o, k] * root[o]
            before, after = root[o, :, None] * self._gradient[o], signal[:, None] * change
            left = root[o] * self._left[o]
            moved = left - signal * (self._cells[k, p] - self._cells[k, taken])
            rows = torch.cat([before - after, self.fresh[o, k].sqrt() * self._outputs[o, k, p][None]])
            ends = torch.cat([moved, (self.fresh[o, k].sqrt() * self._off[o, k, p])[None]])
            sure = self.sure[o, k].sqrt()
            old_rows = torch.cat([before, sure * self._outputs[o, k, taken][None]])
            old_ends = torch.cat([left, (sure * self._off[o, k, taken])[None]])
            more = float(ends @ ends - old_ends @ old_ends)
            yield told + rows.mT @ rows - old_rows.mT @ old_rows, right - ends @ rows + old_ends @ old_rows, more

    def _doubtful(self, covariance: Tensor) -> list[list[int]]:
        """Filter, cell and position (O, K, P) of those that could have been passed on as well as the one taken."""
        passed = self._taken[..., None]
        ahead = self._outputs.gather(2, passed[..., None].expand(-1, -1, 1, len(self.pixels))) - self._outputs
        spread = torch.einsum("okpn,nm,okpm->okp", ahead, covariance, ahead).clamp_min(0).sqrt()
        short = self._off.gather(2, passed) - self._off
        reach = REACH * (spread + self.fresh.rsqrt()[..., None])
        reach = reach + MISSED * (missed(self.now.known, self.now.found) * deviation(self.now.known)).abs()[..., None]
        others = torch.arange(short.shape[-1]).to(passed) != passed
        return ((short.abs() < reach) & others & self.now.known.seen[..., None]).nonzero().tolist()

    @cached_property
    def _taken(self) -> Tensor:
        """The position of each cell (O, K)."""
        return self.now.found.shares.argmax(-1)

    @cached_property
    def _left(self) -> Tensor:
        """Of the gradient (O, M)."""
        return self.now.known.residual(self.now.found.x, self.now.found.shares)

    @cached_property
    def _cells(self) -> Tensor:
        """The patches at the positions of each cell (K, P, M)."""
        return self.now.known.layer.patches(self.now.found.x)[self.now.known.layer.cells]

    @cached_property
    def _off(self) -> Tensor:
        """How far the output of each position is from its cell's target (O, K, P)."""
        return self.now.known.excess(self.now.found.x)

    @cached_property
    def _outputs(self) -> Tensor:
        """What a step of each pixel adds to the output of each position (O, K, P, n)."""
        return torch.einsum("om,kpmn->okpn", self.now.known.layer.filters, self.patches)

    @cached_property
    def _gradient(self) -> Tensor:
        """What a step of each pixel adds to what is left of the gradient (O, M, n)."""
        return -torch.einsum("okp,kpmn->omn", self.now.found.shares * self.now.known.signal[..., None], self.patches)

    @cached_property
    def _normal(self) -> tuple[Tensor, Tensor]:
        """Matrix (n, n) and right-hand side (n,) at the positions taken."""
        count = len(self.pixels)
        passed = self._taken[..., None]
        outputs = self._outputs.gather(2, passed[..., None].expand(-1, -1, 1, count))[:, :, 0].flatten(0, 1)
        off, sure = self._off.gather(2, passed).flatten(), self.sure.flatten()
        gradient, trust = self._gradient.flatten(0, 1), self.trust.flatten()
        matrix = gradient.mT @ (trust[:, None] * gradient) + outputs.mT @ (sure[:, None] * outputs)
        return matrix, -(trust * self._left.flatten()) @ gradient - (sure * off) @ outputs


def _even(matrix: Tensor, least: float) -> Tensor:
    """With as much more for every pixel as that it is on one of its levels."""
    return matrix + least**2 * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _deviations(matrix: Tensor, least: float) -> Tensor:
    factor = Factor.of(_even(matrix, least))
    return torch.full_like(matrix.diagonal(), OPEN) if factor is None else factor.variances().sqrt()
