"""Flat areas at a picture's rim, which the equations leave open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.pixels import LEVELS, problem
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.flat_regions import flatten
from attacks.analytic.maxpool.refinement import fit, passed
from attacks.analytic.maxpool.solution import Doubt, Solved


def seen(truth: Tensor) -> Equations:
    """What a convolution shows of a picture of 7 x 7, whose last row and column no output sees."""
    known, _ = problem(7, 6)
    known = replace(known, target=known.layer.pooled_outputs(truth), gradient=torch.zeros_like(known.gradient))
    return replace(known, gradient=-known.residual(truth, passed(known, truth)), noise=1e-6)


def picture(*, flat: bool) -> Tensor:
    """A picture whose rim is flat, or is not."""
    _, truth = problem(7, 6)
    number = LEVELS.number(truth)
    if flat:
        number[:, 5:] = 90
        number[:, :, 5:] = 90
    return LEVELS.values(number)


def moved(known: Equations, truth: Tensor, *places: tuple[int, int, int, int]) -> Solved:
    """The truth with some pixels off by so many levels, all said to be fixed."""
    number = LEVELS.number(truth)
    for channel, row, column, levels in places:
        number[channel, row, column] += levels
    found = Solved.of(known, fit(known, LEVELS.values(number)))
    return replace(found, fixed=torch.ones_like(number, dtype=torch.bool))


def test_what_nothing_sees_is_taken_to_be_flat_where_its_neighbours_are() -> None:
    truth = picture(flat=True)
    known = seen(truth)
    found = flatten(moved(known, truth, (0, 6, 6, 2), (0, 6, 5, 1), (2, 3, 6, -1)), LEVELS)
    assert torch.equal(LEVELS.number(found.found.x), LEVELS.number(truth))
    assert found.fixed is not None
    assert not bool(found.fixed[:, 6].any() or found.fixed[:, :, 6].any())  # what nothing sees is no proof
    assert bool(found.fixed[:, :5, :5].all())


@pytest.mark.parametrize(("level", "moves"), [(0, True), (255, True), (90, False)])
def test_half_of_the_neighbours_are_enough_only_where_pictures_are_often_flat(level: int, *, moves: bool) -> None:
    number = LEVELS.number(picture(flat=True))
    number[:, 5:] = number[:, :, 5:] = level
    number[:, 5, 5] = 40  # seen, and not of the same level
    truth = LEVELS.values(number)
    found = flatten(moved(seen(truth), truth, (0, 6, 6, 2 if level == 0 else -2)), LEVELS)
    assert bool(LEVELS.number(found.found.x)[0, 6, 6] == level) is moves


def test_what_was_open_before_stays_open_where_another_pixel_moves() -> None:
    truth = picture(flat=True)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    assert start.fixed is not None
    found = flatten(replace(start, fixed=start.fixed.index_fill(1, torch.tensor([2]), value=False)), LEVELS)
    assert not torch.equal(found.found.x, start.found.x)
    assert found.fixed is not None
    assert not bool(found.fixed[:, 2].any())
    assert bool(found.fixed[:, 1].all(0)[:5].all())


def test_nothing_moves_where_neighbours_differ() -> None:
    truth = picture(flat=False)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    assert flatten(start, LEVELS) is start


def test_equations_go_before_flatness() -> None:
    truth = picture(flat=True)
    number = LEVELS.number(truth)
    number[1, 5, 2] += 1  # a speck, which outputs see
    truth = LEVELS.values(number)
    start = moved(seen(truth), truth)
    found = flatten(start, LEVELS)
    assert torch.equal(LEVELS.number(found.found.x), number)


def test_a_pixel_that_two_levels_explain_is_not_said_to_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = picture(flat=True)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    monkeypatch.setattr("attacks.analytic.maxpool.flat_regions.SURE", 0.0)  # nothing moves
    found = flatten(start, LEVELS)
    assert torch.equal(found.found.x, start.found.x)
    assert found.fixed is not None
    assert (~found.fixed).nonzero().tolist() == [[0, 6, 6]]


@pytest.mark.parametrize("sure", [0.0, 3.0])
def test_what_passes_on_other_positions_is_disputed(sure: float, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = picture(flat=True)
    start = moved(seen(truth), truth, (0, 6, 6, 2))
    elsewhere = torch.zeros_like(truth, dtype=torch.bool)
    elsewhere[1, 2, 3] = True
    monkeypatch.setattr("attacks.analytic.maxpool.flat_regions.SURE", sure)
    monkeypatch.setattr(Doubt, "between", lambda *_: Doubt(elsewhere, elsewhere))
    before = torch.zeros_like(elsewhere)
    before[2, 1, 1] = True
    found = flatten(replace(start, disputed=before), LEVELS)
    assert torch.equal(found.found.x, start.found.x) is (sure == 0.0)
    assert found.disputed is not None
    assert torch.equal(found.disputed, elsewhere | before)


def test_an_input_on_no_levels_stays_as_it_is() -> None:
    truth = picture(flat=True) + 0.4 * LEVELS.step
    known = seen(truth)
    start = Solved.of(known, fit(known, truth))
    assert flatten(start, LEVELS) is start
