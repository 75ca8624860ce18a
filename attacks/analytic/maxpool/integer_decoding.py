"""Pixels of 8 bits from equations that fix some of them only together with others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import Prior
from attacks.analytic.maxpool.lattice import Lattice
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.solution import Solved
from attacks.analytic.maxpool.spd_linalg import Factor

LOOSE = 1 / 6
"""Standard deviation, in steps between two levels, from which a pixel is no more told by rounding."""
MANY = 256
"""Loose pixels up to which their levels are searched for together."""
SHARPEST = 3e7
"""Inverse variance of a pixel, in steps, that is more than enough: with more, double precision does not suffice."""
ROUNDS = 4
FALLING = 0.7
"""Of what was left unexplained: above that another round brings nothing."""
WORSE = 2.0
"""How much more the levels may leave unexplained than real numbers did: these follow rounding, too."""


def decode(now: Solved, prior: Prior, levels: Levels) -> Solved:
    """The same with every pixel on a level, and told which levels the equations leave no choice of.

    At the rim of an image fewer outputs see a pixel than it has channels, so that real numbers are not fixed there;
    that levels are whole numbers fixes many. Loose pixels are searched for together, as a closest-vector problem, and
    all others rounded; positions that follow from this are taken over, and the system is solved again. Where the
    equations leave a choice, the prior makes it.

    Args:
        now: a solution near the truth.
        prior: what is expected of the input, in full strength.
        levels: of its pixels.

    Returns:
        `now` itself where that explains the equations far better, as it does for an input that is on no levels.
    """
    best, least = now, now.found.error
    for _ in range(ROUNDS):
        least = min(least, best.found.error)
        bound = WORSE * max(least, now.known.noise)
        found = next((x for x in _candidates(best, prior, levels) if x.found.error < bound), None)
        if found is None or (best.satisfied and not found.satisfied):
            break
        same = torch.equal(found.found.shares, best.found.shares) and found.known is best.known
        if not same and found.fixed is not None:  # what is fixed was told at positions that are given up
            found = replace(found, fixed=torch.zeros_like(found.fixed), spread=None)
        done = same and not found.found.error < FALLING * best.found.error
        best = found
        if done:
            break
    return best


def judged(now: Solved, levels: Levels) -> Solved:
    """The same, told which pixels are on the same level in all inputs that explain the equations at its positions."""
    shape = now.found.x.shape
    told, _, off, loose = _told(now.system().dense(), levels.step.expand(shape).flatten(), levels)
    result = torch.full_like(now.found.x, loose is not None, dtype=torch.bool).flatten()
    if loose is not None and len(loose):
        try:
            lattice = Lattice(told[loose][:, loose].cpu().numpy())
            result[loose] = torch.from_numpy(lattice.fixed).to(result.device)
        except np.linalg.LinAlgError:
            result[:] = False
    return replace(now, fixed=result.view(shape), spread=None if off is None else off.view(shape))


def _told(matrix: Tensor, step: Tensor, levels: Levels) -> tuple[Tensor, float, Tensor | None, Tensor | None]:
    """What equations say in steps (N, N), the factor it is weakened by, how far off pixels are (N,), which are loose.

    How far is in units of the input; None, as the last, where precision does not suffice, the last also where too much
    is open.
    """
    told = matrix.mul_(step[:, None] * step)
    weaker = float((SHARPEST / told.diagonal().max()).clamp_max(1.0))
    told *= weaker
    told.diagonal().add_((2 / levels.count) ** 2)  # a pixel is on one of so many levels
    factor = Factor.of(told)
    if factor is None:
        return told, weaker, None, None
    spread = factor.variances().sqrt()
    loose = (spread > LOOSE).nonzero().flatten()
    off = torch.where(spread < levels.count / 16, spread * weaker**0.5, spread) * step  # beyond that nothing tells them
    return told, weaker, off, loose if len(loose) <= MANY else None


def _candidates(now: Solved, prior: Prior, levels: Levels) -> Iterator[Solved]:
    """What the equations leave open as `prior` expects it, then as it is: none where too much is open.

    Where pooling did not look, what is expected may be larger than what was passed on.
    """
    shape = now.found.x.shape
    first, step = (x.expand(shape).flatten() for x in (levels.first, levels.step))
    origin, spread = first / step, (2 / levels.count) ** 2
    system = now.system()
    told, weaker, off, loose = _told(system.dense(), step, levels)
    if off is None or loose is None:
        return
    right = system.right.flatten() * step * weaker - told @ origin
    own = prior.dense * step[:, None] * step
    expected = told + own, right + prior.right.flatten() * step - own @ origin
    as_it_is = told, right + spread * now.found.x.flatten() / step
    for whole, side in (expected, as_it_is):
        factor = Factor.of(whole)
        if factor is None:
            continue
        mean = factor.solve(side)
        numbers = mean.round().clamp(0, levels.count - 1)
        same = torch.ones_like(numbers, dtype=torch.bool)
        if len(loose):
            try:
                numbers[loose], same[loose] = _together(told, whole, mean, numbers, loose)
            except np.linalg.LinAlgError:
                return
        found = now.at(levels.values(numbers.clamp(0, levels.count - 1).view(shape))).found
        yield replace(Solved.of(now.known, found), fixed=same.view(shape), spread=off.view(shape))


def _together(told: Tensor, whole: Tensor, mean: Tensor, numbers: Tensor, loose: Tensor) -> tuple[Tensor, Tensor]:
    """Levels of the loose pixels where the others are `numbers`, and which are fixed."""
    off = (mean - numbers).index_fill(0, loose, 0.0)
    inner = whole[loose][:, loose]
    centre = mean[loose] + torch.linalg.solve(inner, (whole @ off)[loose])
    lattice = Lattice(told[loose][:, loose].cpu().numpy())
    nearest = lattice.nearest(centre.cpu().numpy(), inner.cpu().numpy())
    return torch.from_numpy(nearest).to(mean), torch.from_numpy(lattice.fixed).to(mean.device)
