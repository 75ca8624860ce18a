"""The input of a convolution from its equations: which of the ways to take, and when to believe the result.

Without pooling positions in question, one linear solve and its refinement do. Otherwise

- features, of which little is known beforehand (`_solve_features`): in closed form where there are filters enough; by
  annealing, fast; by the cavity search; by annealing, slow; by expectation propagation. The first that satisfies the
  equations ends the search. A batch begins with the cavity search.
- pixels (`_solve_pixels`): by expectation propagation under up to three schedules; then their levels, and what is
  likelier around them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attacks.analytic.maxpool.annealing import AnnealingStart, anneal, cooling_schedule
from attacks.analytic.maxpool.cavity import CavityState, cavity_states, fits_in_memory
from attacks.analytic.maxpool.closed_form import solve_by_row_space
from attacks.analytic.maxpool.determined_pixels import precise_targets
from attacks.analytic.maxpool.edge_prior import edge_prior
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.expectation_propagation import PropagationState, Schedule, propagate
from attacks.analytic.maxpool.flat_regions import snap_flat_regions
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior, choice_prior, feature_prior, image_prior
from attacks.analytic.maxpool.integer_decoding import decode_levels
from attacks.analytic.maxpool.joint_decoding import decode_jointly
from attacks.analytic.maxpool.likelihood import has_outlier
from attacks.analytic.maxpool.normal_equations import MAX_DENSE_UNKNOWNS, Preconditioner
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.pixel_search import search_pixels
from attacks.analytic.maxpool.refinement import (
    choose_activation_sides,
    evaluate,
    evaluate_with_ties,
    normal_equations_of,
    refine,
    resolve_ties,
    solve_linear,
)
from attacks.analytic.maxpool.solution import LayerSolution

FEW_PIXELS_OFF = 1e-3
"""Equations left unexplained by less than this share are a matter of a few pixels: another start would not help."""
NOISY_ERROR_RATIO = 20.0
"""Nor did it, but for one made problem, where of one image no more was left than so many times what noise leaves."""
RIM_PIXELS_OFF = 1e-2
"""Equations left unexplained by less than this share may be so for a few pixels at the rim, off by several levels. In a
picture of 8 x 8 a single one off by three leaves more: propagation goes on, then, in place of single steps."""
BATCH_NEARLY_SOLVED = 0.1
"""Equations of a batch left unexplained by less than this share may be settled by more rounds."""
RETRY_RATIO = 4.0
"""How much nearer a search has to come before what follows from it is tried again."""
CAVITY_TRY_NOISE, CAVITY_PATIENCE = 4e-3, 15
"""Noise of the middle filter, relative to its gradient, below which what a state leads to is tried; and states that
come no nearer before the search is given up."""
MAX_REWEIGHTINGS = 5
"""How often features are solved for again with other weights."""
REWEIGHTING_FALLS = 0.9
"""Share of the residual above which the last time was the last one."""
REWEIGHTING_GROWS = 1.5
"""Growth of the residual above which the last time is discarded."""
MAX_SIDE_ROUNDS = 6
"""Times that a layer is solved for while sides of an activation's lowest value are chosen."""
MAX_BATCH_ROUNDS, BATCH_FALLS = 6, 0.9
"""Rounds in which a batch is solved anew, and the share of what was left above which a round brought nothing."""
FAST, SLOW = cooling_schedule(30.0, 0.65), cooling_schedule(100.0, 0.75)
"""Of the first annealing for layers further up, and of one that comes after the cavity search: of ten color images that
the first missed, the slow one found one, and the cavity search the other nine."""
FEW_OPEN_PIXELS = 32
"""Pixels not confirmed yet below which it is worth while to try what follows from a propagation."""
CHEAP_UNKNOWNS = 1500
"""Unknowns below which a propagation is so cheap that it may take its time."""
PROPAGATION_PATIENCE, PROPAGATION_DIVERGES = 4, 5.0
"""States of a propagation that come no nearer before it is given up, and the ratio to the nearest that ends it."""
FINISH_FALLS = 0.7
"""Share of what was left above which soft and hard positions in turn bring nothing more."""


OPEN_SHARE = 0.6
"""Equations of a picture, as a share of its pixels, below which it is not solved for but estimated."""
OPEN_SCHEDULE = Schedule(levels=None, iterations=14, factor=0.4, least=1e-5)
"""The schedule of expectation propagation for such a picture."""


def schedules(unknowns: int) -> tuple[Schedule, ...]:
    """Return the schedules for the propagation of `unknowns` numbers an image.

    The second starts wider and moves more slowly, the third takes any pixel value.
    """
    fast = Schedule(noise=1e-3, factor=0.2, damping=0.7, iterations=24, least=1e-9, gradient=0.1)
    wide = Schedule(deviation=0.6, noise=0.1, damping=0.3, factor=0.5)
    return Schedule() if unknowns < CHEAP_UNKNOWNS else fast, wide, Schedule(levels=None, least=1e-8)


def solve_layer(equations: Equations, statistics: tuple[Tensor, Tensor] | None = None) -> LayerSolution:
    """Return the input of a convolution.

    Args:
        equations: of the layer.
        statistics: mean and standard deviation (I,) of an image's normalization for the first layer of a network; None
            for one further up, where nothing is expected of the input.
    """
    if not equations.layer.positions_unknown:
        prior = None if statistics is None else image_prior(equations.layer, *statistics, 0.3).with_smoothness(1e-5)
        return _solve_without_positions(equations, prior)
    return _solve_features(equations) if statistics is None else _solve_pixels(equations, *statistics)


def _solve_without_positions(equations: Equations, prior: GaussianPrior | None) -> LayerSolution:
    """Return what linear equations lead to, solved anew for as long as sides of an activation follow from it."""
    best: LayerSolution | None = None
    rises = equations.other_target is None
    for start in (equations,) if rises else (equations, equations.on_rising_side):
        guess, known = solve_linear(start, prior), equations
        for _ in range(MAX_SIDE_ROUNDS):
            chosen, _ = choose_activation_sides(known, evaluate(known, guess.x))
            now = LayerSolution.of(chosen, refine(chosen, guess.x, prior=prior))
            best = now.better_of(best)
            if best.is_satisfied or not now.chose_sides_of(known):
                break
            known = now.equations
            guess = solve_linear(known, prior)
    assert best is not None
    return best


# ---- features --------------------------------------------------------------------------------------------------------
def _solve_features(equations: Equations) -> LayerSolution:
    closed = solve_by_row_space(equations)
    best = None if closed is None else LayerSolution.of(equations, refine(equations, closed))
    one = equations.layer.images == 1
    # what annealing misses by more is found otherwise, mostly at less cost than its refinement to no avail
    within = FEW_PIXELS_OFF if one and fits_in_memory(equations) else math.inf
    fast = partial(_solve_by_annealing, temperatures=FAST, within=within)
    slow = partial(_solve_by_annealing, temperatures=SLOW)
    for way in (fast, _solve_by_cavity, slow) if one else (_solve_by_cavity, fast, slow):
        if best is None or not best.is_satisfied:
            best = way(equations).better_of(best)
    assert best is not None
    if not best.is_satisfied and one:  # of a batch it would take hours
        propagated = _solve_by_propagation(equations, feature_prior(equations), Schedule(factor=0.4))
        best = _refine_batch(propagated).better_of(best)
    return _reweight(best)


def _reweight(now: LayerSolution) -> LayerSolution:
    """Solve again with equations weighed by this solution's own residuals, no longer by those of the search.

    With every equation weighed by its own rounding, all together may be left a little more.
    """
    for _ in range(MAX_REWEIGHTINGS):
        before, found = now.fit.error, _solve_anew(now)
        if not found.fit.error < REWEIGHTING_GROWS * before or (now.is_satisfied and not found.is_satisfied):
            break
        now = found
        if not now.fit.error < REWEIGHTING_FALLS * before:
            break
    return now


def _solve_anew(now: LayerSolution, preconditioner: Preconditioner = "channels") -> LayerSolution:
    """Return what the linear system leads to of the positions that `now` decides for."""
    equations = now.equations
    fit = replace(now.fit, selection=resolve_ties(equations, now.fit))
    x = normal_equations_of(equations, fit).solve(fit.x, 1e-12, preconditioner=preconditioner)
    return LayerSolution.of(equations, evaluate_with_ties(equations, x))


def _refine_batch(now: LayerSolution, rounds: int = MAX_BATCH_ROUNDS) -> LayerSolution:
    """Return the best of a batch's input solved anew several times: its equations hang together worse than one image's.

    It goes on from what explains less, too, from where the next one may explain all.
    """
    if now.equations.layer.images == 1 or not now.fit.error < BATCH_NEARLY_SOLVED:
        return now
    best = now
    for _ in range(rounds):
        now = _solve_anew(now, "whole")
        done = not now.fit.error < BATCH_FALLS * best.fit.error
        best = now.better_of(best)
        if done and best.is_satisfied:
            break
    return best


def _solve_by_annealing(equations: Equations, temperatures: Sequence[float], within: float = math.inf) -> LayerSolution:
    x, _ = anneal(equations, temperatures, partial(_is_close, equations))
    return _refine_batch(LayerSolution.of(equations, refine(equations, x, within=within)))


def _is_close(equations: Equations, x: Tensor) -> bool:
    fit = evaluate(equations, x)
    return fit.gradient_error < FEW_PIXELS_OFF and fit.output_error < FEW_PIXELS_OFF


def _solve_by_cavity(equations: Equations) -> LayerSolution:
    """Return what is found where each filter's positions are decided by what the others say.

    Whenever the search has come `RETRY_RATIO` times nearer, what follows from it is tried, and at its end.
    """
    blank = equations.layer.weight.new_zeros(equations.layer.shape)
    best = LayerSolution.of(equations, evaluate(equations, blank))
    if not fits_in_memory(equations):
        return best
    try_below, nearest, stalled = CAVITY_TRY_NOISE, math.inf, 0
    state: CavityState | None = None
    for state in cavity_states(equations):
        noise = float((state.variance.sqrt() / equations.gradient_scale).median())
        stalled = 0 if noise < 0.99 * nearest else stalled + 1
        nearest = min(nearest, noise)
        if noise < try_below:
            try_below = noise / RETRY_RATIO
            best = _refine_cavity_state(equations, state).better_of(best)
        if best.is_satisfied or stalled > CAVITY_PATIENCE:
            break
    if state is not None and not best.is_satisfied:
        best = _refine_cavity_state(equations, state).better_of(best)
    return best


def _refine_cavity_state(equations: Equations, state: CavityState) -> LayerSolution:
    return _refine_batch(LayerSolution.of(equations, refine(equations, state.x)))


# ---- pixels ----------------------------------------------------------------------------------------------------------
def _solve_pixels(equations: Equations, mean: Tensor, std: Tensor) -> LayerSolution:
    if equations.layer.images == 1 and equations.count < OPEN_SHARE * math.prod(equations.layer.shape):
        return _solve_open_pixels(equations, mean, std)
    best: LayerSolution | None = None
    all_levels, choice = PixelLevels.of(mean, std), choice_prior(equations.layer, mean, std)
    unknowns = math.prod(equations.layer.shape)
    large = equations.layer.images > 1 and unknowns > MAX_DENSE_UNKNOWNS
    for schedule in schedules(math.prod(equations.layer.image_shape))[: 1 if large else None]:
        prior = image_prior(equations.layer, mean, std, schedule.deviation)
        levels = None if schedule.levels is None else PixelLevels.of(mean, std, schedule.levels)
        found = _solve_by_propagation(equations, prior, schedule, levels)
        if not found.is_satisfied and found.chose_sides_of(equations):
            equations = found.equations  # it knows more targets now, which lead to positions
            found = _solve_by_propagation(equations, prior, schedule, levels).better_of(found)
        before, best = best, found.better_of(best)
        if best is before:
            continue
        if best.fit.error < RIM_PIXELS_OFF:
            best = decode_levels(best, choice, all_levels)
            # few unknowns are cheap to doubt; of many, only what is not proven or leaves an output wrong
            if unknowns < CHEAP_UNKNOWNS or not best.is_proven or has_outlier(best.equations, best.fit):
                best = _search_neighborhood(best, choice, all_levels)
        # of a batch noise is mostly what the layers above were left off by
        noisy = equations.layer.images == 1 and best.fit.error < NOISY_ERROR_RATIO * equations.gradient_noise
        if best.fit.error < FEW_PIXELS_OFF or noisy:
            break
    assert best is not None
    return snap_flat_regions(best, all_levels) if best.fit.error < FEW_PIXELS_OFF else best


def _solve_open_pixels(equations: Equations, mean: Tensor, std: Tensor) -> LayerSolution:
    """Return what is expected of pixels that equations leave open in many directions: no search would decide them."""
    prior, refit = choice_prior(equations.layer, mean, std), partial(edge_prior, offset=mean, std=std)
    *_, last = propagate(equations, prior, OPEN_SCHEDULE, refit=refit)
    return LayerSolution.of(equations, evaluate(equations, last.mean))


def _search_neighborhood(now: LayerSolution, prior: GaussianPrior, levels: PixelLevels) -> LayerSolution:
    """Return the likeliest solution around `now`.

    A solution that the first search made satisfied is searched around once more.
    """
    now = decode_jointly(now, prior, levels)
    found = search_pixels(now, prior, levels)
    if now.is_satisfied or not found.is_satisfied:
        return found
    return search_pixels(decode_jointly(found, prior, levels), prior, levels)


def _solve_by_propagation(
    equations: Equations, prior: GaussianPrior, schedule: Schedule, levels: PixelLevels | None = None
) -> LayerSolution:
    """Return the best of the propagation's means and of what they lead to.

    Whenever the propagation has come `RETRY_RATIO` times nearer, what follows from it is tried, and at its end.
    """
    unknowns = math.prod(equations.layer.shape)
    # where the outputs alone are more than enough, or features have no levels, positions follow from rough values
    rough = int(equations.target_known.sum()) > 2 * unknowns or levels is None
    try_below = 2e-2 if rough else 1.5e-3
    waits = not rough and bool(precise_targets(equations).any())  # for pixels to be confirmed
    best: LayerSolution | None = None
    nearest = tried = PropagationState.first(equations)
    stalled, open_pixels = 0, math.prod(equations.layer.shape[1:])
    for state in propagate(equations, prior, schedule, levels):
        stalled = 0 if state.error < nearest.error else stalled + 1
        nearest = state if stalled == 0 else nearest
        if stalled > PROPAGATION_PATIENCE or not state.error < PROPAGATION_DIVERGES * nearest.error:
            break
        before, open_pixels = open_pixels, int((~state.confirmed).sum())
        ripe = not waits or open_pixels == 0 or before <= open_pixels < FEW_OPEN_PIXELS
        if state.error < try_below and ripe:
            try_below, tried = state.error / RETRY_RATIO, state
            best = _finish_propagation(equations, state, prior, levels).better_of(best)
            if best.is_satisfied:
                return best
    if best is not None and tried is nearest:
        return best
    return _finish_propagation(equations, nearest, prior, levels).better_of(best)


def _finish_propagation(
    equations: Equations, state: PropagationState, prior: GaussianPrior, levels: PixelLevels | None
) -> LayerSolution:
    """Return what soft and hard positions in turn make of a propagation's state, for as long as it gets better.

    Not even that is needed where its mean, put on levels, explains everything; what the equations leave open stays near
    that mean, which the prior holds, while a solution of hard positions lets go of it.
    """
    prior = replace(prior, sites=state.level_sites)
    equations, _ = choose_activation_sides(equations, evaluate(equations, state.mean, state.selection))
    residual = equations.residual(state.mean, state.selection)
    gradient_std = equations.gradient_std(state.mean, state.selection, residual)
    start = AnnealingStart(state.mean, state.selection, gradient_std, equations.output_scale * state.error)
    best = None
    if levels is not None:
        best = _put_on_levels(levels, LayerSolution.of(equations, evaluate(equations, state.mean)))
    if best is not None and best.is_satisfied:
        return best
    while True:
        done = partial(_is_close, equations)
        x, selection = anneal(equations, [1.0] * 4, done, steps=1, start=start, prior=prior.with_smoothness(1e-3))
        now = LayerSolution.of(equations, refine(equations, x, rounds=3, prior=prior.with_smoothness(1e-5)))
        if levels is not None:
            on_levels = _put_on_levels(levels, now)
            now = on_levels if on_levels.is_satisfied else on_levels.better_of(now)
        if best is not None and not now.fit.error < FINISH_FALLS * best.fit.error:
            return now.better_of(best)
        best, equations, fit = now, now.equations, now.fit
        if best.is_satisfied:
            return best
        gradient_std = equations.gradient_std(fit.x, selection, equations.residual(fit.x, selection))
        start = AnnealingStart(fit.x, selection, gradient_std, equations.output_scale * fit.output_error)


def _put_on_levels(levels: PixelLevels, now: LayerSolution, rounds: int = 3) -> LayerSolution:
    """Return the solution with every pixel on a level.

    First the nearest level is taken; near a solution, neighboring levels that explain more.
    """
    equations, x = now.equations, levels.nearest(now.fit.x)
    best: LayerSolution | None = None
    for more in reversed(range(rounds)):
        fit = evaluate(equations, x)
        fit = evaluate(equations, x, resolve_ties(equations, fit))
        best = LayerSolution.of(equations, fit).better_of(best)
        if not (more and fit.error < RIM_PIXELS_OFF):
            break
        system = normal_equations_of(equations, fit)
        x, before = levels.coordinate_descent(x, system.dense(), system.rhs), x
        if torch.equal(x, before):
            break
    assert best is not None
    return best
