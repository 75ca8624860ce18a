"""The input of a convolution from what is known of it: which of the ways to take, and when to believe the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attacks.analytic.maxpool.annealing import Start, anneal, temperatures
from attacks.analytic.maxpool.cavity import Guess, affordable, guesses
from attacks.analytic.maxpool.closed_form import from_rows
from attacks.analytic.maxpool.confirmed_pixels import tight
from attacks.analytic.maxpool.equations import LARGEST, Equations, Preconditioner, Prior
from attacks.analytic.maxpool.expectation_propagation import (
    Schedule,
    State,
    choice_prior,
    feature_prior,
    image_prior,
    propagate,
)
from attacks.analytic.maxpool.flat_regions import flatten
from attacks.analytic.maxpool.integer_decoding import decode
from attacks.analytic.maxpool.joint_decoding import together
from attacks.analytic.maxpool.likelihood import astray
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.pixel_search import revised
from attacks.analytic.maxpool.refinement import decided, explained, fit, settle, solvable, system_of, unbent
from attacks.analytic.maxpool.solution import Solved

NEAR = 1e-3
"""Equations left unexplained by less than this share are a matter of a few pixels: another start would not help."""

NOISY = 20.0
"""Nor did it, but for one made problem, where of one image no more was left than so many times what noise leaves."""

ROUGH = 1e-2
"""Equations left unexplained by less than this share may be so for a few pixels at the rim, off by several levels. In a
picture of 8 x 8 a single one off by three leaves more: propagation goes on, then, in place of single steps."""

ROUGHLY = 0.1
"""Equations of a batch left unexplained by less than this share may be settled by more rounds."""

AGAIN = 4.0
"""How much nearer a propagation has to come before what follows from it is tried again."""

UNSURE, STALLED = 4e-3, 15
"""Noise of the middle filter, relative to its gradient, below which what a guess leads to is tried; and guesses that
come no nearer before the search is given up."""

SHARPER, FALLING, WORSE = 5, 0.9, 1.5
"""Times that features are solved for anew at most; the share of what was left above which that was the last time, and
above which it is not believed."""

FAST, SLOW = temperatures(30.0, 0.65), temperatures(100.0, 0.75)
"""Of the first annealing for layers further up, and of one that comes after `guesses`: of ten colour images that the
first missed, the slow one found one, and `guesses` the other nine."""

OPEN = 32
"""Pixels not confirmed yet below which it is worth while to try what follows from a propagation."""

SMALL = 1500
"""Unknowns below which a propagation is so cheap that it may take its time."""


def schedules(unknown: int) -> tuple[Schedule, ...]:
    """For the propagation of `unknown` pixels an image.

    The second starts wider and moves more slowly, the third takes any pixel value.
    """
    fast = Schedule(noise=1e-3, factor=0.2, damping=0.7, iterations=24, least=1e-9, gradient=0.1)
    wide = Schedule(deviation=0.6, noise=0.1, damping=0.3, factor=0.5)
    return Schedule() if unknown < SMALL else fast, wide, Schedule(levels=None, least=1e-8)


def solve(known: Equations, statistics: tuple[Tensor, Tensor] | None = None) -> Solved:
    """The input of a convolution.

    Args:
        known: the layer's equations.
        statistics: mean and standard deviation (I,) of an image's normalisation for the first layer of a network; None
            for one further up, of whose input nothing is expected.
    """
    if not known.layer.searched:
        prior = None if statistics is None else image_prior(known.layer, *statistics, 0.3).weakened(1e-5)
        return Solved.of(known, settle(known, solvable(known, prior).x, prior=prior))
    return _hidden(known) if statistics is None else _pixels(known, *statistics)


def _hidden(known: Equations) -> Solved:
    closed = from_rows(known)
    best = None if closed is None else Solved.of(known, settle(known, closed))
    one = known.layer.images == 1
    # what annealing misses by more is found otherwise, mostly at less cost than its settling to no avail
    within = NEAR if one and affordable(known) else math.inf
    fast = partial(_annealed, stretches=FAST, within=within)
    slow = partial(_annealed, stretches=SLOW)
    for way in (fast, _without, slow) if one else (_without, fast, slow):
        if best is None or not best.satisfied:
            best = way(known).better(best)
    assert best is not None
    if not best.satisfied and one:  # of a batch it would take hours
        best = _again(_propagated(known, feature_prior(known), Schedule(factor=0.4))).better(best)
    return _sharper(best)


def _sharper(now: Solved) -> Solved:
    """The same, solved for anew with equations weighed by what it leaves of them, not by what a search had left.

    With every equation weighed by its own rounding, all together may be left a little more.
    """
    for _ in range(SHARPER):
        before, found = now.found.error, _anew(now)
        if not found.found.error < WORSE * before or (now.satisfied and not found.satisfied):
            break
        now = found
        if not now.found.error < FALLING * before:
            break
    return now


def _anew(now: Solved, preconditioner: Preconditioner = "channels") -> Solved:
    """What the linear system leads to of the positions that `now` decides for."""
    found = replace(now.found, shares=decided(now.known, now.found))
    moved = system_of(now.known, found).solve(found.x, 1e-12, preconditioner=preconditioner)
    return Solved.of(now.known, explained(now.known, moved))


def _annealed(known: Equations, stretches: Sequence[float], within: float = math.inf) -> Solved:
    x, _ = anneal(known, stretches, partial(_close, known))
    return _again(Solved.of(known, settle(known, x, within=within)))


def _without(known: Equations) -> Solved:
    """What is found where each filter's positions are decided by what the others say."""
    best = Solved.of(known, fit(known, known.layer.weight.new_zeros(known.layer.shape)))
    if not affordable(known):
        return best
    attempt, nearest, since = UNSURE, math.inf, 0
    guess: Guess | None = None
    for guess in guesses(known):
        unsure = float((guess.noise.sqrt() / known.gradient_scale).median())
        since = 0 if unsure < 0.99 * nearest else since + 1
        nearest = min(nearest, unsure)
        if unsure < attempt:
            attempt = unsure / AGAIN
            best = _again(Solved.of(known, settle(known, guess.x))).better(best)
        if best.satisfied or since > STALLED:
            break
    if guess is not None and not best.satisfied:
        best = _again(Solved.of(known, settle(known, guess.x))).better(best)
    return best


def _again(now: Solved, rounds: int = 6) -> Solved:
    """The best of a batch's input settled anew several times: its equations hang together worse than one image's.

    It goes on from what explains less, too, from where the next one may explain all.
    """
    if now.known.layer.images == 1 or not now.found.error < ROUGHLY:
        return now
    best = now
    for _ in range(rounds):
        now = _anew(now, "whole")
        done = not now.found.error < 0.9 * best.found.error
        best = now.better(best)
        if done and best.satisfied:
            break
    return best


def _pixels(known: Equations, mean: Tensor, std: Tensor) -> Solved:
    best: Solved | None = None
    even, expected = Levels.of(mean, std), choice_prior(known.layer, mean, std)
    large = known.layer.images > 1 and math.prod(known.layer.shape) > LARGEST
    for schedule in schedules(math.prod(known.layer.alone))[: 1 if large else None]:
        prior = image_prior(known.layer, mean, std, schedule.deviation)
        levels = None if schedule.levels is None else Levels.of(mean, std, schedule.levels)
        before, best = best, _propagated(known, prior, schedule, levels).better(best)
        if best is before:
            continue
        if best.found.error < ROUGH:
            best = decode(best, expected, even)
            # few unknowns are cheap to doubt; of many, only what is not proven or leaves an output wrong
            if math.prod(known.layer.shape) < SMALL or not best.proven or astray(best.known, best.found):
                best = _doubted(best, expected, even)
        # of a batch noise is mostly what the layers above were left off by
        if best.found.error < NEAR or (known.layer.images == 1 and best.found.error < NOISY * known.noise):
            break
    assert best is not None
    return flatten(best, even) if best.found.error < NEAR else best


def _doubted(now: Solved, expected: Prior, levels: Levels) -> Solved:
    """The likeliest around `now`; what came to satisfy its equations last is doubted like what did before."""
    now = together(now, expected, levels)
    found = revised(now, expected, levels)
    if now.satisfied or not found.satisfied:
        return found
    return revised(together(found, expected, levels), expected, levels)


def _propagated(known: Equations, prior: Prior, schedule: Schedule, levels: Levels | None = None) -> Solved:
    """The best of the propagation's means and of what they lead to."""
    unknown = math.prod(known.layer.shape)
    # where the outputs alone are more than enough, or features have no levels, positions follow from rough values
    rough = int(known.seen.sum()) > 2 * unknown or levels is None
    attempt = 2e-2 if rough else 1.5e-3
    waits = not rough and bool(tight(known).any())  # for pixels to be confirmed
    best: Solved | None = None
    nearest = tried = State.first(known)
    since, left = 0, math.prod(known.layer.shape[1:])
    for state in propagate(known, prior, schedule, levels):
        since = 0 if state.error < nearest.error else since + 1
        nearest = state if since == 0 else nearest
        if since > 4 or not state.error < 5 * nearest.error:
            break
        before, left = left, int((~state.held).sum())
        ripe = not waits or left == 0 or before <= left < OPEN
        if state.error < attempt and ripe:
            attempt, tried = state.error / AGAIN, state
            best = _finished(known, state, prior, levels).better(best)
            if best.satisfied:
                return best
    return best if best is not None and tried is nearest else _finished(known, nearest, prior, levels).better(best)


def _finished(known: Equations, state: State, prior: Prior, levels: Levels | None) -> Solved:
    """What soft and hard positions in turn make of a propagation's state, for as long as it gets better.

    Not even that is needed where its mean, put on levels, explains everything; what the equations leave open stays near
    that mean, which the prior holds, while a solution of hard positions lets go of it.
    """
    prior = replace(prior, sites=state.levels)
    known, _ = unbent(known, fit(known, state.mean, state.shares))
    left = known.deviation(state.mean, state.shares, known.residual(state.mean, state.shares))
    start = Start(state.mean, state.shares, left, known.forward_scale * state.error)
    best = None if levels is None else _on(levels, Solved.of(known, fit(known, state.mean)))
    if best is not None and best.satisfied:
        return best
    while True:
        x, shares = anneal(known, [1.0] * 4, partial(_close, known), steps=1, start=start, prior=prior.weakened(1e-3))
        now = Solved.of(known, settle(known, x, rounds=3, prior=prior.weakened(1e-5)))
        if levels is not None:
            even = _on(levels, now)
            now = even if even.satisfied else even.better(now)
        if best is not None and not now.found.error < 0.7 * best.found.error:
            return now.better(best)
        best, known, found = now, now.known, now.found
        if best.satisfied:
            return best
        noise = known.deviation(found.x, shares, known.residual(found.x, shares))
        start = Start(found.x, shares, noise, known.forward_scale * found.forward)


def _on(levels: Levels, now: Solved, rounds: int = 3) -> Solved:
    """The same with every pixel on a level: the nearest, then, near a solution, those beside it that explain more."""
    known, x = now.known, levels.nearest(now.found.x)
    best: Solved | None = None
    for more in reversed(range(rounds)):
        found = fit(known, x)
        found = fit(known, x, decided(known, found))
        best = Solved.of(known, found).better(best)
        if not (more and found.error < ROUGH):
            break
        system = system_of(known, found)
        x, before = levels.descend(x, system.dense(), system.right), x
        if torch.equal(x, before):
            break
    assert best is not None
    return best


def _close(known: Equations, x: Tensor) -> bool:
    found = fit(known, x)
    return found.gradient < 1e-3 and found.forward < 1e-3
