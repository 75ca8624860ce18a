r"""Pixels of 8 bits from equations that fix some of them only together with others.

In whole steps n between levels, x = first + step n, a solution's normal equations read n^T A n - 2 b^T n. At the rim of
an image fewer outputs see a pixel than it has channels, so that real numbers are not fixed there; that n is whole fixes
many. Pixels whose deviation diag(A^-1)^.5 is well below a step are rounded. The others, the *loose* ones, are searched
for together, given the rounded ones: the nearest point of a lattice with metric A to the real solution (`lattice`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.lattice import MAX_INVERSE_VARIANCE, Lattice
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.solution import LayerSolution
from attacks.analytic.maxpool.spd_linalg import Factor

MAX_ROUNDABLE_STD = 1 / 6
"""Standard deviation, in steps between two levels, from which a pixel is no more told by rounding: it is loose."""
MAX_LOOSE = 256
"""Loose pixels up to which their levels are searched for together."""
MAX_ROUNDS = 4
FALLING = 0.7
"""Share of what was left unexplained above which another round brings nothing."""
MAX_ERROR_RATIO = 2.0
"""How much more the levels may leave unexplained than real numbers did: these follow rounding, too."""


def decode_levels(now: LayerSolution, prior: GaussianPrior, levels: PixelLevels) -> LayerSolution:
    """Put every pixel on a level and mark those that the equations determine; return the solution.

    Positions that follow from the levels are taken over, and the system is solved again. Where the equations leave a
    choice, the prior makes it.

    Args:
        now: a solution near the truth.
        prior: what is expected of the input, in full strength.
        levels: of its pixels.

    Returns:
        `now` itself where that explains the equations far better, as it does for an input that is on no levels.
    """
    best, least = now, now.fit.error
    for _ in range(MAX_ROUNDS):
        least = min(least, best.fit.error)
        allowed = MAX_ERROR_RATIO * max(least, now.equations.gradient_noise)
        found = next((other for other in _candidates(best, prior, levels) if other.fit.error < allowed), None)
        if found is None or (best.is_satisfied and not found.is_satisfied):
            break
        same = torch.equal(found.fit.selection, best.fit.selection) and found.equations is best.equations
        if not same and found.determined is not None:  # it was looked at, at positions that are given up
            found = replace(found, determined=torch.zeros_like(found.determined), entry_std=None)
        done = same and not found.fit.error < FALLING * best.fit.error
        best = found
        if done:
            break
    return best


def mark_determined(now: LayerSolution, levels: PixelLevels) -> LayerSolution:
    """Mark the pixels that have one level in all inputs that explain the equations at the solution's positions."""
    shape = now.fit.x.shape
    system = _StepSystem.of(now.normal_equations().dense(), levels.step.expand(shape).flatten(), levels)
    loose, deviations = system.loose, system.deviations
    determined = torch.full_like(now.fit.x, loose is not None, dtype=torch.bool).flatten()
    if loose is not None and len(loose):
        try:
            determined[loose] = torch.from_numpy(system.lattice().determined).to(determined.device)
        except np.linalg.LinAlgError:
            determined[:] = False
    entry_std = None if deviations is None else deviations.view(shape)
    return replace(now, determined=determined.view(shape), entry_std=entry_std)


@dataclass(frozen=True)
class _StepSystem:
    """The matrix A of a solution's equations in whole steps.

    Attributes:
        matrix: A (N, N), weakened.
        weakening: the factor it is weakened by, so that double precision suffices.
        deviations: of the pixels (N,), in units of the input; None where precision does not suffice.
        loose: which pixels are loose (n,); None where precision does not suffice, or too many are.
    """

    matrix: Tensor
    weakening: float
    deviations: Tensor | None
    loose: Tensor | None

    @classmethod
    def of(cls, matrix: Tensor, step: Tensor, levels: PixelLevels) -> _StepSystem:
        """Make the system of a matrix in units of the input (N, N), which is overwritten, and steps of pixels (N,)."""
        matrix = matrix.mul_(step[:, None] * step)
        weakening = float((MAX_INVERSE_VARIANCE / matrix.diagonal().max()).clamp_max(1.0))
        matrix *= weakening
        matrix.diagonal().add_(levels.index_precision)
        factor = Factor.of(matrix)
        if factor is None:
            return cls(matrix, weakening, None, None)
        std = factor.variances().sqrt()
        loose = (std > MAX_ROUNDABLE_STD).nonzero().flatten()
        # beyond a sixteenth of all levels nothing tells a pixel, and so weakening did not either
        deviations = torch.where(std < levels.count / 16, std * weakening**0.5, std) * step
        return cls(matrix, weakening, deviations, loose if len(loose) <= MAX_LOOSE else None)

    def lattice(self) -> Lattice:
        """Return whole steps of the loose pixels."""
        return Lattice(self.matrix[self.loose][:, self.loose].cpu().numpy())


def _candidates(now: LayerSolution, prior: GaussianPrior, levels: PixelLevels) -> Iterator[LayerSolution]:
    """Return what the equations leave open as `prior` expects it, then as it is: none where too much is open.

    Where pooling did not look, what is expected may be larger than what was passed on.
    """
    shape = now.fit.x.shape
    first, step = (x.expand(shape).flatten() for x in (levels.first, levels.step))
    origin = first / step
    equations = now.normal_equations()
    system = _StepSystem.of(equations.dense(), step, levels)
    if system.deviations is None or system.loose is None:
        return
    rhs = equations.rhs.flatten() * step * system.weakening - system.matrix @ origin
    precision = prior.dense * step[:, None] * step
    expected = system.matrix + precision, rhs + prior.shift.flatten() * step - precision @ origin
    as_it_is = system.matrix, rhs + levels.index_precision * now.fit.x.flatten() / step
    for matrix, side in (expected, as_it_is):
        factor = Factor.of(matrix)
        if factor is None:
            continue
        mean = factor.solve(side)
        try:
            indices, determined = _nearest_indices(system, matrix, mean, levels)
        except np.linalg.LinAlgError:
            return
        fit = now.with_input(levels.values(indices.clamp(0, levels.count - 1).view(shape))).fit
        solution = LayerSolution.of(now.equations, fit)
        yield replace(solution, determined=determined.view(shape), entry_std=system.deviations.view(shape))


def _nearest_indices(system: _StepSystem, matrix: Tensor, mean: Tensor, levels: PixelLevels) -> tuple[Tensor, Tensor]:
    """Return whole numbers near `mean` (N,), as `matrix` (N, N) measures it, and which the equations determine."""
    loose = system.loose
    indices = mean.round().clamp(0, levels.count - 1)
    determined = torch.ones_like(indices, dtype=torch.bool)
    if loose is None or not len(loose):
        return indices, determined
    off = (mean - indices).index_fill(0, loose, 0.0)
    inner = matrix[loose][:, loose]
    center = mean[loose] + torch.linalg.solve(inner, (matrix @ off)[loose])  # of the loose, given the rounded
    lattice = system.lattice()
    nearest = lattice.nearest(center.cpu().numpy(), inner.cpu().numpy())
    indices[loose] = torch.from_numpy(nearest).to(mean)
    determined[loose] = torch.from_numpy(lattice.determined).to(mean.device)
    return indices, determined
