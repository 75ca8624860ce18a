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
from attacks.analytic.maxpool.expectation_propagation import image_prior
from attacks.analytic.maxpool.integer_decoding import decode
from attacks.analytic.maxpool.lattice import APART, Lattice
from attacks.analytic.maxpool.refinement import fit, passed, settle
from attacks.analytic.maxpool.solution import Solved


@pytest.mark.parametrize("seed", range(5))
def test_the_nearest_whole_numbers_are_those_of_brute_force(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(4, 4)) * np.array([30.0, 25.0, 20.0, 15.0])
    matrix = rows.T @ rows  # skew, but no two whole vectors close to each other
    truth = draw.integers(-3, 4, size=4).astype(float)
    centre = truth + np.linalg.solve(rows, draw.normal(size=4) * 0.5)
    near = [np.array(z, dtype=float) for z in itertools.product(range(-6, 7), repeat=4)]
    best = min(near, key=lambda z: float((z - centre) @ matrix @ (z - centre)))
    assert np.array_equal(Lattice(matrix).nearest(centre, matrix), best)


def test_a_number_is_fixed_where_no_close_candidate_has_another() -> None:
    sharp, blunt = (2 * APART) ** 2, (0.1 * APART) ** 2
    together = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]) * sharp  # the sum, and the third alone
    assert Lattice(together + np.eye(3) * blunt).fixed.tolist() == [False, False, True]
    # 1 x + 2 y + 0.9 z known sharply: small whole vectors all change it
    skew = np.outer([1.0, 31.0, 31.0**2], [1.0, 31.0, 31.0**2]) * sharp
    assert Lattice(skew + np.eye(3) * blunt * 4).fixed.all()


def near(known: Equations, truth: Tensor) -> Solved:
    """A solution in real numbers at the right positions."""
    prior = image_prior(known.layer, MEAN, STD, 0.3).weakened(1e-5)
    return Solved.of(known, settle(known, truth, rounds=1, prior=prior))


@pytest.mark.slow
def test_levels_fix_what_real_numbers_leave_open() -> None:
    known, truth = problem(6, 3)  # 93 equations, 108 pixels
    found = decode(near(known, truth), image_prior(known.layer, MEAN, STD, 0.27), LEVELS)
    loose = Solved.of(known, fit(known, truth)).deviations() / LEVELS.step
    assert float(loose.min()) > 1  # real numbers may differ by more than a level, everywhere
    assert found.fixed is not None
    wrong = (found.found.x - truth).abs() > 1e-9
    assert not bool((wrong & found.fixed).any())
    assert int(found.fixed.sum()) >= 100


def test_where_rounding_makes_a_prior_none_pixels_are_read_as_they_are() -> None:
    known, truth = problem(6, 8)
    prior = image_prior(known.layer, MEAN, STD, 0.27)
    prior = replace(prior, channels=-1e12 * prior.channels)
    found = decode(near(known, truth), prior, LEVELS)
    assert LEVELS.hold(found.found.x)
    assert torch.equal(found.found.x, truth)


def test_what_no_output_saw_is_not_said_to_be_fixed() -> None:
    known, truth = problem(7, 6)  # pooling leaves out the fifth row and column of outputs, so nothing sees the rim
    found = decode(near(known, truth), image_prior(known.layer, MEAN, STD, 0.27), LEVELS)
    assert found.fixed is not None
    assert not bool(found.fixed[:, 6].any() or found.fixed[:, :, 6].any())
    wrong = (found.found.x - truth).abs() > 1e-9
    assert not bool((wrong & found.fixed).any())
    assert int(found.fixed.sum()) >= 100


def test_an_input_on_no_levels_stays_as_it_is() -> None:
    known, truth = problem(6, 6)
    between = truth + 0.4 * LEVELS.step
    target = known.layer.pooled_outputs(between)
    known = replace(known, target=target, gradient=torch.zeros_like(known.gradient))
    known = replace(known, gradient=-known.residual(between, passed(known, between)))
    start = Solved.of(known, fit(known, between))
    found = decode(start, image_prior(known.layer, MEAN, STD, 0.27), LEVELS)
    assert found is start


def test_a_matrix_beyond_double_precision_is_an_error_and_no_endless_search() -> None:
    rows = np.random.default_rng(1).normal(size=(25, 40)) * 1e9
    matrix = rows.T @ rows + np.eye(40) * (2 / 256) ** 2
    with pytest.raises(np.linalg.LinAlgError):
        Lattice(matrix).nearest(np.zeros(40), matrix)


def test_nothing_is_said_to_be_fixed_at_positions_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(6, 6)
    shares = passed(known, truth)
    shares[0, 0] = shares[0, 0].roll(1)  # one cell's position is wrong
    start = Solved.of(known, fit(known, truth, shares))
    prior = image_prior(known.layer, MEAN, STD, 0.27)
    monkeypatch.setattr(
        "attacks.analytic.maxpool.integer_decoding.ROUNDS", 1
    )  # no round is left for the positions that follow
    short = decode(start, prior, LEVELS)
    assert not torch.equal(short.found.shares, start.found.shares)
    assert short.fixed is not None
    assert not bool(short.fixed.any())
