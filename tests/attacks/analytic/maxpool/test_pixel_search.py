"""Single pixels with few equations: the levels of their channels are gone through, positions and inequalities too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.pixels import LEVELS, MEAN, STD, problem
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations, Prior
from attacks.analytic.maxpool.expectation_propagation import choice_prior
from attacks.analytic.maxpool.integer_decoding import judged
from attacks.analytic.maxpool.joint_decoding import together
from attacks.analytic.maxpool.likelihood import APART, likeliest, misfit, usual
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.pixel_search import Place, revised
from attacks.analytic.maxpool.refinement import fit, passed
from attacks.analytic.maxpool.solution import Doubt, Solved
from fl.seeds import stream

PRIOR = choice_prior(problem(8, 12)[0].layer, 0.9 * MEAN, STD)  # a mean that is not zero in the network's units
NOISE = 1e-5
CORNERS = [(0, 0), (0, 7), (7, 0), (7, 7)]


def hidden(row: int, column: int, noise: float = NOISE) -> tuple[Equations, Tensor]:
    """A picture of 8 x 8 of which a corner is passed on by no filter, so that it is only bounded, and its equations."""
    known, truth = problem(8, 12)
    draw, weight = stream(0, "corner"), known.layer.weight.clone()
    cell, position = (row > 0) * 6 + (column > 0) * 2, (row > 0) * 2 + (column > 0)
    patches = known.layer.patches(truth)[known.layer.cells[cell]]
    for o in range(len(weight)):
        while int((patches @ weight[o].flatten()).argmax()) == position:
            weight[o] = torch.randn(weight[o].shape, generator=draw, dtype=weight.dtype)
    layer = replace(known.layer, weight=weight)
    shown = replace(known, layer=layer, target=layer.pooled_outputs(truth), gradient=torch.zeros_like(known.gradient))
    shown = replace(shown, gradient=-shown.residual(truth, passed(shown, truth)), noise=noise)
    loose = noise * shown.forward_scale.expand_as(shown.target)
    return replace(shown, grain=torch.full_like(shown.gradient, noise), loose=loose), truth


def off(known: Equations, truth: Tensor, at: tuple[int, int], *steps: float) -> Solved:
    """The picture with a pixel off by so many levels, at the positions that follow."""
    number = LEVELS.number(truth)
    number[:, *at] += torch.tensor(steps)
    return Solved(known, fit(known, truth)).at(LEVELS.values(number.clamp(0, 255)))


def total(now: Solved, scale: float) -> float:
    return misfit(now.known, now.found, scale) + PRIOR.against(now.found.x)


@pytest.mark.parametrize("at", CORNERS)
@pytest.mark.parametrize("steps", [(0, 0, 0), (1, -1, -1), (-2, 1, 0)])
def test_a_corner_that_nothing_sees_comes_to_the_likeliest_of_what_is_not_ruled_out(
    at: tuple[int, int], steps: tuple[int, ...]
) -> None:
    known, truth = hidden(*at)
    start = off(known, truth, at, *steps)
    found = revised(replace(start, fixed=torch.ones_like(truth, dtype=torch.bool)), PRIOR, LEVELS)
    scale = usual(known, start.found)
    assert start.satisfied
    changed = found.found.x != truth
    changed[:, *at] = False
    assert not bool(changed.any())
    here = (LEVELS.number(found.found.x) - LEVELS.number(truth))[:, *at]
    least = total(found, scale)
    for more in itertools.product((-6, -2, -1, 0, 1, 2, 6), repeat=3):
        other = off(known, truth, at, *(here + torch.tensor(more)).tolist())
        assert total(other, scale) >= least - 1e-6 or not other.satisfied


def test_a_corner_that_leaves_equations_unsatisfied_is_put_right() -> None:
    known, truth = problem(8, 12)
    known = replace(known, noise=NOISE, grain=torch.full_like(known.gradient, NOISE))
    known = replace(known, loose=NOISE * known.forward_scale.expand_as(known.target))
    start = off(known, truth, (7, 0), -18, -12, -19)
    assert not start.satisfied
    found = revised(start, PRIOR, LEVELS)
    assert found.satisfied
    assert torch.equal(found.found.x, truth)
    assert found.fixed is not None  # looked at anew
    far = off(known, truth, (4, 4), 90, -90, 90)  # more than one place is expected to be off by
    assert revised(replace(far, spread=torch.zeros_like(truth)), PRIOR, LEVELS).found is far.found


def test_what_explains_as_much_is_not_fixed_and_what_was_open_stays_so() -> None:
    at = CORNERS[1]
    known, truth = hidden(*at)
    start = replace(off(known, truth, at, 1, 2, -1), fixed=torch.ones_like(truth, dtype=torch.bool))
    expected = torch.ones_like(truth, dtype=torch.bool)
    expected[:, *at] = False
    found = revised(start, PRIOR, LEVELS)
    assert not torch.equal(found.found.x, start.found.x)
    assert found.fixed is not None
    assert torch.equal(found.fixed, expected)
    assert torch.equal(Place(found, PRIOR, LEVELS, at[0] * 8 + at[1]).doubt.numbers, ~expected)
    likely = replace(found, fixed=torch.ones_like(truth, dtype=torch.bool))  # it moves no more
    again = revised(likely, PRIOR, LEVELS)
    assert torch.equal(again.found.x, found.found.x)
    assert again.fixed is not None
    assert torch.equal(again.fixed, expected)
    expected[1, 4, 4] = False
    before = revised(replace(start, fixed=expected | (found.found.x != truth)), PRIOR, LEVELS)
    assert before.fixed is not None
    assert not bool(before.fixed[1, 4, 4])
    unknown = revised(replace(found, fixed=None), PRIOR, LEVELS).fixed
    assert unknown is not None
    assert not bool(unknown[:, *at].any())


@pytest.mark.parametrize("at", [(0, 0), (7, 7), (3, 4)])
@pytest.mark.parametrize("noise", [1e-5, 0.01, 0.1])
def test_a_level_is_disputed_where_what_explains_as_much_passes_on_other_positions(
    at: tuple[int, int], noise: float
) -> None:
    known, truth = hidden(0, 0, noise=noise)
    draw = stream(0, "noise")
    target = known.target + known.loose * torch.randn(known.target.shape, generator=draw)
    gradient = known.gradient * (1 + noise * torch.randn(known.gradient.shape, generator=draw))
    known = replace(known, target=target, gradient=gradient)
    now = off(known, truth, at, 0, 0, 0)
    around = Place(now, PRIOR, LEVELS, at[0] * 8 + at[1])
    steps, explained = around._explained
    numbers, elsewhere = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    for step in steps[explained < explained[~steps.any(1)] + APART**2]:
        number = LEVELS.number(truth)
        number[:, *at] += step
        numbers |= step != 0
        if not torch.equal(now.at(LEVELS.values(number)).found.shares, now.found.shares):
            elsewhere |= step != 0
    assert torch.equal(around.doubt.numbers[:, *at], numbers)
    assert torch.equal(around.doubt.elsewhere[:, *at], elsewhere)
    assert int(around.doubt.numbers.sum()) == int(numbers.sum())
    assert int(around.doubt.elsewhere.sum()) == int(elsewhere.sum())
    kept = revised(replace(now, fixed=torch.ones_like(truth, dtype=torch.bool)), PRIOR, LEVELS)
    assert kept.disputed is not None
    assert bool(kept.disputed.any()) is (noise > 1e-3)


def test_what_was_disputed_stays_so() -> None:
    known, truth = problem(8, 12)
    every, none = torch.ones_like(truth, dtype=torch.bool), Doubt.none(truth)
    high, low = truth > truth.median(), truth < truth.quantile(0.2)
    before = Solved(known, fit(known, truth), every, disputed=high)
    now = replace(before, disputed=low)
    found = now.doubted(none, before)
    assert found.disputed is not None
    assert torch.equal(found.disputed, high | low)
    assert found.fixed is not None
    assert torch.equal(found.fixed, ~(high | low))
    unknown = replace(now, fixed=None).doubted(none, before)
    assert unknown.disputed is not None
    assert torch.equal(unknown.disputed, high | low)
    alone = replace(now, disputed=None).doubted(Doubt(high, low))
    assert alone.disputed is not None
    assert torch.equal(alone.disputed, low)
    assert alone.fixed is not None
    assert torch.equal(alone.fixed, ~(high | low))


@pytest.mark.parametrize("noise", [1e-7, 1e-6, 1e-5])
def test_what_no_equation_tells_is_known_to_be_loose_however_little_is_rounded(noise: float) -> None:
    at = CORNERS[0]
    known, truth = hidden(*at, noise=noise)
    spread = judged(off(known, truth, at, 0, 0, 0), LEVELS).spread
    assert spread is not None
    assert float((spread / LEVELS.step)[:, *at].min()) > 10
    assert float((spread / LEVELS.step)[:, 4, 4].max()) < 0.1


def test_what_a_place_adds_is_what_the_whole_equations_say() -> None:
    known, truth = hidden(0, 0)
    rest = known.target < known.target.median()  # of a ReLU at rest only a bound is known
    known = replace(known, seen=~rest, target=torch.where(rest, known.target + 0.01, known.target))
    start = off(known, truth, (0, 0), 0, 0, 0)
    scale = usual(known, start.found)
    exceeded = 0
    steps = torch.tensor([[0, 0, 0], [1, 0, -1], [0, 2, 0], [-1, -1, 3]], dtype=truth.dtype)
    for place in (0, 7, 20):  # corners, and a pixel that several cells see
        around = Place(start, PRIOR, LEVELS, place)
        parts = around._missed(steps) + around._unexpected(steps) + around._unexplained(steps)
        whole = []
        for step in steps:
            number = LEVELS.number(truth)
            number[:, place // 8, place % 8] += step
            x = LEVELS.values(number)
            exceeded += int(((known.layer.pooled_outputs(x) > known.target) & rest).sum())
            whole.append(total(Solved(known, fit(known, x)), scale))
        sums = torch.tensor(whole, dtype=parts.dtype)
        torch.testing.assert_close(parts - parts[0], sums - sums[0], rtol=1e-6, atol=1e-6)
    assert exceeded > 2


@pytest.mark.parametrize("level", [0, 255])
def test_only_levels_that_there_are_come_into_question(level: int) -> None:
    known, truth = hidden(0, 0)
    number = LEVELS.number(truth)
    number[:] = 255 - level
    number[:, :2, :2] = level
    x = LEVELS.values(number)
    steps = Place(Solved(known, fit(known, x)), PRIOR, LEVELS, 0)._combinations
    assert float((steps + level).min()) >= 0
    assert float((steps + level).max()) <= 255
    assert bool((steps == 0).all(1).any())


def test_an_input_on_no_levels_is_left() -> None:
    known, truth = hidden(0, 0)
    between = Solved(known, fit(known, truth + 0.3 * LEVELS.step))
    between = replace(between, found=replace(between.found, gradient=0.0, forward=0.0))  # satisfied on no levels
    assert revised(between, PRIOR, LEVELS) is between


def test_what_is_expected_decides_only_among_what_explains_about_as_much() -> None:
    known, truth = hidden(0, 0)
    now = off(known, truth, (0, 0), 0, 0, 0)
    other = off(known, truth, (4, 4), 1, 0, 0)
    assert (
        misfit(known, other.found, usual(known, now.found))
        > misfit(known, now.found, usual(known, now.found)) + APART**2
    )
    strong = replace(PRIOR.weakened(1e9), mean=other.found.x.mean((1, 2)) + 1)
    assert strong.against(other.found.x) < strong.against(now.found.x)
    best, doubt = likeliest(now, [other], strong, float("inf"))
    assert best is now
    assert not bool(doubt.numbers.any())
    back, doubt = likeliest(other, [now], PRIOR, float("inf"))
    assert back is now
    assert bool(doubt.numbers[0, 4, 4])


@pytest.mark.parametrize("seen", [True, False])
def test_what_differs_is_disputed_where_an_output_that_is_known_passes_on_another_position(*, seen: bool) -> None:
    known, truth = problem(8, 12)
    now = off(known, truth, (4, 4), 0, 0, 0)
    near, far = off(known, truth, (4, 4), 1, 0, 0), off(known, truth, (4, 4), 90, -90, 90)
    moved = (far.found.shares != now.found.shares).any(-1)
    assert bool(moved.any())
    assert torch.equal(near.found.shares, now.found.shares)
    now = replace(now, known=replace(known, seen=known.seen & (seen | ~moved)))
    numbers = torch.zeros_like(truth, dtype=torch.bool)
    numbers[:, 4, 4] = True
    assert torch.equal(Doubt.between(now, far).numbers, numbers)
    assert torch.equal(Doubt.between(now, far).elsewhere, numbers & seen)
    assert not bool(Doubt.between(now, near).elsewhere.any())


@pytest.mark.parametrize("step", [together, revised])
def test_what_a_step_finds_disputed_is_said(
    step: Callable[[Solved, Prior, Levels], Solved], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, truth = hidden(0, 0)
    now = replace(off(known, truth, (0, 0), 1, 0, 0), fixed=torch.ones_like(truth, dtype=torch.bool))
    open_ = torch.zeros_like(truth, dtype=torch.bool)
    open_[1, 2, 3] = True
    monkeypatch.setattr(f"{step.__module__}.likeliest", lambda now, *_: (now, Doubt(open_, open_)))
    found = step(now, PRIOR, LEVELS)
    assert found.disputed is not None
    assert bool(found.disputed[1, 2, 3])
    assert found.fixed is not None
    assert not bool(found.fixed[1, 2, 3])
