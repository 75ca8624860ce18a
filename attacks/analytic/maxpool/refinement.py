"""The last step to rounding: positions taken for certain, one linear system, and a check that needs no truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks.analytic.maxpool.equations import MIN_RELATIVE_NOISE, Equations
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.normal_equations import NormalEquations, Preconditioner
from attacks.analytic.maxpool.position_flips import PositionFlips

TIE = 1e-5
"""Difference of two positions, relative to the outputs' root mean square, below which they are equal to rounding."""
MAX_PATCH_NUMBERS = 2**24
"""Numbers of patches, at most, for as many filters as are decided at once; for one filter it may be more."""
SIDE_MARGIN, SIDE_DEVIATIONS = 0.25, 4.0
"""Share of the distance between both sides of an activation's lowest value within which an output lies on one of them,
and root mean squares of what outputs miss that are taken off that."""
FALLING = 0.9
"""Share of what was left unexplained above which another round brings nothing."""


@dataclass(frozen=True)
class Fit:
    """An input of the layer, and how well it explains the equations.

    Attributes:
        x: (I, H, W).
        selection: 1 at the positions it selects (O, K, P).
        gradient_error: norm of what it leaves of the gradient, relative to the gradient's.
        output_error: root mean square of what it leaves of the pooled outputs, relative to theirs.
    """

    x: Tensor
    selection: Tensor
    gradient_error: float
    output_error: float

    @property
    def error(self) -> float:
        """The sum of both errors; what is not a number is worst."""
        total = self.gradient_error + self.output_error
        return total if total == total else float("inf")


def evaluate(equations: Equations, x: Tensor, selection: Tensor | None = None) -> Fit:
    """Return `x` (I, H, W) with what it leaves, at the positions it selects itself or at those of `selection`.

    Args:
        equations: of the layer.
        x: the input (I, H, W).
        selection: positions (O, K, P); None takes those that `x` selects.
    """
    selection = select_largest(equations, x) if selection is None else selection
    off = equations.layer.pooled_outputs(x) - equations.target
    off = torch.where(equations.target_known, off, off.clamp_min(0))
    residual = equations.residual(x, selection)
    gradient_error = float(residual.norm() / equations.gradient.norm())
    output_error = float(equations.mean_over_targets(off.square()).sqrt() / equations.output_scale)
    return Fit(x, selection, gradient_error, output_error)


def evaluate_with_ties(equations: Equations, x: Tensor) -> Fit:
    """Return `x` at the positions it selects, or, if that explains more, with near ties as the gradient has them."""
    own = evaluate(equations, x)
    resolved = evaluate(equations, x, resolve_ties(equations, own))
    return resolved if resolved.error < own.error else own


def select_largest(equations: Equations, x: Tensor) -> Tensor:
    """Return 1 at the first position of each cell whose output is the largest up to rounding (O, K, P)."""
    if not equations.layer.positions_unknown:
        return equations.uniform_selection
    outputs = equations.layer.outputs(x)
    largest = outputs >= outputs.amax(-1, keepdim=True) - TIE * equations.output_scale
    return one_hot(largest.long().argmax(-1), outputs.shape[-1]).to(x)


def refine(
    equations: Equations, x: Tensor, rounds: int = 8, prior: GaussianPrior | None = None, within: float = math.inf
) -> Fit:
    """Return the best of `x` and the solutions of the linear systems of the positions found so far.

    Filters that the gradient confirms are trusted up to rounding, the others by what they leave; where two positions
    of a cell are close enough to be mistaken, the gradient decides. Of a layer without positions every system changes
    only how far filters are trusted, from `solve_linear` on.

    Args:
        equations: of the layer.
        x: where to begin (I, H, W).
        rounds: linear systems at most.
        prior: what is expected of X beside them.
        within: what the solution of a system may leave unexplained for another one to follow.
    """
    searched = equations.layer.positions_unknown
    best = now = evaluate(equations, x)
    tried: list[Tensor] = []
    for _ in range(rounds):
        selection = resolve_ties(equations, now)
        if searched and any(torch.equal(selection, other) for other in tried):
            break
        tried.append(selection)
        system = normal_equations_of(equations, replace(now, selection=selection), prior)
        by: Preconditioner = "whole" if prior is not None or not searched else "channels"
        now = evaluate_with_ties(equations, system.solve(now.x, 1e-12 if prior is None else 1e-6, preconditioner=by))
        if not now.error < min(FALLING * best.error, within):
            return now if now.error < best.error else best
        best = now
    return best


def solve_linear(equations: Equations, prior: GaussianPrior | None = None) -> Fit:
    """Return the input of a layer without positions where its equations are off by rounding alone, as they mostly are.

    Trusted less at the start, the gradient would win that trust back only slowly: the outputs, often as many as there
    are unknowns, are explained by what leaves a thousandth of it.
    """
    std = equations.noise_floor.maximum(equations.open_side_std)
    system = NormalEquations.of(
        equations,
        equations.uniform_selection,
        std,
        MIN_RELATIVE_NOISE * equations.output_scale,
        prior=prior,
        per_equation=True,
    )
    start = equations.layer.weight.new_zeros(equations.layer.shape)
    return evaluate(equations, system.solve(start, 1e-12, preconditioner="whole"))


def normal_equations_of(equations: Equations, fit: Fit, prior: GaussianPrior | None = None) -> NormalEquations:
    """Return the linear system of the positions in `fit`, each filter trusted as far as the gradient confirms it."""
    residual = equations.residual(fit.x, fit.selection).square().mean(1).sqrt()
    gradient_std = residual.maximum(equations.noise_floor)
    output_std = equations.output_scale * min(max(fit.output_error, 1e-6), 1e-4)
    return NormalEquations.of(equations, fit.selection, gradient_std, output_std, prior=prior, per_equation=True)


# ---- outputs near an activation's bend or lowest value ---------------------------------------------------------------
def choose_activation_sides(equations: Equations, fit: Fit) -> tuple[Equations, Fit]:
    """Choose the side of the activation's bend, or of its lowest value, that outputs lie on, as far as `fit` tells.

    Returns:
        The equations and the fit, the same objects where nothing is chosen.
    """
    if equations.other_target is None:
        return _choose_by_gradient(equations, fit)
    chosen = _choose_by_outputs(equations, equations.other_target, fit)
    return (equations, fit) if chosen is equations else (chosen, evaluate(chosen, fit.x, fit.selection))


def _choose_by_outputs(equations: Equations, other_target: Tensor, fit: Fit) -> Equations:
    """Take each target that is not known yet for the one of both that the outputs of `fit` are near, if they are.

    On a level stretch every output below the other target is as good.
    """
    asked = ~equations.target_known & (equations.side_factor != 1)
    apart = equations.target - other_target
    outputs = equations.layer.pooled_outputs(fit.x)
    near = SIDE_MARGIN * apart - SIDE_DEVIATIONS * fit.output_error * equations.output_scale
    this = asked & ((outputs - equations.target).abs() < near)
    level_there = equations.side_factor == 0
    above = outputs - other_target
    other = asked & ~this & (torch.where(level_there, above, above.abs()) < near)
    if not bool((this | other).any()):
        return equations
    factor = torch.where(other, equations.side_factor, 1.0)
    level = factor == 0  # whatever lies there gives the same value: the target stays a bound
    return replace(
        equations,
        target=torch.where(other, other_target, equations.target),
        target_known=equations.target_known | ((this | other) & ~level),
        target_std=equations.target_std / factor.abs().masked_fill(level, 1.0),
        signal=equations.signal * factor,
        side_factor=torch.where(this | other, 1.0, equations.side_factor),
    )


def _choose_by_gradient(equations: Equations, fit: Fit) -> tuple[Equations, Fit]:
    """Move outputs to the other side of the activation's bend where that explains the gradient better.

    Outputs too small for their sign to be known give their filter a signal that is off by the ratio of the two slopes.
    The best one of a filter is moved, for as long as that halves what the filter leaves.

    Returns:
        The equations and the fit, the same objects where nothing is moved.
    """
    undecided = equations.side_factor != 1
    cells = torch.einsum("okp,kpm->okm", fit.selection, equations.layer.patches(fit.x)[equations.layer.cells])
    residual = equations.residual(fit.x, fit.selection)
    factor = torch.ones_like(equations.signal)
    for o in undecided.any(1).nonzero().flatten().tolist():
        at = undecided[o].nonzero().flatten()
        for _ in range(len(at)):
            other = _side_switch_factor(equations.side_factor[o, at], factor[o, at])
            change = equations.signal[o, at] * factor[o, at] * (other - 1)
            after = (residual[o] - change[:, None] * cells[o, at]).square().sum(-1)
            best = int(after.argmin())
            if not after[best] < 0.5 * residual[o].square().sum():
                break
            residual[o] -= change[best] * cells[o, at[best]]
            factor[o, at[best]] *= other[best]
    if bool((factor == 1).all()):
        return equations, fit
    moved = replace(
        equations,
        signal=equations.signal * factor,
        target=equations.target / factor,
        target_std=equations.target_std / factor,
    )
    return moved, evaluate(moved, fit.x, fit.selection)


def _side_switch_factor(side_factor: Tensor, factor: Tensor) -> Tensor:
    """Return what moves an output to the other side of the bend, from the side it is on."""
    return torch.where(factor == 1, side_factor, 1 / side_factor)


# ---- positions nearly as large as the one selected -------------------------------------------------------------------
def resolve_ties(equations: Equations, fit: Fit, tries: int = 64) -> Tensor:
    """Return the selection of `fit` (O, K, P), near ties changed where that explains the gradient better.

    Args:
        equations: of the layer.
        fit: an input and its selection.
        tries: changes of a filter's positions, at most.
    """
    if not equations.layer.positions_unknown:
        return fit.selection
    outputs = equations.layer.outputs(fit.x)
    reach = (10 * max(fit.output_error, 1e-6)) * equations.output_scale
    near = outputs >= outputs.amax(-1, keepdim=True) - reach
    near &= near.sum(-1, keepdim=True) > 1
    cells = equations.layer.patches(fit.x)[equations.layer.cells]
    selection, residual = fit.selection.clone(), equations.residual(fit.x, fit.selection)
    for filters in torch.arange(len(near), device=near.device).split(max(1, MAX_PATCH_NUMBERS // cells.numel())):
        asked = torch.zeros_like(near)
        asked[filters] = near[filters]
        explained = 1e-6 * equations.gradient_scale
        flips = PositionFlips.of(asked, selection, cells, equations.signal, residual, explained)
        for _ in range(tries):
            made = flips.apply_best()
            if made is None:
                break
            flips, changed, at, position = made
            selection[changed, at] = one_hot(position, selection.shape[-1]).to(selection)
    return selection
