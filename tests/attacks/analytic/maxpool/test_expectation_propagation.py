"""Expectation propagation at the pixels: its matrix, what rounding may not touch, and when it is followed up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from support.pixels import LEVELS, MEAN, STD, problem
from torch import Tensor

from attacks.analytic.maxpool import expectation_propagation, solver
from attacks.analytic.maxpool.equations import Equations, Prior
from attacks.analytic.maxpool.expectation_propagation import (
    Precision,
    Schedule,
    State,
    feature_prior,
    gradient,
    image_prior,
    propagate,
    sites,
)
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.pixel_subset import Part
from attacks.analytic.maxpool.refinement import fit, passed
from attacks.analytic.maxpool.solution import Solved


def moved(known: Equations, truth: Tensor) -> State:
    """A state as the propagation meets it: sites of all sizes, some positions open."""
    shares = 0.7 * passed(known, truth) + 0.3 * known.start
    draw = torch.Generator().manual_seed(3)
    half = torch.randn(*shares.shape, shares.shape[-1], generator=draw, dtype=torch.float64)
    shift = torch.randn(shares.shape, generator=draw, dtype=torch.float64)
    levels = torch.rand(2, *truth.shape, generator=draw, dtype=torch.float64)
    none = torch.zeros(truth.shape[1:], dtype=torch.bool)
    return State(half @ half.mT, shift, shares, truth, torch.ones_like(truth), levels, none)


def every(known: Equations) -> Part:
    """All pixels."""
    return Part.of(known.layer.windows, torch.zeros(known.layer.shape[1:], dtype=torch.bool))


@pytest.mark.parametrize("told", [False, True])
def test_the_precision_is_its_matrix(told: bool) -> None:
    known, truth = problem(6, 4)
    state = moved(known, truth)
    prior = replace(image_prior(known.layer, MEAN, STD, 0.3), sites=state.levels)
    precision = Precision(known, prior, state, gradient(known, state, 0.1) if told else None, every(known))
    matrix, x = precision.dense(torch.float64), truth.flatten(1)
    assert torch.allclose(matrix, matrix.mT)
    assert torch.allclose((precision @ x).flatten(), matrix @ x.flatten())
    assert torch.allclose(precision.dense(torch.float32).double(), matrix, atol=1e-4 * float(matrix.abs().max()))
    mean, covariance = precision.solved(single=False) or (None, None)
    assert mean is not None
    assert covariance is not None
    assert torch.allclose(mean.flatten(), torch.linalg.solve(matrix, precision.right.flatten()))
    assert torch.allclose(covariance, torch.linalg.inv(matrix))


@pytest.mark.parametrize("of", [lambda known: image_prior(known.layer, MEAN, STD, 0.3), feature_prior])
@pytest.mark.parametrize("images", [1, 2])
def test_before_anything_is_known_the_prior_is_all_there_is(of: Callable[[Equations], Prior], images: int) -> None:
    known, _ = problem(6, 4)
    layer = replace(known.layer, shape=(3, 6 * images, 6), images=images)
    every_cell = [torch.cat([part] * images, 1) for part in (known.target, known.signal, known.seen, known.loose)]
    target, signal, seen, loose = every_cell
    known = replace(known, layer=layer, target=target, signal=signal, seen=seen, loose=loose, doubt=loose)
    prior, blank = of(known), State.first(known)
    solved = Precision(known, replace(prior, sites=blank.levels), blank, None, every(known)).solved(single=False)
    assert solved is not None
    assert prior.alone is not None
    for made, expected in zip(prior.alone, solved, strict=True):
        assert torch.allclose(made, expected)


@pytest.mark.parametrize("size", [0.0, math.inf])
def test_of_outputs_that_say_nothing_there_is_no_prior_to_begin_with(size: float) -> None:
    known, _ = problem(6, 4)
    layer = replace(known.layer, weight=known.layer.weight * 0) if size == 0 else known.layer
    known = replace(known, layer=layer, target=known.target * size if size else known.target)
    prior = feature_prior(known)
    assert prior.alone is None
    assert list(propagate(known, prior, Schedule())) == []


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_what_is_certain_stays_and_the_rest_is_what_follows(share: float) -> None:
    known, truth = problem(6, 4)
    held = torch.rand(truth.shape[1:], generator=torch.Generator().manual_seed(4)) < share
    state = replace(moved(known, truth), held=held)
    prior = replace(image_prior(known.layer, MEAN, STD, 0.3), sites=state.levels)
    told, part = gradient(known, state, 0.1), Part.of(known.layer.windows, held)
    precision = Precision(known, prior, state, told, part)
    matrix = replace(precision, part=every(known)).dense(torch.float64)
    free = (~held).expand(truth.shape).flatten()
    assert torch.allclose(precision.dense(torch.float64), matrix[free][:, free])
    mean, covariance = precision.solved(single=False) or (None, None)
    assert mean is not None
    assert covariance is not None
    assert torch.equal(mean.flatten()[~free], truth.flatten()[~free])
    right = precision.right.flatten()[free] - matrix[free][:, ~free] @ truth.flatten()[~free]
    assert torch.allclose(mean.flatten()[free], torch.linalg.solve(matrix[free][:, free], right))
    assert torch.allclose(covariance, torch.linalg.inv(matrix[free][:, free]))


def test_the_gradients_equations_say_where_their_own_image_is() -> None:
    known, truth = problem(6, 4)
    state = replace(moved(known, truth), shares=passed(known, truth))
    told = gradient(known, state, 1e-3)
    assert torch.allclose(told @ truth.flatten(1), told.right)


@pytest.mark.parametrize(("size", "moves"), [(1.0, True), (1e6, False)])
def test_a_cell_that_nothing_else_tells_keeps_its_site(size: float, moves: bool) -> None:
    known, truth = problem(6, 1)
    state = State.first(known)
    # what else is known has precision 1: of a site of 1e6 single precision leaves nothing to be told from it
    precision = size * torch.eye(4).double().expand_as(state.precision)
    state = replace(state, precision=precision, shares=passed(known, truth))
    prior = replace(image_prior(known.layer, MEAN, STD, 1.0), sites=None)
    part = every(known)
    solved = Precision(known, prior, state, None, part).solved(single=False)
    assert solved is not None
    site, _, shares = sites(known, state, solved[0].view_as(truth), part.covariances(solved[1]), 1e-8, 0.6)
    assert bool((site == precision).all()) != moves
    assert torch.equal(shares, state.shares) != moves


def test_single_precision_ends_only_where_the_outputs_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = problem(8, 12)
    cheap: list[bool] = []
    solved = Precision.solved

    def watched(self: Precision, *, single: bool) -> tuple[Tensor, Tensor] | None:
        cheap.append(single)
        return solved(self, single=single)

    monkeypatch.setattr(Precision, "solved", watched)
    monkeypatch.setattr(expectation_propagation, "SINGLE", 1e-4)
    schedule = Schedule(noise=1e-2, factor=0.1, iterations=11, least=1e-9)
    prior = image_prior(known.layer, MEAN, STD, 0.3)
    errors = [state.error for state in propagate(known, prior, schedule, LEVELS)]
    for before, single in zip(errors, cheap, strict=False):  # what the first iteration gives is known beforehand
        assert single or before < 1e-2
    assert len(cheap) == len(errors) - 1
    assert not all(cheap)
    assert sum(cheap) > 3  # noise alone would have been below it from the fourth iteration, the third of these, on


def test_what_came_no_nearer_is_not_tried_again_but_the_nearest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(6, 6)
    errors = [1e-3, 9e-4, 4e-4, 2e-4, 1.5e-4, 1.4e-4]
    sure = torch.ones(truth.shape[1:], dtype=torch.bool)
    states = [replace(State.first(known), error=error, held=sure) for error in errors]
    tried: list[float] = []

    def made(*_: object) -> Iterator[State]:
        return iter(states)

    def finished(known: Equations, state: State, *_: object) -> Solved:
        tried.append(state.error)
        return Solved(known, replace(fit(known, truth), forward=1.0))

    monkeypatch.setattr(solver, "propagate", made)
    monkeypatch.setattr(solver, "_finished", finished)
    prior = image_prior(known.layer, MEAN, STD, 0.3)
    solver._propagated(known, prior, Schedule(), LEVELS)
    assert tried == [1e-3, 2e-4, 1.4e-4]


def attempts(states: list[State], truth: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The errors of those of the states that are tried, once a propagation of just these has been made."""
    tried: list[float] = []

    def finished(known: Equations, state: State, *_: object) -> Solved:
        tried.append(state.error)
        return Solved(known, replace(fit(known, truth), forward=1.0))

    monkeypatch.setattr(solver, "propagate", lambda *_: iter(states))
    monkeypatch.setattr(solver, "_finished", finished)
    return tried


def test_nothing_is_tried_while_equations_confirm_ever_more_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(6, 6)
    sizes = [(40, 1e-3), (20, 9e-4), (10, 8e-4), (10, 7e-4), (4, 6e-4)]
    total = truth[0].numel()
    monkeypatch.setattr(solver, "OPEN", 25)
    states = []
    for count, error in sizes:
        held = torch.arange(total).view(truth.shape[1:]) >= count
        states.append(replace(State.first(known), error=error, held=held))
    tried = attempts(states, truth, monkeypatch)
    solver._propagated(known, image_prior(known.layer, MEAN, STD, 0.3), Schedule(), LEVELS)
    assert tried == [7e-4, 6e-4]  # where no more were confirmed, and the last


@pytest.mark.parametrize("noise", [None, 1e-3])
def test_where_nothing_can_be_confirmed_nothing_is_waited_for(
    noise: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, truth = problem(6, 6)
    states = [replace(State.first(known), error=error) for error in (1e-2, 1.4e-3, 3e-4, 7e-5, 6e-5)]
    tried = attempts(states, truth, monkeypatch)
    prior = image_prior(known.layer, MEAN, STD, 0.3)
    if noise is None:  # without levels
        solver._propagated(known, prior, Schedule())
        assert tried == [1e-2, 1.4e-3, 3e-4, 7e-5, 6e-5]
    else:  # no output tells one level from the next
        solver._propagated(replace(known, noise=noise), prior, Schedule(), LEVELS)
        assert tried == [1.4e-3, 3e-4, 7e-5, 6e-5]


def test_levels_at_once_are_enough_where_the_mean_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(6, 6)
    state = replace(State.first(known), mean=truth + 0.2 * LEVELS.step, shares=passed(known, truth), error=1e-3)
    prior = image_prior(known.layer, MEAN, STD, 0.3)
    monkeypatch.delattr(solver, "anneal")  # not needed
    found = solver._finished(known, state, prior, LEVELS)
    assert found.satisfied
    assert torch.allclose(found.found.x, truth)


@pytest.mark.parametrize(
    ("noise", "errors", "starts", "images"),
    [
        (1e-6, (5e-3, 6e-3, 4e-3), 3, 1),  # far from explained: another start may come nearer
        (1e-6, (5e-3, 5e-4, 4e-4), 2, 1),  # a matter of a few pixels
        (1e-3, (1.9e-2, 1.8e-2, 1.7e-2), 1, 1),  # about as near as noise allows
        (1e-3, (2.1e-2, 1.9e-2, 1e-3), 2, 1),
        (1e-3, (1.9e-2, 1.8e-2, 1.7e-2), 3, 2),  # a batch's may be left by the layers above
        (0.2, (0.3, 0.2, 0.1), 1, 1),
    ],
)
def test_other_starts_are_tried_while_more_than_noise_is_left(
    noise: float, errors: tuple[float, ...], starts: int, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, truth = problem(6, 6)
    start = fit(known, truth)
    known = replace(known, noise=noise, layer=replace(known.layer, images=images))
    coming, taken = iter(errors), list[float]()

    def started(known: Equations, *_: object) -> Solved:
        return Solved(known, replace(start, gradient=next(coming), forward=0.0))

    def looked_at(now: Solved, *_: object) -> Solved:
        taken.append(now.found.error)
        return now

    monkeypatch.setattr(solver, "_propagated", started)
    monkeypatch.setattr(solver, "decode", looked_at)
    for name in ("together", "revised", "flatten"):
        monkeypatch.setattr(solver, name, lambda now, *_: now)
    best = solver._pixels(known, MEAN, STD)
    assert len(list(coming)) == len(errors) - starts
    assert best.found.error == min(errors[:starts])
    # only what is better than the starts before it, and near enough, is put on levels
    nearest = [error for i, error in enumerate(errors[:starts]) if error < min((*errors[:i], solver.ROUGH))]
    assert taken == nearest


def test_levels_are_sought_further_only_near_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(8, 12)
    descents: list[int] = []
    descend = Levels.descend

    def counted(self: Levels, x: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
        descents.append(1)
        return descend(self, x, matrix, right)

    monkeypatch.setattr(Levels, "descend", counted)
    draw = torch.randn(truth.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    far = solver._on(LEVELS, Solved.of(known, fit(known, truth + 0.3 * draw)))
    assert far.found.error > solver.ROUGH
    assert not descents
    near = solver._on(LEVELS, Solved.of(known, fit(known, truth + 0.2 * LEVELS.step * draw)))
    assert near.found.error < solver.ROUGH
    assert descents
    descents.clear()
    solver._on(LEVELS, near, rounds=1)
    assert not descents  # nothing would look at the result
