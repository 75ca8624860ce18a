"""Levels and positions decided together: from wrong ones of both, which explain each other, to the right ones."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.pixels import LEVELS, MEAN, STD, problem
from torch import Tensor
from torch.nn.functional import one_hot

import fl.data
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior, choice_prior, image_prior
from attacks.analytic.maxpool.joint_decoding import LocalSystem, decode_jointly
from attacks.analytic.maxpool.lattice import Lattice
from attacks.analytic.maxpool.likelihood import has_outlier, misfit, typical_deviation
from attacks.analytic.maxpool.refinement import Fit, evaluate, select_largest
from attacks.analytic.maxpool.solution import LayerSolution
from benchmarks.exact.cascade import SUBJECTS, attack_image
from fl.seeds import stream


def rounded(side: int = 8, filters: int = 8, noise: float = 1e-4) -> tuple[Equations, Tensor]:
    """What a convolution shows of a picture, the gradient and the outputs rounded so much."""
    equations, truth = problem(side, filters)
    draw = stream(0, "rounded")

    def off(like: Tensor) -> Tensor:
        return noise * like.square().mean().sqrt() * torch.randn(like.shape, generator=draw, dtype=like.dtype)

    equations = replace(
        equations,
        gradient=equations.gradient + off(equations.gradient),
        target=equations.target + off(equations.target),
    )
    grain = torch.full_like(equations.gradient, noise)
    return replace(
        equations,
        gradient_noise=noise,
        rounding=grain,
        target_std=noise * equations.output_scale.expand_as(equations.target),
    ), truth


def moved(equations: Equations, truth: Tensor, *places: tuple[int, int, int, int]) -> LayerSolution:
    """The picture with some pixels off by so many levels, at the positions that follow."""
    number = LEVELS.indices(truth)
    for channel, row, column, levels in places:
        number[channel, row, column] += levels
    return LayerSolution.of(equations, evaluate(equations, truth)).with_input(LEVELS.values(number))


def wrong(found: LayerSolution, truth: Tensor) -> int:
    return int((LEVELS.indices(found.fit.x) != LEVELS.indices(truth)).sum())


def test_wrong_levels_that_draw_positions_after_them_are_found_back() -> None:
    equations, truth = rounded(filters=16)
    start = moved(equations, truth, (0, 3, 3, 2), (1, 3, 3, -1), (2, 4, 3, -2))
    assert not torch.equal(start.fit.selection, select_largest(equations, truth))
    assert not start.is_satisfied
    found = decode_jointly(start, choice_prior(equations.layer, MEAN, STD), LEVELS)
    assert wrong(found, truth) == 0
    assert found.is_satisfied
    assert found.determined is not None
    assert bool(found.determined.all())


def test_what_is_likeliest_stays_and_keeps_what_was_proven() -> None:
    equations, truth = rounded(filters=16)
    start = replace(moved(equations, truth), determined=torch.ones_like(truth, dtype=torch.bool))
    found = decode_jointly(start, choice_prior(equations.layer, MEAN, STD), LEVELS)
    assert found.fit is start.fit
    assert found.determined is not None
    assert bool(found.determined.all())


def test_a_pixel_whose_other_level_explains_as_much_is_not_fixed() -> None:
    equations, truth = rounded(filters=16, noise=3e-3)  # some levels change the equations by less than rounding
    start = replace(moved(equations, truth), determined=torch.ones_like(truth, dtype=torch.bool))
    found = decode_jointly(start, choice_prior(equations.layer, MEAN, STD), LEVELS)
    assert found.determined is not None
    assert not bool(found.determined.all())
    assert int(found.determined.sum()) > 100
    assert not bool((found.determined & (LEVELS.indices(found.fit.x) != LEVELS.indices(truth))).any())


@pytest.mark.slow
def test_what_is_far_off_is_left_rather_than_made_worse() -> None:
    equations, truth = rounded()
    start = moved(equations, truth, (0, 3, 3, 9), (1, 3, 3, -5), (2, 4, 3, -7), (0, 0, 0, 4))
    found = decode_jointly(start, choice_prior(equations.layer, MEAN, STD), LEVELS)
    assert found.is_satisfied or not found.fit.error > start.fit.error
    assert wrong(found, truth) <= wrong(start, truth)


def test_an_input_on_no_levels_stays_as_it_is() -> None:
    equations, truth = problem(6, 6)
    between = truth + 0.4 * LEVELS.step
    equations = replace(
        equations, target=equations.layer.pooled_outputs(between), gradient=torch.zeros_like(equations.gradient)
    )
    equations = replace(equations, gradient=-equations.residual(between, select_largest(equations, between)))
    start = LayerSolution.of(equations, evaluate(equations, between))
    assert decode_jointly(start, choice_prior(equations.layer, MEAN, STD), LEVELS) is start


def test_equations_nearby_are_those_of_a_changed_position_and_moved_pixels() -> None:
    equations, truth = rounded(6, 4)
    start = moved(equations, truth, (0, 2, 2, 2), (1, 0, 0, -1))
    pixels = torch.arange(0, truth.numel(), 5)
    near = LocalSystem.of(start, choice_prior(equations.layer, MEAN, STD), LEVELS, pixels)
    steps = torch.arange(len(pixels)).to(truth) - 7.0
    number = LEVELS.indices(start.fit.x)
    number.view(-1)[pixels] += steps
    systems = list(near._forms_without_prior())
    places = [None, *near._plausible_changes(torch.linalg.inv(systems[0][0] + near.prior_moments[0]))]
    assert len(systems) == len(places) > 1

    def left(x: Tensor, selection: Tensor, sure: Tensor) -> float:
        """Of all equations, weighed, at given positions."""
        missed = (selection * equations.excess(x)).sum(-1)
        return float(
            (near.precisions.gradient_precision * equations.residual(x, selection).square()).sum()
            + (sure * missed.square()).sum()
        )

    now = left(start.fit.x, start.fit.selection, near.precisions.output_precision)
    for (told, right, more), place in zip(systems, places, strict=True):
        selection, sure = start.fit.selection.clone(), near.precisions.output_precision.clone()
        if place is not None:
            o, k, p = place
            selection[o, k] = one_hot(torch.tensor(p), selection.shape[-1]).to(selection)
            sure[o, k] = near.precisions.changed_output_precision[o, k]
        predicted = float(steps @ told @ steps - 2 * steps @ right) + more
        assert math.isclose(left(LEVELS.values(number), selection, sure) - now, predicted, rel_tol=1e-6)


def test_the_truth_is_likelier_than_what_is_a_level_off_and_one_filter_hides_no_other() -> None:
    equations, truth = rounded()
    right = evaluate(equations, truth, select_largest(equations, truth))
    scale = typical_deviation(equations, right)
    least = misfit(equations, right, scale)
    for place in itertools.product(range(3), (2, 3, 5), (2, 4)):
        other = truth.clone()
        other[place] += LEVELS.step[place[0], 0, 0]
        assert misfit(equations, evaluate(equations, other, select_largest(equations, other)), scale) > least
    selection = right.selection.clone()
    selection[0, 0] = selection[0, 0].roll(1)
    spoilt = Fit(truth, selection, 1.0, 1.0)  # by a wrong position of the first filter
    other = truth.clone()
    other[0, 4, 4] += LEVELS.step[0, 0, 0]
    both = misfit(equations, evaluate(equations, other, selection), scale) - misfit(equations, spoilt, scale)
    alone = misfit(equations, evaluate(equations, other, right.selection), scale) - least
    assert both > 0.7 * alone > 0


def test_an_output_that_is_wrong_shows_though_all_others_hold() -> None:
    equations, truth = rounded(filters=16)
    right = evaluate(equations, truth, select_largest(equations, truth))
    assert not has_outlier(equations, right)
    target = equations.target.clone()
    target[3, 4] += 40 * float(equations.target_std[3, 4])
    assert has_outlier(replace(equations, target=target), right)


@pytest.mark.skipif("HYPERLEAK_DATA" not in os.environ, reason="HYPERLEAK_DATA names no folder of data sets")
def test_a_corner_that_one_output_contradicts_is_found_and_not_called_verified() -> None:
    data = fl.data.load("fashion_mnist")
    found = attack_image(data.test, data.num_classes, "hyperfl-grey", *SUBJECTS["HyperFL"], 528)
    assert found["exact"]
    assert found["fixed_wrong"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_nearest_few_are_those_of_brute_force(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(3, 3)) * np.array([3.0, 2.0, 1.5])
    matrix = rows.T @ rows + np.eye(3)
    center = draw.normal(size=3)
    every = np.array(list(itertools.product(range(-6, 7), repeat=3)), dtype=float)
    far = np.einsum("ni,ij,nj->n", every - center, matrix, every - center)
    found = Lattice(matrix).nearest_candidates(center, matrix, 60)[:8]
    assert np.allclose(np.einsum("ni,ij,nj->n", found - center, matrix, found - center), np.sort(far)[:8])


def test_where_nothing_tells_a_choice_goes_on_as_the_picture_does() -> None:
    equations, _ = problem(8, 3)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    ramp = ((0.2 + 0.05 * rows + 0.03 * columns - 0.5) / 0.25).to(torch.float64).expand(3, -1, -1)

    def corner(prior: GaussianPrior) -> float:
        hidden = torch.zeros(3, 8, 8, dtype=torch.bool)
        hidden[:, 0, 0] = True
        at, rest = hidden.flatten(), ~hidden.flatten()
        side = prior.shift.flatten()[at] - prior.dense[at][:, rest] @ ramp.flatten()[rest]
        mean = torch.linalg.solve(prior.dense[at][:, at], side)
        return float((mean - ramp[:, 0, 0]).abs().max() / LEVELS.step[0, 0, 0])

    choice, plain = choice_prior(equations.layer, MEAN, STD), image_prior(equations.layer, MEAN, STD, 0.3)
    assert corner(choice) < corner(plain) / 2
