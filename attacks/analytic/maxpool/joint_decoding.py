r"""Levels of pixels and positions of pooling, decided together: where one is wrong, it makes the other look certain.

Near a solution x all equations are linear in the whole steps n by which its loosest pixels move, as long as the
positions stay. With r what x leaves of the gradient and d_ok what an output is off its target, steps leave

    gradient:  r_o + D_o n,        D_o = -sum_k s_ok dU_k        (what a step of each pixel adds to the patches, dU),
    outputs:   d_ok + w_o dU_k n,

whose squares, weighed by how far each can be trusted, and the prior add up to n^T A n - 2 b^T n + c (`StepForm`). The
whole n that makes this least is the nearest point of a lattice. Another position for one cell changes D_o and r_o of
one filter and one output, so that A, b and c of every such change follow from those of none by a product of few rows.

So: for the positions taken, and for each cell that could as well have passed on another one, find the best few n; try
the most promising on the equations themselves, where all positions are decided anew; keep what is likeliest; repeat
from there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.flat_regions import ON_LEVELS_ERROR
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.integer_decoding import MAX_ERROR_RATIO, mark_determined
from attacks.analytic.maxpool.lattice import MAX_INVERSE_VARIANCE, Array, Lattice
from attacks.analytic.maxpool.likelihood import (
    output_deviations,
    select_likeliest,
    target_deviation,
    typical_deviation,
)
from attacks.analytic.maxpool.normal_equations import MAX_DENSE_UNKNOWNS, NormalEquations
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.solution import Ambiguity, LayerSolution
from attacks.analytic.maxpool.spd_linalg import Factor

MIN_STD, UNDETERMINED_STD = 0.01, 30.0
"""Standard deviation of a pixel, in steps between two levels: with less it is certain even beside wrong ones, with more
nothing tells which level it is on."""
PIXELS = (80, 250)
"""Pixels looked at, the loosest first; the second number where equations stay unsatisfied."""
REACH, MISSED_REACH = 4.0, 3.0
"""Standard deviations by which another position may fall short of the one taken, and times what its cell misses."""
MAX_CHANGES, STEPS_EACH, MAX_TRIED = 40, 8, 32
"""Changed positions that are followed, the most promising first; steps taken from each; and of all these tried."""
MAX_ROUNDS = 12


def decode_jointly(now: LayerSolution, prior: GaussianPrior, levels: PixelLevels) -> LayerSolution:
    """Change positions one at a time, with the levels that follow from each, and return the likeliest solution met.

    Args:
        now: a solution near the truth.
        prior: what is expected of the input.
        levels: of its pixels.

    Returns:
        `now` itself where its input is on no levels, or nothing is explained better. A pixel that is on another level
        where about as much is explained is not determined.
    """
    start = now.with_input(levels.nearest(now.fit.x))
    allowed = MAX_ERROR_RATIO * max(now.fit.error, now.equations.gradient_noise)
    if now.fit.x.numel() > MAX_DENSE_UNKNOWNS or not start.fit.error < ON_LEVELS_ERROR * allowed:
        return now
    best, ambiguity = _climb(start, prior, levels, allowed if now.is_satisfied else math.inf)
    if not best.is_satisfied and best.fit.error > now.fit.error:  # likelier, but led astray
        return now.with_ambiguity(Ambiguity.between(start, best))
    if best is not start or (now.determined is None and torch.equal(start.fit.x, now.fit.x)):
        now = mark_determined(best, levels)
    return now.with_ambiguity(ambiguity)


def _climb(
    start: LayerSolution, prior: GaussianPrior, levels: PixelLevels, allowed: float
) -> tuple[LayerSolution, Ambiguity]:
    """Go from solution to likelier solution until none is; return the last and what its search disputes."""
    best, ambiguity = start, Ambiguity.none(start.fit.x)
    for count in PIXELS:
        for _ in range(MAX_ROUNDS):
            before = best
            pixels = _loosest_pixels(best, levels)[:count]  # anew: others are loose once less is unexplained
            others = LocalSystem.of(before, prior, levels, pixels).neighbors() if len(pixels) else ()
            best, ambiguity = select_likeliest(best, others, prior, allowed)
            if best is before:
                break
        if best.is_satisfied:
            break
    return best, ambiguity


def _loosest_pixels(now: LayerSolution, levels: PixelLevels) -> Tensor:
    """Return which pixels are not certain, counted along the input (n,), the loosest first."""
    trust = EquationPrecisions.of(now)
    exact = replace(now.equations, target_std=trust.output_precision.rsqrt())
    system = NormalEquations.of(
        exact, now.fit.selection, trust.gradient_std, trust.gradient_std.new_zeros(()), per_equation=True
    )
    step = levels.step.expand_as(now.fit.x).flatten()
    factor = Factor.of(_with_index_precision(system.dense() * step[:, None] * step, levels))
    std = torch.full_like(step, UNDETERMINED_STD) if factor is None else factor.variances().sqrt()
    std = std.masked_fill(std >= UNDETERMINED_STD, 0.0)
    return std.argsort(descending=True)[: int((std > MIN_STD).sum())]


def _with_index_precision(matrix: Tensor, levels: PixelLevels) -> Tensor:
    """Return a matrix in steps (n, n), with as much more for every pixel as that it is on one of its levels."""
    return matrix + levels.index_precision * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


@dataclass(frozen=True)
class EquationPrecisions:
    """How far a solution's equations can be trusted.

    Attributes:
        gradient_std: standard deviation of the gradient's equations, by filter (O,).
        gradient_precision: inverse variance of each (O, M).
        output_precision: inverse variance of the outputs (O, K), less where one misses its target already.
        changed_output_precision: the outputs' inverse variance if a cell's position is another one (O, K): as if none
            missed its target.
    """

    gradient_std: Tensor
    gradient_precision: Tensor
    output_precision: Tensor
    changed_output_precision: Tensor

    @classmethod
    def of(cls, now: LayerSolution) -> EquationPrecisions:
        """Return the precisions that a solution's residuals suggest."""
        equations, fit = now.equations, now.fit
        scale = typical_deviation(equations, fit)
        changed = 1 / (target_deviation(equations) * scale).square()
        outputs = changed / (1 + (output_deviations(equations, fit) / scale).square())
        std = equations.residual(fit.x, fit.selection).square().mean(1).sqrt().maximum(equations.noise_floor)
        factors = equations.precision_factors(std)
        gradient = (1 if factors is None else factors) / std[:, None].square().expand_as(equations.gradient)
        return cls(std, gradient, outputs, changed)


@dataclass(frozen=True)
class StepForm:
    """What steps n leave unexplained: n^T A n - 2 b^T n + c, c counted from the positions taken.

    Attributes:
        matrix: A (n, n).
        rhs: b (n,).
        constant: c.
    """

    matrix: Tensor
    rhs: Tensor
    constant: float

    def relaxed_minimum(self) -> float:
        """Return the least value over real numbers."""
        solution, failed = torch.linalg.solve_ex(self.matrix, self.rhs)
        return math.inf if bool(failed) else self.constant - float(self.rhs @ solution)


@dataclass(frozen=True)
class LocalSystem:
    """The equations around a solution, in whole steps by which n of its pixels move.

    Attributes:
        now: the solution, its input on levels.
        levels: of its pixels.
        pixels: which ones, counted along the input (n,).
        patches: dU, what a step of each adds to the patches at the positions of each cell (K, P, M, n).
        precisions: of the equations; `output_precision` is 0 where a target is not known.
        prior_moments: precision (n, n), and precision times mean (n,), that the prior adds.
    """

    now: LayerSolution
    levels: PixelLevels
    pixels: Tensor
    patches: Tensor
    precisions: EquationPrecisions
    prior_moments: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, now: LayerSolution, prior: GaussianPrior, levels: PixelLevels, pixels: Tensor) -> LocalSystem:
        """Return the system in steps of `pixels` (n,).

        Args:
            now: the solution around which the system holds.
            prior: what is expected of the input.
            levels: that pixels may take.
            pixels: numbers of the input that move (n,), counted along it.
        """
        equations, fit, trust = now.equations, now.fit, EquationPrecisions.of(now)
        step = levels.step.expand_as(fit.x).flatten()[pixels]
        patches = equations.layer.patch_changes(pixels, step)[equations.layer.cells]
        trust = replace(trust, output_precision=trust.output_precision * equations.target_known)
        return cls(now, levels, pixels, patches, trust, prior.step_moments(fit.x, pixels, step))

    @property
    def equations(self) -> Equations:
        """The equations of the solution `now`."""
        return self.now.equations

    # ---- search ------------------------------------------------------------------------------------------------------
    def neighbors(self) -> Iterator[LayerSolution]:
        """Yield what the best steps at the likeliest positions lead to, `MAX_TRIED` at most."""
        tried: set[bytes] = set()
        indices = self.levels.indices(self.now.fit.x)
        for steps in self._best_steps():
            if steps.any() and steps.tobytes() not in tried and len(tried) < MAX_TRIED:
                tried.add(steps.tobytes())
                moved = indices.clone()
                moved.view(-1)[self.pixels] += torch.from_numpy(steps).to(moved)
                yield self.now.with_input(self.levels.values(moved.clamp(0, self.levels.count - 1)))

    def _best_steps(self) -> list[Array]:
        """Yield steps (n,), those that leave least first, from the most promising positions."""
        metric = _with_index_precision(self._own_form[0], self.levels)
        weakening = min(1.0, MAX_INVERSE_VARIANCE / float(metric.diagonal().max()))
        lattice = Lattice((metric * weakening).cpu().numpy())
        try:
            _ = lattice.reduced_basis
        except np.linalg.LinAlgError:
            return []
        best: list[tuple[float, Array]] = []
        for form in heapq.nsmallest(MAX_CHANGES, self._forms(), key=StepForm.relaxed_minimum):
            matrix, rhs = form.matrix.cpu().numpy(), form.rhs.cpu().numpy()
            try:
                nearest = lattice.nearest_candidates(np.linalg.solve(matrix, rhs), matrix * weakening, STEPS_EACH)
            except np.linalg.LinAlgError:
                continue
            best += [(float(steps @ (matrix @ steps - 2 * rhs)) + form.constant, steps) for steps in nearest]
        return [steps for _, steps in sorted(best, key=lambda pair: pair[0])]

    def _forms(self) -> Iterator[StepForm]:
        """Return the forms at the positions taken, and with each plausible change of one of them."""
        for matrix, rhs, constant in self._forms_without_prior():
            yield StepForm(matrix + self.prior_moments[0], rhs + self.prior_moments[1], constant)

    def _forms_without_prior(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield A, b and c of the same forms without what the prior adds."""
        matrix, rhs = self._own_form
        yield matrix, rhs, 0.0
        for o, k, p in self._plausible_changes(torch.linalg.inv_ex(matrix + self.prior_moments[0]).inverse):
            rows, ends = self._rows_at(o, k, p)
            old_rows, old_ends = self._rows_at(o, k, int(self._positions[o, k]))
            constant = float(ends @ ends - old_ends @ old_ends)
            yield matrix + rows.mT @ rows - old_rows.mT @ old_rows, rhs - ends @ rows + old_ends @ old_rows, constant

    def _rows_at(self, o: int, k: int, p: int) -> tuple[Tensor, Tensor]:
        """Filter o's gradient and cell k's output where that passes on position p, as rows n + ends, weighed.

        Rows are (M + 1, n), ends (M + 1,).
        """
        taken, root = int(self._positions[o, k]), self._root_precision
        rows, ends = root[o, :, None] * self._gradient_change[o], root[o] * self._residual[o]
        trust = self.precisions.output_precision[o, k]
        if p != taken:
            signal = self.equations.signal[o, k] * root[o]
            rows = rows - signal[:, None] * (self.patches[k, p] - self.patches[k, taken])
            ends = ends - signal * (self._cells[k, p] - self._cells[k, taken])
            trust = self.precisions.changed_output_precision[o, k]
        weight = trust.sqrt()
        rows = torch.cat([rows, weight * self._output_change[o, k, p][None]])
        return rows, torch.cat([ends, (weight * self._excess[o, k, p])[None]])

    def _plausible_changes(self, covariance: Tensor) -> list[list[int]]:
        """Filter, cell and position of those that could have been passed on as well as the one taken.

        They fall short of it by no more than steps of this covariance (n, n), and what the cell misses, allow.
        """
        taken, count = self._positions[..., None], len(self.pixels)
        ahead = self._output_change.gather(2, taken[..., None].expand(-1, -1, 1, count)) - self._output_change
        std = torch.einsum("okpn,nm,okpm->okp", ahead, covariance, ahead).clamp_min(0).sqrt()
        short = self._excess.gather(2, taken) - self._excess
        off = (output_deviations(self.equations, self.now.fit) * target_deviation(self.equations)).abs()
        reach = REACH * (std + self.precisions.changed_output_precision.rsqrt()[..., None])
        reach = reach + MISSED_REACH * off[..., None]
        others = torch.arange(short.shape[-1]).to(taken) != taken
        return ((short.abs() < reach) & others & self.equations.target_known[..., None]).nonzero().tolist()

    # ---- what the equations are made of ------------------------------------------------------------------------------
    @cached_property
    def _positions(self) -> Tensor:
        """The position that each cell passes on (O, K)."""
        return self.now.fit.selection.argmax(-1)

    @cached_property
    def _residual(self) -> Tensor:
        """What is left of the gradient: r (O, M)."""
        return self.equations.residual(self.now.fit.x, self.now.fit.selection)

    @cached_property
    def _root_precision(self) -> Tensor:
        """The inverse standard deviation of each of the gradient's equations (O, M)."""
        return self.precisions.gradient_precision.sqrt()

    @cached_property
    def _cells(self) -> Tensor:
        """The patches at the positions of each cell (K, P, M)."""
        return self.equations.layer.patches(self.now.fit.x)[self.equations.layer.cells]

    @cached_property
    def _excess(self) -> Tensor:
        """How far the output of each position is from its cell's target: d (O, K, P)."""
        return self.equations.excess(self.now.fit.x)

    @cached_property
    def _output_change(self) -> Tensor:
        """What a step of each pixel adds to the output of each position: w dU (O, K, P, n)."""
        return torch.einsum("om,kpmn->okpn", self.equations.layer.filters, self.patches)

    @cached_property
    def _gradient_change(self) -> Tensor:
        """What a step of each pixel adds to what is left of the gradient: D (O, M, n)."""
        signal = self.now.fit.selection * self.equations.signal[..., None]
        return -torch.einsum("okp,kpmn->omn", signal, self.patches)

    @cached_property
    def _own_form(self) -> tuple[Tensor, Tensor]:
        """A (n, n) and b (n,) at the positions taken, but for what the prior adds."""
        taken = self._positions[..., None]
        outputs = self._output_change.gather(2, taken[..., None].expand(-1, -1, 1, len(self.pixels)))
        outputs = outputs[:, :, 0].flatten(0, 1)
        off, sure = self._excess.gather(2, taken).flatten(), self.precisions.output_precision.flatten()
        gradient, trust = self._gradient_change.flatten(0, 1), self.precisions.gradient_precision.flatten()
        matrix = gradient.mT @ (trust[:, None] * gradient) + outputs.mT @ (sure[:, None] * outputs)
        return matrix, -(trust * self._residual.flatten()) @ gradient - (sure * off) @ outputs
