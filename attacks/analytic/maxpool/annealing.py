"""Pooling positions by variational expectation-maximization under a falling temperature.

Minimizes (3) of the package in turn over X and over the probabilities q. With R_o what filter o leaves of its gradient
without cell k, e_okp how far an output exceeds its target, and T the temperature, the step in q is

    q_okp  ~  exp(-E_okp / T),
    E_okp  =  (e_okp^2 + sum_r!=p max(e_okr, 0)^2) / (2 u_ok)  +  |R_o - s_ok U_l(k,p)|^2 / (2 v_o),

cell after cell; where a target is only a bound, e_okp counts where it is positive. The step in X solves the normal
equations, and v_o follows from what X and q leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import MIN_RELATIVE_NOISE, Equations
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.normal_equations import NormalEquations, Preconditioner

STATIONARY = 1e-3
"""Change of the probabilities over a temperature at which X did not move, times the temperature: about the evidence,
below which colder ones would change little."""
SWEEPS = 2
"""Times that a step in q goes through all cells."""


def cooling_schedule(first: float, factor: float) -> list[float]:
    """Return temperatures that fall from `first` to 1, which is held for a while."""
    falling = []
    while first > 1:
        falling.append(first)
        first *= factor
    return [*falling, *[1.0] * 6]


@dataclass(frozen=True)
class AnnealingStart:
    """Where an annealing begins.

    Attributes:
        x: (I, H, W).
        selection: q, the probability of every position (O, K, P).
        gradient_std: standard deviation of each filter's gradient equations (O,), the root of v.
        output_std: standard deviation of the outputs' equations.
    """

    x: Tensor
    selection: Tensor
    gradient_std: Tensor
    output_std: Tensor

    @classmethod
    def blank(cls, equations: Equations) -> AnnealingStart:
        """Return the start where nothing is known."""
        x = equations.layer.weight.new_zeros(equations.layer.shape)
        return cls(x, equations.uniform_selection, equations.gradient_scale, equations.output_scale)


def anneal(
    equations: Equations,
    temperatures: Sequence[float],
    done: Callable[[Tensor], bool],
    *,
    steps: int = 2,
    start: AnnealingStart | None = None,
    prior: GaussianPrior | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the layer's input X (I, H, W) and the probability of every position (O, K, P).

    Each filter has a noise of its own, estimated anew in every step: filters whose positions are right become exact
    equations, X follows from them, and the rest with it. High temperatures keep all positions open at first.

    Args:
        equations: of the layer.
        temperatures: one after the other.
        done: tells from X whether the search is over.
        steps: at each temperature.
        start: where to begin; None is nothing known and every position alike.
        prior: what is expected of X beside the equations.
    """
    start = AnnealingStart.blank(equations) if start is None else start
    x, selection, gradient_std, output_std = start.x, start.selection, start.gradient_std, start.output_std
    preconditioner: Preconditioner = "mean" if prior is None else "channels"
    exceeding = None
    for temperature in temperatures:
        before = x, selection
        for _ in range(steps):
            system = NormalEquations.of(equations, selection, gradient_std, output_std, exceeding, prior)
            x = system.solve(x, preconditioner=preconditioner)
            excess = equations.excess(x)
            energy = _output_energy(equations, excess, output_std)
            selection, residual = _update_selection(equations, x, energy, selection, gradient_std, temperature)
            exceeding = (excess > 0).to(selection)
            gradient_std = equations.gradient_std(x, selection, residual).maximum(equations.noise_floor)
            off = equations.mean_over_targets((selection * excess.square()).sum(-1)).sqrt()
            output_std = off.clamp_min(MIN_RELATIVE_NOISE * equations.output_scale)
        still = torch.equal(x, before[0])
        if done(x) or (still and bool(temperature * (selection - before[1]).abs().max() < STATIONARY)):
            break
    return x, selection


def _output_energy(equations: Equations, excess: Tensor, output_std: Tensor) -> Tensor:
    """Return the outputs' part of E (O, K, P): the position's own error, and that of others above the target."""
    above = excess.clamp_min(0).square()
    own = excess.square() * equations.target_known[..., None] + above * ~equations.target_known[..., None]
    return (own + above.sum(-1, keepdim=True) - above) / (2 * (output_std**2 + equations.target_std**2)[..., None])


def _update_selection(
    equations: Equations,
    x: Tensor,
    output_energy: Tensor,
    selection: Tensor,
    gradient_std: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Update probabilities (O, K, P) cell after cell; return them and what of the gradient is left (O, M)."""
    cells = equations.layer.patches(x)[equations.layer.cells]  # U (K, P, M)
    products = cells @ cells.mT  # (K, P, P)
    weight = equations.signal / gradient_std.square()[:, None]  # s / v
    energy = output_energy + 0.5 * (equations.signal * weight)[..., None] * products.diagonal(dim1=1, dim2=2)
    residual, selection = equations.residual(x, selection), selection.clone()
    for _ in range(SWEEPS):
        for k in range(cells.shape[0]):
            signal, before = equations.signal[:, k, None], selection[:, k]
            along = residual @ cells[k].mT + signal * (before @ products[k])  # U . R without this cell
            now = torch.softmax((weight[:, k, None] * along - energy[:, k]) / temperature, -1)
            residual.addmm_(signal * (before - now), cells[k])
            selection[:, k] = now
    return selection, residual
