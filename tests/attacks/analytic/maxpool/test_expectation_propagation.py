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
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.expectation_propagation import (
    PosteriorPrecision,
    PropagationState,
    Schedule,
    gradient_precision,
    propagate,
    update_sites,
)
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior, feature_prior, image_prior
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.pixel_subset import PixelSubset
from attacks.analytic.maxpool.refinement import evaluate, select_largest
from attacks.analytic.maxpool.solution import LayerSolution


def moved(equations: Equations, truth: Tensor) -> PropagationState:
    """A state as the propagation meets it: sites of all sizes, some positions open."""
    selection = 0.7 * select_largest(equations, truth) + 0.3 * equations.uniform_selection
    draw = torch.Generator().manual_seed(3)
    half = torch.randn(*selection.shape, selection.shape[-1], generator=draw, dtype=torch.float64)
    shift = torch.randn(selection.shape, generator=draw, dtype=torch.float64)
    levels = torch.rand(2, *truth.shape, generator=draw, dtype=torch.float64)
    none = torch.zeros(truth.shape[1:], dtype=torch.bool)
    return PropagationState(half @ half.mT, shift, selection, truth, torch.ones_like(truth), levels, none)


def every(equations: Equations) -> PixelSubset:
    """All pixels."""
    return PixelSubset.of(equations.layer.cell_layer, torch.zeros(equations.layer.shape[1:], dtype=torch.bool))


@pytest.mark.parametrize("told", [False, True])
def test_the_precision_is_its_matrix(told: bool) -> None:
    equations, truth = problem(6, 4)
    state = moved(equations, truth)
    prior = replace(image_prior(equations.layer, MEAN, STD, 0.3), sites=state.level_sites)
    precision = PosteriorPrecision(
        equations, prior, state, gradient_precision(equations, state, 0.1) if told else None, every(equations)
    )
    matrix, x = precision.dense(torch.float64), truth.flatten(1)
    assert torch.allclose(matrix, matrix.mT)
    assert torch.allclose((precision @ x).flatten(), matrix @ x.flatten())
    assert torch.allclose(precision.dense(torch.float32).double(), matrix, atol=1e-4 * float(matrix.abs().max()))
    mean, covariance = precision.moments(single=False) or (None, None)
    assert mean is not None
    assert covariance is not None
    assert torch.allclose(mean.flatten(), torch.linalg.solve(matrix, precision.shift.flatten()))
    assert torch.allclose(covariance, torch.linalg.inv(matrix))


@pytest.mark.parametrize("of", [lambda equations: image_prior(equations.layer, MEAN, STD, 0.3), feature_prior])
@pytest.mark.parametrize("images", [1, 2])
def test_before_anything_is_known_the_prior_is_all_there_is(
    of: Callable[[Equations], GaussianPrior], images: int
) -> None:
    equations, _ = problem(6, 4)
    layer = replace(equations.layer, shape=(3, 6 * images, 6), images=images)
    every_cell = [
        torch.cat([part] * images, 1)
        for part in (equations.target, equations.signal, equations.target_known, equations.target_std)
    ]
    target, signal, seen, loose = every_cell
    equations = replace(
        equations, layer=layer, target=target, signal=signal, target_known=seen, target_std=loose, side_factor=loose
    )
    prior, blank = of(equations), PropagationState.first(equations)
    solved = PosteriorPrecision(
        equations, replace(prior, sites=blank.level_sites), blank, None, every(equations)
    ).moments(single=False)
    assert solved is not None
    assert prior.moments is not None
    for made, expected in zip(prior.moments, solved, strict=True):
        assert torch.allclose(made, expected)


@pytest.mark.parametrize("size", [0.0, math.inf])
def test_of_outputs_that_say_nothing_there_is_no_prior_to_begin_with(size: float) -> None:
    equations, _ = problem(6, 4)
    layer = replace(equations.layer, weight=equations.layer.weight * 0) if size == 0 else equations.layer
    equations = replace(equations, layer=layer, target=equations.target * size if size else equations.target)
    prior = feature_prior(equations)
    assert prior.moments is None
    assert list(propagate(equations, prior, Schedule())) == []


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_what_is_certain_stays_and_the_rest_is_what_follows(share: float) -> None:
    equations, truth = problem(6, 4)
    held = torch.rand(truth.shape[1:], generator=torch.Generator().manual_seed(4)) < share
    state = replace(moved(equations, truth), confirmed=held)
    prior = replace(image_prior(equations.layer, MEAN, STD, 0.3), sites=state.level_sites)
    told, part = gradient_precision(equations, state, 0.1), PixelSubset.of(equations.layer.cell_layer, held)
    precision = PosteriorPrecision(equations, prior, state, told, part)
    matrix = replace(precision, open_pixels=every(equations)).dense(torch.float64)
    free = (~held).expand(truth.shape).flatten()
    assert torch.allclose(precision.dense(torch.float64), matrix[free][:, free])
    mean, covariance = precision.moments(single=False) or (None, None)
    assert mean is not None
    assert covariance is not None
    assert torch.equal(mean.flatten()[~free], truth.flatten()[~free])
    right = precision.shift.flatten()[free] - matrix[free][:, ~free] @ truth.flatten()[~free]
    assert torch.allclose(mean.flatten()[free], torch.linalg.solve(matrix[free][:, free], right))
    assert torch.allclose(covariance, torch.linalg.inv(matrix[free][:, free]))


def test_the_gradients_equations_say_where_their_own_image_is() -> None:
    equations, truth = problem(6, 4)
    state = replace(moved(equations, truth), selection=select_largest(equations, truth))
    told = gradient_precision(equations, state, 1e-3)
    assert torch.allclose(told @ truth.flatten(1), told.shift)


@pytest.mark.parametrize(("size", "moves"), [(1.0, True), (1e6, False)])
def test_a_cell_that_nothing_else_tells_keeps_its_site(size: float, moves: bool) -> None:
    equations, truth = problem(6, 1)
    state = PropagationState.first(equations)
    # what else is known has precision 1: of a site of 1e6 single precision leaves nothing to be told from it
    precision = size * torch.eye(4).double().expand_as(state.site_precision)
    state = replace(state, site_precision=precision, selection=select_largest(equations, truth))
    prior = replace(image_prior(equations.layer, MEAN, STD, 1.0), sites=None)
    part = every(equations)
    solved = PosteriorPrecision(equations, prior, state, None, part).moments(single=False)
    assert solved is not None
    site, _, selection = update_sites(
        equations, state, solved[0].view_as(truth), part.patch_covariances(solved[1]), 1e-8, 0.6
    )
    assert bool((site == precision).all()) != moves
    assert torch.equal(selection, state.selection) != moves


def test_single_precision_ends_only_where_the_outputs_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, _ = problem(8, 12)
    cheap: list[bool] = []
    solved = PosteriorPrecision.moments

    def watched(self: PosteriorPrecision, *, single: bool) -> tuple[Tensor, Tensor] | None:
        cheap.append(single)
        return solved(self, single=single)

    monkeypatch.setattr(PosteriorPrecision, "moments", watched)
    monkeypatch.setattr(expectation_propagation, "SINGLE_PRECISION_NOISE", 1e-4)
    schedule = Schedule(noise=1e-2, factor=0.1, iterations=11, least=1e-9)
    prior = image_prior(equations.layer, MEAN, STD, 0.3)
    errors = [state.error for state in propagate(equations, prior, schedule, LEVELS)]
    for before, single in zip(errors, cheap, strict=False):  # what the first iteration gives is known beforehand
        assert single or before < 1e-2
    assert len(cheap) == len(errors) - 1
    assert not all(cheap)
    assert sum(cheap) > 3  # noise alone would have been below it from the fourth iteration, the third of these, on


def test_what_came_no_nearer_is_not_tried_again_but_the_nearest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(6, 6)
    errors = [1e-3, 9e-4, 4e-4, 2e-4, 1.5e-4, 1.4e-4]
    sure = torch.ones(truth.shape[1:], dtype=torch.bool)
    states = [replace(PropagationState.first(equations), error=error, confirmed=sure) for error in errors]
    tried: list[float] = []

    def made(*_: object) -> Iterator[PropagationState]:
        return iter(states)

    def finished(equations: Equations, state: PropagationState, *_: object) -> LayerSolution:
        tried.append(state.error)
        return LayerSolution(equations, replace(evaluate(equations, truth), output_error=1.0))

    monkeypatch.setattr(solver, "propagate", made)
    monkeypatch.setattr(solver, "_finish_propagation", finished)
    prior = image_prior(equations.layer, MEAN, STD, 0.3)
    solver._solve_by_propagation(equations, prior, Schedule(), LEVELS)
    assert tried == [1e-3, 2e-4, 1.4e-4]


def attempts(states: list[PropagationState], truth: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The errors of those of the states that are tried, once a propagation of just these has been made."""
    tried: list[float] = []

    def finished(equations: Equations, state: PropagationState, *_: object) -> LayerSolution:
        tried.append(state.error)
        return LayerSolution(equations, replace(evaluate(equations, truth), output_error=1.0))

    monkeypatch.setattr(solver, "propagate", lambda *_: iter(states))
    monkeypatch.setattr(solver, "_finish_propagation", finished)
    return tried


def test_nothing_is_tried_while_equations_confirm_ever_more_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(6, 6)
    sizes = [(40, 1e-3), (20, 9e-4), (10, 8e-4), (10, 7e-4), (4, 6e-4)]
    total = truth[0].numel()
    monkeypatch.setattr(solver, "FEW_OPEN_PIXELS", 25)
    states = []
    for count, error in sizes:
        held = torch.arange(total).view(truth.shape[1:]) >= count
        states.append(replace(PropagationState.first(equations), error=error, confirmed=held))
    tried = attempts(states, truth, monkeypatch)
    solver._solve_by_propagation(equations, image_prior(equations.layer, MEAN, STD, 0.3), Schedule(), LEVELS)
    assert tried == [7e-4, 6e-4]  # where no more were confirmed, and the last


@pytest.mark.parametrize("noise", [None, 1e-3])
def test_where_nothing_can_be_confirmed_nothing_is_waited_for(
    noise: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    equations, truth = problem(6, 6)
    states = [replace(PropagationState.first(equations), error=error) for error in (1e-2, 1.4e-3, 3e-4, 7e-5, 6e-5)]
    tried = attempts(states, truth, monkeypatch)
    prior = image_prior(equations.layer, MEAN, STD, 0.3)
    if noise is None:  # without levels
        solver._solve_by_propagation(equations, prior, Schedule())
        assert tried == [1e-2, 1.4e-3, 3e-4, 7e-5, 6e-5]
    else:  # no output tells one level from the next
        solver._solve_by_propagation(replace(equations, gradient_noise=noise), prior, Schedule(), LEVELS)
        assert tried == [1.4e-3, 3e-4, 7e-5, 6e-5]


def test_levels_at_once_are_enough_where_the_mean_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(6, 6)
    state = replace(
        PropagationState.first(equations),
        mean=truth + 0.2 * LEVELS.step,
        selection=select_largest(equations, truth),
        error=1e-3,
    )
    prior = image_prior(equations.layer, MEAN, STD, 0.3)
    monkeypatch.delattr(solver, "anneal")  # not needed
    found = solver._finish_propagation(equations, state, prior, LEVELS)
    assert found.is_satisfied
    assert torch.allclose(found.fit.x, truth)


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
    equations, truth = problem(6, 6)
    start = evaluate(equations, truth)
    equations = replace(equations, gradient_noise=noise, layer=replace(equations.layer, images=images))
    coming, taken = iter(errors), list[float]()

    def started(equations: Equations, *_: object) -> LayerSolution:
        return LayerSolution(equations, replace(start, gradient_error=next(coming), output_error=0.0))

    def looked_at(now: LayerSolution, *_: object) -> LayerSolution:
        taken.append(now.fit.error)
        return now

    monkeypatch.setattr(solver, "_solve_by_propagation", started)
    monkeypatch.setattr(solver, "decode_levels", looked_at)
    for name in ("decode_jointly", "search_pixels", "snap_flat_regions"):
        monkeypatch.setattr(solver, name, lambda now, *_: now)
    best = solver._solve_pixels(equations, MEAN, STD)
    assert len(list(coming)) == len(errors) - starts
    assert best.fit.error == min(errors[:starts])
    # only what is better than the starts before it, and near enough, is put on levels
    nearest = [error for i, error in enumerate(errors[:starts]) if error < min((*errors[:i], solver.RIM_PIXELS_OFF))]
    assert taken == nearest


def test_levels_are_sought_further_only_near_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(8, 12)
    descents: list[int] = []
    descend = PixelLevels.coordinate_descent

    def counted(self: PixelLevels, x: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
        descents.append(1)
        return descend(self, x, matrix, right)

    monkeypatch.setattr(PixelLevels, "coordinate_descent", counted)
    draw = torch.randn(truth.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    far = solver._put_on_levels(LEVELS, LayerSolution.of(equations, evaluate(equations, truth + 0.3 * draw)))
    assert far.fit.error > solver.RIM_PIXELS_OFF
    assert not descents
    near = solver._put_on_levels(
        LEVELS, LayerSolution.of(equations, evaluate(equations, truth + 0.2 * LEVELS.step * draw))
    )
    assert near.fit.error < solver.RIM_PIXELS_OFF
    assert descents
    descents.clear()
    solver._put_on_levels(LEVELS, near, rounds=1)
    assert not descents  # nothing would look at the result
