"""Pixels as whole numbers: against brute force, and where real numbers alone would leave a choice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.pixels import LEVELS, MEAN, STD, problem
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.gaussian_prior import image_prior
from attacks.analytic.maxpool.integer_decoding import decode_levels
from attacks.analytic.maxpool.lattice import RULED_OUT_DEVIATIONS, Lattice
from attacks.analytic.maxpool.refinement import evaluate, refine, select_largest
from attacks.analytic.maxpool.solution import LayerSolution


@pytest.mark.parametrize("seed", range(5))
def test_the_nearest_whole_numbers_are_those_of_brute_force(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(4, 4)) * np.array([30.0, 25.0, 20.0, 15.0])
    matrix = rows.T @ rows  # skew, but no two whole vectors close to each other
    truth = draw.integers(-3, 4, size=4).astype(float)
    center = truth + np.linalg.solve(rows, draw.normal(size=4) * 0.5)
    near = [np.array(z, dtype=float) for z in itertools.product(range(-6, 7), repeat=4)]
    best = min(near, key=lambda z: float((z - center) @ matrix @ (z - center)))
    assert np.array_equal(Lattice(matrix).nearest(center, matrix), best)


def test_a_number_is_fixed_where_no_close_candidate_has_another() -> None:
    sharp, blunt = (2 * RULED_OUT_DEVIATIONS) ** 2, (0.1 * RULED_OUT_DEVIATIONS) ** 2
    together = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]) * sharp  # the sum, and the third alone
    assert Lattice(together + np.eye(3) * blunt).determined.tolist() == [False, False, True]
    # 1 x + 2 y + 0.9 z known sharply: small whole vectors all change it
    skew = np.outer([1.0, 31.0, 31.0**2], [1.0, 31.0, 31.0**2]) * sharp
    assert Lattice(skew + np.eye(3) * blunt * 4).determined.all()


def near(equations: Equations, truth: Tensor) -> LayerSolution:
    """A solution in real numbers at the right positions."""
    prior = image_prior(equations.layer, MEAN, STD, 0.3).with_smoothness(1e-5)
    return LayerSolution.of(equations, refine(equations, truth, rounds=1, prior=prior))


@pytest.mark.slow
def test_levels_fix_what_real_numbers_leave_open() -> None:
    equations, truth = problem(6, 3)  # 93 equations, 108 pixels
    found = decode_levels(near(equations, truth), image_prior(equations.layer, MEAN, STD, 0.27), LEVELS)
    loose = LayerSolution.of(equations, evaluate(equations, truth)).deviations() / LEVELS.step
    assert float(loose.min()) > 1  # real numbers may differ by more than a level, everywhere
    assert found.determined is not None
    wrong = (found.fit.x - truth).abs() > 1e-9
    assert not bool((wrong & found.determined).any())
    assert int(found.determined.sum()) >= 100


def test_where_rounding_makes_a_prior_none_pixels_are_read_as_they_are() -> None:
    equations, truth = problem(6, 8)
    prior = image_prior(equations.layer, MEAN, STD, 0.27)
    prior = replace(prior, channels=-1e12 * prior.channels)
    found = decode_levels(near(equations, truth), prior, LEVELS)
    assert LEVELS.contain(found.fit.x)
    assert torch.equal(found.fit.x, truth)


def test_what_no_output_saw_is_not_said_to_be_fixed() -> None:
    equations, truth = problem(7, 6)  # pooling leaves out the fifth row and column of outputs, so nothing sees the rim
    found = decode_levels(near(equations, truth), image_prior(equations.layer, MEAN, STD, 0.27), LEVELS)
    assert found.determined is not None
    assert not bool(found.determined[:, 6].any() or found.determined[:, :, 6].any())
    wrong = (found.fit.x - truth).abs() > 1e-9
    assert not bool((wrong & found.determined).any())
    assert int(found.determined.sum()) >= 100


def test_an_input_on_no_levels_stays_as_it_is() -> None:
    equations, truth = problem(6, 6)
    between = truth + 0.4 * LEVELS.step
    target = equations.layer.pooled_outputs(between)
    equations = replace(equations, target=target, gradient=torch.zeros_like(equations.gradient))
    equations = replace(equations, gradient=-equations.residual(between, select_largest(equations, between)))
    start = LayerSolution.of(equations, evaluate(equations, between))
    found = decode_levels(start, image_prior(equations.layer, MEAN, STD, 0.27), LEVELS)
    assert found is start


def test_a_matrix_beyond_double_precision_is_an_error_and_no_endless_search() -> None:
    rows = np.random.default_rng(1).normal(size=(25, 40)) * 1e9
    matrix = rows.T @ rows + np.eye(40) * (2 / 256) ** 2
    with pytest.raises(np.linalg.LinAlgError):
        Lattice(matrix).nearest(np.zeros(40), matrix)


def test_nothing_is_said_to_be_fixed_at_positions_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(6, 6)
    selection = select_largest(equations, truth)
    selection[0, 0] = selection[0, 0].roll(1)  # one cell's position is wrong
    start = LayerSolution.of(equations, evaluate(equations, truth, selection))
    prior = image_prior(equations.layer, MEAN, STD, 0.27)
    monkeypatch.setattr(
        "attacks.analytic.maxpool.integer_decoding.MAX_ROUNDS", 1
    )  # no round is left for the positions that follow
    short = decode_levels(start, prior, LEVELS)
    assert not torch.equal(short.fit.selection, start.fit.selection)
    assert short.determined is not None
    assert not bool(short.determined.any())
