"""Finds the pixels that nothing leaves open: by exact equations, or by outputs that pooling passed over.

`confirm_pixels` is asked on the way, of an input on levels; `find_determined_pixels` at the end, of a solution.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.nn.functional import one_hot

from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.integer_decoding import MAX_ROUNDABLE_STD
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.refinement import Fit
from attacks.analytic.maxpool.solution import LayerSolution

MAX_DETERMINED_RANGE = 0.5 / 255
"""How far a pixel in [0, 1] may move and still counts as known."""
MAX_LEVEL_DISTANCE = 0.05
"""Median distance to the nearest level, in steps, below which pixels are on levels: of any others it is a quarter."""
MAX_FREE = 64
"""Open numbers up to which linear programs are solved for them."""
MAX_PRECISE_TOLERANCE = 2e-4
"""Uncertainty of a target, relative to the outputs, up to which it tells one level from the next."""
HOLDING_SHARE, MIN_HOLDING = 0.3, 2
"""Share and number of the precise equations that see a pixel that have to hold: one in fifty holds by chance."""


def find_determined_pixels(solution: LayerSolution, mean: Tensor, std: Tensor) -> Tensor:
    """Return which pixels of a solution are determined (I, H, W).

    Args:
        solution: of a network's first layer.
        mean: of an image's normalization (I,).
        std: of an image's normalization (I,).
    """
    levels, fit = PixelLevels.of(mean, std), solution.fit
    mean, std = mean[:, None, None], std[:, None, None]
    if solution.determined is None:
        deviations, on_levels = solution.deviations(), _snap_to_levels(solution, levels)
        if on_levels is not None:
            deviations = deviations.maximum(on_levels.deviations())
            fit = replace(fit, gradient_error=on_levels.fit.gradient_error, output_error=on_levels.fit.output_error)
        determined = deviations * std < MAX_ROUNDABLE_STD / 255
    else:
        determined = solution.determined.clone()
    free = ~determined
    if bool(free.any()):
        low, high = -mean / std, (1 - mean) / std
        ranges = movable_ranges(solution.equations, fit, free, low, high)
        determined[free] = ranges * std.expand_as(determined)[free] < MAX_DETERMINED_RANGE
    if solution.disputed is not None:
        # inequalities hold at the positions found, and rule out nothing that selects others
        determined &= ~solution.disputed
    if levels.contain(fit.x) and not solution.equations.layer.is_average:
        determined &= uncontradicted_pixels(solution.equations, fit.x, levels.step)
        if not bool(determined.all()):  # what is open may also move the positions by which others are determined
            determined &= confirm_pixels(solution.equations, fit.x, levels.step)
    return determined


def _snap_to_levels(solution: LayerSolution, levels: PixelLevels) -> LayerSolution | None:
    """Return the nearest levels, where the picture is taken to be on them although the solution isn't; else None.

    Real numbers follow whatever equations are off by, and leave less of it. Where most of them are next to levels
    nevertheless, the picture is on these, and what is left there says how far off the equations are. Black and white
    are levels of any picture, and so say nothing.
    """
    x, indices = solution.fit.x, levels.indices(solution.fit.x)
    inside = (indices > 0) & (indices < levels.count - 1)
    if levels.contain(x) or not bool(inside.any()):
        return None
    nearest = levels.values(indices)
    median = ((x - nearest) / levels.step).abs()[inside].median()
    return solution.with_input(nearest) if bool(median < MAX_LEVEL_DISTANCE) else None


# ---- inequalities ----------------------------------------------------------------------------------------------------
def movable_ranges(equations: Equations, fit: Fit, free: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return how far each free number of the input can move from where it is, whatever the other free ones do (n,).

    All others stay. What moves has to keep every output that was selected within what the outputs' equations leave,
    and every other one below it: two linear programs for each number. Infinite where there are too many free numbers
    to tell, or no solution.

    Args:
        equations: of the layer.
        fit: their solution.
        free: which numbers may move (I, H, W).
        low: least value of each number (I, H, W), or what broadcasts to it.
        high: greatest value of each number, likewise.
    """
    entries = free.flatten().nonzero().flatten()
    ranges = torch.full((len(entries),), float("inf")).to(fit.x)
    if not 0 < len(entries) <= MAX_FREE or equations.layer.is_average:
        return ranges
    matrix, bounds = _output_inequalities(equations, fit, entries)
    now = fit.x.flatten()[entries]
    least = (low.expand_as(fit.x).flatten()[entries] - now).clamp_max(0).tolist()
    most = (high.expand_as(fit.x).flatten()[entries] - now).clamp_min(0).tolist()
    box = list(zip(least, most, strict=True))
    for n in range(len(entries)):
        reach = []
        for sign in (1.0, -1.0):
            costs = [0.0] * len(entries)
            costs[n] = -sign
            solved = linprog(costs, A_ub=matrix, b_ub=bounds, bounds=box, method="highs")
            reach.append(-solved.fun if solved.status == 0 else float("inf"))
        ranges[n] = max(reach)
    return ranges


def _output_inequalities(equations: Equations, fit: Fit, entries: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix (rows, n) and bounds (rows,) of what steps of some numbers (n,) may add to the outputs."""
    columns = []
    for entry in entries.tolist():
        unit = torch.zeros_like(fit.x)
        unit.view(-1)[entry] = 1
        columns.append(equations.layer.linear_outputs(unit)[:, equations.layer.cells].flatten())
    change = torch.stack(columns, 1)  # (O K P, n)
    allowed = 3 * (fit.output_error + equations.gradient_noise) * equations.output_scale + 3 * equations.target_std
    above = allowed[..., None] - equations.excess(fit.x)
    selected = (fit.selection > 0.5) & equations.target_known[..., None]
    below = (allowed[..., None] + equations.excess(fit.x)).masked_fill(~selected, float("inf"))
    touched = change.abs().amax(1) > 0
    held = touched & selected.flatten()
    matrix = torch.cat([change[touched], -change[held]]).cpu().numpy()
    bounds = torch.cat([above.flatten()[touched], below.flatten()[held]]).clamp_min(0).cpu().numpy()
    return matrix, bounds


# ---- equations that hold to the last digit ---------------------------------------------------------------------------
def confirm_pixels(equations: Equations, x: Tensor, step: Tensor) -> Tensor:
    """Return which pixels (H, W) are confirmed: nearly all precise equations that see them hold.

    An output is a sum over all numbers of a patch. Were a single one of them a level off, it would miss its target by
    more than may be: an output says nothing of a pixel whose weights are too small for that.

    Args:
        equations: of the layer.
        x: an input on levels (I, H, W).
        step: between two levels (I, 1, 1).
    """
    seen, holding = count_precise_equations(equations, x, step)
    return (holding >= MIN_HOLDING) & (holding >= HOLDING_SHARE * seen)


def uncontradicted_pixels(equations: Equations, x: Tensor, step: Tensor) -> Tensor:
    """Return which pixels (H, W) no precise equation sees, or enough of those that do hold.

    A sum over all equations hardly tells a few pixels at a rim that are levels off; the ones that see them do.

    Args: as those of `confirm_pixels`.
    """
    seen, holding = count_precise_equations(equations, x, step)
    return holding >= HOLDING_SHARE * seen


def precise_targets(equations: Equations) -> Tensor:
    """Return which outputs (O, K) tell one level from the next."""
    return equations.target_known & (_target_tolerance(equations) < MAX_PRECISE_TOLERANCE * equations.output_scale)


def count_precise_equations(equations: Equations, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many equations that tell levels apart see each pixel (H, W), and how many of these hold.

    Args: as those of `confirm_pixels`.
    """
    layer, precise, tolerance = equations.layer, precise_targets(equations), _target_tolerance(equations)
    outputs = layer.outputs(x)
    largest, at = outputs.max(-1)
    holds = precise & ((largest - equations.target).abs() < tolerance)
    least = (layer.weight.abs() * step).amin(1).flatten(1).mT  # (kh * kw, O), of any channel
    taps = len(least)
    ones = torch.eye(taps).to(least).view(taps, 1, *layer.kernel)  # one tap after the other
    plane = replace(layer, weight=ones, bias=ones.new_zeros(taps), shape=(1, *layer.shape[1:]))
    selection = one_hot(at, outputs.shape[-1]).to(x)
    reaching = least[..., None] > tolerance
    seen, holding = (
        plane.backpropagate(plane.scatter(torch.einsum("okp,tok->tkp", selection, (reaching & which).to(x))))[0].round()
        for which in (precise, holds)
    )
    return seen, holding


def _target_tolerance(equations: Equations) -> Tensor:
    """Return how far outputs may be off their targets (O, K)."""
    return 3 * (equations.target_std + equations.gradient_noise * equations.output_scale)
