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
from attacks.analytic.maxpool.equations import Equations, Prior
from attacks.analytic.maxpool.expectation_propagation import choice_prior, image_prior
from attacks.analytic.maxpool.joint_decoding import Near, together
from attacks.analytic.maxpool.lattice import Lattice
from attacks.analytic.maxpool.likelihood import astray, misfit, usual
from attacks.analytic.maxpool.refinement import Fit, fit, passed
from attacks.analytic.maxpool.solution import Solved
from benchmarks.exact.cascade import SUBJECTS, one
from fl.seeds import stream


def rounded(side: int = 8, filters: int = 8, noise: float = 1e-4) -> tuple[Equations, Tensor]:
    """What a convolution shows of a picture, the gradient and the outputs rounded so much."""
    known, truth = problem(side, filters)
    draw = stream(0, "rounded")

    def off(like: Tensor) -> Tensor:
        return noise * like.square().mean().sqrt() * torch.randn(like.shape, generator=draw, dtype=like.dtype)

    known = replace(known, gradient=known.gradient + off(known.gradient), target=known.target + off(known.target))
    grain = torch.full_like(known.gradient, noise)
    return replace(known, noise=noise, grain=grain, loose=noise * known.forward_scale.expand_as(known.target)), truth


def moved(known: Equations, truth: Tensor, *places: tuple[int, int, int, int]) -> Solved:
    """The picture with some pixels off by so many levels, at the positions that follow."""
    number = LEVELS.number(truth)
    for channel, row, column, levels in places:
        number[channel, row, column] += levels
    return Solved.of(known, fit(known, truth)).at(LEVELS.values(number))


def wrong(found: Solved, truth: Tensor) -> int:
    return int((LEVELS.number(found.found.x) != LEVELS.number(truth)).sum())


def test_wrong_levels_that_draw_positions_after_them_are_found_back() -> None:
    known, truth = rounded(filters=16)
    start = moved(known, truth, (0, 3, 3, 2), (1, 3, 3, -1), (2, 4, 3, -2))
    assert not torch.equal(start.found.shares, passed(known, truth))
    assert not start.satisfied
    found = together(start, choice_prior(known.layer, MEAN, STD), LEVELS)
    assert wrong(found, truth) == 0
    assert found.satisfied
    assert found.fixed is not None
    assert bool(found.fixed.all())


def test_what_is_likeliest_stays_and_keeps_what_was_proven() -> None:
    known, truth = rounded(filters=16)
    start = replace(moved(known, truth), fixed=torch.ones_like(truth, dtype=torch.bool))
    found = together(start, choice_prior(known.layer, MEAN, STD), LEVELS)
    assert found.found is start.found
    assert found.fixed is not None
    assert bool(found.fixed.all())


def test_a_pixel_whose_other_level_explains_as_much_is_not_fixed() -> None:
    known, truth = rounded(filters=16, noise=3e-3)  # some levels change the equations by less than rounding
    start = replace(moved(known, truth), fixed=torch.ones_like(truth, dtype=torch.bool))
    found = together(start, choice_prior(known.layer, MEAN, STD), LEVELS)
    assert found.fixed is not None
    assert not bool(found.fixed.all())
    assert int(found.fixed.sum()) > 100
    assert not bool((found.fixed & (LEVELS.number(found.found.x) != LEVELS.number(truth))).any())


@pytest.mark.slow
def test_what_is_far_off_is_left_rather_than_made_worse() -> None:
    known, truth = rounded()
    start = moved(known, truth, (0, 3, 3, 9), (1, 3, 3, -5), (2, 4, 3, -7), (0, 0, 0, 4))
    found = together(start, choice_prior(known.layer, MEAN, STD), LEVELS)
    assert found.satisfied or not found.found.error > start.found.error
    assert wrong(found, truth) <= wrong(start, truth)


def test_an_input_on_no_levels_stays_as_it_is() -> None:
    known, truth = problem(6, 6)
    between = truth + 0.4 * LEVELS.step
    known = replace(known, target=known.layer.pooled_outputs(between), gradient=torch.zeros_like(known.gradient))
    known = replace(known, gradient=-known.residual(between, passed(known, between)))
    start = Solved.of(known, fit(known, between))
    assert together(start, choice_prior(known.layer, MEAN, STD), LEVELS) is start


def test_equations_nearby_are_those_of_a_changed_position_and_moved_pixels() -> None:
    known, truth = rounded(6, 4)
    start = moved(known, truth, (0, 2, 2, 2), (1, 0, 0, -1))
    pixels = torch.arange(0, truth.numel(), 5)
    near = Near.of(start, choice_prior(known.layer, MEAN, STD), LEVELS, pixels)
    steps = torch.arange(len(pixels)).to(truth) - 7.0
    number = LEVELS.number(start.found.x)
    number.view(-1)[pixels] += steps
    systems = list(near._systems())
    places = [None, *near._doubtful(torch.linalg.inv(systems[0][0] + near.expected[0]))]
    assert len(systems) == len(places) > 1

    def left(x: Tensor, shares: Tensor, sure: Tensor) -> float:
        """Of all equations, weighed, at given positions."""
        missed = (shares * known.excess(x)).sum(-1)
        return float((near.trust * known.residual(x, shares).square()).sum() + (sure * missed.square()).sum())

    now = left(start.found.x, start.found.shares, near.sure)
    for (told, right, more), place in zip(systems, places, strict=True):
        shares, sure = start.found.shares.clone(), near.sure.clone()
        if place is not None:
            o, k, p = place
            shares[o, k] = one_hot(torch.tensor(p), shares.shape[-1]).to(shares)
            sure[o, k] = near.fresh[o, k]
        predicted = float(steps @ told @ steps - 2 * steps @ right) + more
        assert math.isclose(left(LEVELS.values(number), shares, sure) - now, predicted, rel_tol=1e-6)


def test_the_truth_is_likelier_than_what_is_a_level_off_and_one_filter_hides_no_other() -> None:
    known, truth = rounded()
    right = fit(known, truth, passed(known, truth))
    scale = usual(known, right)
    least = misfit(known, right, scale)
    for place in itertools.product(range(3), (2, 3, 5), (2, 4)):
        other = truth.clone()
        other[place] += LEVELS.step[place[0], 0, 0]
        assert misfit(known, fit(known, other, passed(known, other)), scale) > least
    shares = right.shares.clone()
    shares[0, 0] = shares[0, 0].roll(1)
    spoilt = Fit(truth, shares, 1.0, 1.0)  # by a wrong position of the first filter
    other = truth.clone()
    other[0, 4, 4] += LEVELS.step[0, 0, 0]
    both = misfit(known, fit(known, other, shares), scale) - misfit(known, spoilt, scale)
    alone = misfit(known, fit(known, other, right.shares), scale) - least
    assert both > 0.7 * alone > 0


def test_an_output_that_is_wrong_shows_though_all_others_hold() -> None:
    known, truth = rounded(filters=16)
    right = fit(known, truth, passed(known, truth))
    assert not astray(known, right)
    target = known.target.clone()
    target[3, 4] += 40 * float(known.loose[3, 4])
    assert astray(replace(known, target=target), right)


@pytest.mark.skipif("HYPERLEAK_DATA" not in os.environ, reason="HYPERLEAK_DATA names no folder of data sets")
def test_a_corner_that_one_output_contradicts_is_found_and_not_called_verified() -> None:
    data = fl.data.load("fashion_mnist")
    found = one(data.test, data.num_classes, "hyperfl-grey", *SUBJECTS["HyperFL"], 528)
    assert found["exact"]
    assert found["fixed_wrong"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_nearest_few_are_those_of_brute_force(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(3, 3)) * np.array([3.0, 2.0, 1.5])
    matrix = rows.T @ rows + np.eye(3)
    centre = draw.normal(size=3)
    every = np.array(list(itertools.product(range(-6, 7), repeat=3)), dtype=float)
    far = np.einsum("ni,ij,nj->n", every - centre, matrix, every - centre)
    found = Lattice(matrix).near(centre, matrix, 60)[:8]
    assert np.allclose(np.einsum("ni,ij,nj->n", found - centre, matrix, found - centre), np.sort(far)[:8])


def test_where_nothing_tells_a_choice_goes_on_as_the_picture_does() -> None:
    known, _ = problem(8, 3)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    ramp = ((0.2 + 0.05 * rows + 0.03 * columns - 0.5) / 0.25).to(torch.float64).expand(3, -1, -1)

    def corner(prior: Prior) -> float:
        hidden = torch.zeros(3, 8, 8, dtype=torch.bool)
        hidden[:, 0, 0] = True
        at, rest = hidden.flatten(), ~hidden.flatten()
        side = prior.right.flatten()[at] - prior.dense[at][:, rest] @ ramp.flatten()[rest]
        mean = torch.linalg.solve(prior.dense[at][:, at], side)
        return float((mean - ramp[:, 0, 0]).abs().max() / LEVELS.step[0, 0, 0])

    choice, plain = choice_prior(known.layer, MEAN, STD), image_prior(known.layer, MEAN, STD, 0.3)
    assert corner(choice) < corner(plain) / 2
