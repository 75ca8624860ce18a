"""Flat areas at a picture's rim, which the equations leave open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.pixels import LEVELS, problem
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.flat_regions import snap_flat_regions
from attacks.analytic.maxpool.refinement import evaluate, select_largest
from attacks.analytic.maxpool.solution import Ambiguity, LayerSolution


def seen(truth: Tensor) -> Equations:
    """What a convolution shows of a picture of 7 x 7, whose last row and column no output sees."""
    equations, _ = problem(7, 6)
    equations = replace(
        equations, target=equations.layer.pooled_outputs(truth), gradient=torch.zeros_like(equations.gradient)
    )
    return replace(
        equations, gradient=-equations.residual(truth, select_largest(equations, truth)), gradient_noise=1e-6
    )


def picture(*, flat: bool) -> Tensor:
    """A picture whose rim is flat, or is not."""
    _, truth = problem(7, 6)
    number = LEVELS.indices(truth)
    if flat:
        number[:, 5:] = 90
        number[:, :, 5:] = 90
    return LEVELS.values(number)


def moved(equations: Equations, truth: Tensor, *places: tuple[int, int, int, int]) -> LayerSolution:
    """The truth with some pixels off by so many levels, all said to be fixed."""
    number = LEVELS.indices(truth)
    for channel, row, column, levels in places:
        number[channel, row, column] += levels
    found = LayerSolution.of(equations, evaluate(equations, LEVELS.values(number)))
    return replace(found, determined=torch.ones_like(number, dtype=torch.bool))


def test_what_nothing_sees_is_taken_to_be_flat_where_its_neighbors_are() -> None:
    truth = picture(flat=True)
    equations = seen(truth)
    found = snap_flat_regions(moved(equations, truth, (0, 6, 6, 2), (0, 6, 5, 1), (2, 3, 6, -1)), LEVELS)
    assert torch.equal(LEVELS.indices(found.fit.x), LEVELS.indices(truth))
    assert found.determined is not None
    assert not bool(found.determined[:, 6].any() or found.determined[:, :, 6].any())  # what nothing sees is no proof
    assert bool(found.determined[:, :5, :5].all())


@pytest.mark.parametrize(("level", "moves"), [(0, True), (255, True), (90, False)])
def test_half_of_the_neighbors_are_enough_only_where_pictures_are_often_flat(level: int, *, moves: bool) -> None:
    number = LEVELS.indices(picture(flat=True))
    number[:, 5:] = number[:, :, 5:] = level
    number[:, 5, 5] = 40  # seen, and not of the same level
    truth = LEVELS.values(number)
    found = snap_flat_regions(moved(seen(truth), truth, (0, 6, 6, 2 if level == 0 else -2)), LEVELS)
    assert bool(LEVELS.indices(found.fit.x)[0, 6, 6] == level) is moves


def test_what_was_open_before_stays_open_where_another_pixel_moves() -> None:
    truth = picture(flat=True)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    assert start.determined is not None
    found = snap_flat_regions(
        replace(start, determined=start.determined.index_fill(1, torch.tensor([2]), value=False)), LEVELS
    )
    assert not torch.equal(found.fit.x, start.fit.x)
    assert found.determined is not None
    assert not bool(found.determined[:, 2].any())
    assert bool(found.determined[:, 1].all(0)[:5].all())


def test_nothing_moves_where_neighbors_differ() -> None:
    truth = picture(flat=False)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    assert snap_flat_regions(start, LEVELS) is start


def test_equations_go_before_flatness() -> None:
    truth = picture(flat=True)
    number = LEVELS.indices(truth)
    number[1, 5, 2] += 1  # a speck, which outputs see
    truth = LEVELS.values(number)
    start = moved(seen(truth), truth)
    found = snap_flat_regions(start, LEVELS)
    assert torch.equal(LEVELS.indices(found.fit.x), number)


def test_a_pixel_that_two_levels_explain_is_not_said_to_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = picture(flat=True)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    monkeypatch.setattr("attacks.analytic.maxpool.flat_regions.CONFIDENT_DEVIATIONS", 0.0)  # nothing moves
    found = snap_flat_regions(start, LEVELS)
    assert torch.equal(found.fit.x, start.fit.x)
    assert found.determined is not None
    assert (~found.determined).nonzero().tolist() == [[0, 6, 6]]


@pytest.mark.parametrize("sure", [0.0, 3.0])
def test_what_passes_on_other_positions_is_disputed(sure: float, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = picture(flat=True)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    elsewhere = torch.zeros_like(truth, dtype=torch.bool)
    elsewhere[1, 2, 3] = True
    monkeypatch.setattr("attacks.analytic.maxpool.flat_regions.CONFIDENT_DEVIATIONS", sure)
    monkeypatch.setattr(Ambiguity, "between", lambda *_: Ambiguity(elsewhere, elsewhere))
    before = torch.zeros_like(elsewhere)
    before[2, 1, 1] = True
    found = snap_flat_regions(replace(start, disputed=before), LEVELS)
    assert torch.equal(found.fit.x, start.fit.x) is (sure == 0.0)
    assert found.disputed is not None
    assert torch.equal(found.disputed, elsewhere | before)


def test_an_input_on_no_levels_stays_as_it_is() -> None:
    truth = picture(flat=True) + 0.4 * LEVELS.step
    equations = seen(truth)
    start = LayerSolution.of(equations, evaluate(equations, truth))
    assert snap_flat_regions(start, LEVELS) is start
