"""Single pixels with few equations: the levels of their channels are gone through, positions and inequalities too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.cover import one_at_a_time
from support.pixels import LEVELS, MEAN, STD, problem
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior, choice_prior
from attacks.analytic.maxpool.integer_decoding import mark_determined
from attacks.analytic.maxpool.joint_decoding import decode_jointly
from attacks.analytic.maxpool.lattice import RULED_OUT_DEVIATIONS
from attacks.analytic.maxpool.likelihood import misfit, select_likeliest, typical_deviation
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.pixel_search import PixelSearch, search_pixels
from attacks.analytic.maxpool.refinement import evaluate, select_largest
from attacks.analytic.maxpool.solution import Ambiguity, LayerSolution
from fl.seeds import stream

PRIOR = choice_prior(problem(8, 12)[0].layer, 0.9 * MEAN, STD)  # a mean that is not zero in the network's units
NOISE = 1e-5
CORNERS = [(0, 0), (0, 7), (7, 0), (7, 7)]


def hidden(row: int, column: int, noise: float = NOISE) -> tuple[Equations, Tensor]:
    """A picture of 8 x 8 of which a corner is passed on by no filter, so that it is only bounded, and its equations."""
    equations, truth = problem(8, 12)
    draw, weight = stream(0, "corner"), equations.layer.weight.clone()
    cell, position = (row > 0) * 6 + (column > 0) * 2, (row > 0) * 2 + (column > 0)
    patches = equations.layer.patches(truth)[equations.layer.cells[cell]]
    for o in range(len(weight)):
        while int((patches @ weight[o].flatten()).argmax()) == position:
            weight[o] = torch.randn(weight[o].shape, generator=draw, dtype=weight.dtype)
    layer = replace(equations.layer, weight=weight)
    shown = replace(
        equations, layer=layer, target=layer.pooled_outputs(truth), gradient=torch.zeros_like(equations.gradient)
    )
    shown = replace(shown, gradient=-shown.residual(truth, select_largest(shown, truth)), gradient_noise=noise)
    loose = noise * shown.output_scale.expand_as(shown.target)
    return replace(shown, rounding=torch.full_like(shown.gradient, noise), target_std=loose), truth


def off(equations: Equations, truth: Tensor, at: tuple[int, int], *steps: float) -> LayerSolution:
    """The picture with a pixel off by so many levels, at the positions that follow."""
    number = LEVELS.indices(truth)
    number[:, *at] += torch.tensor(steps)
    return LayerSolution(equations, evaluate(equations, truth)).with_input(LEVELS.values(number.clamp(0, 255)))


def total(now: LayerSolution, scale: float) -> float:
    return misfit(now.equations, now.fit, scale) + PRIOR.penalty(now.fit.x)


@one_at_a_time(at=CORNERS, steps=[(1, -1, -1), (0, 0, 0), (-2, 1, 0)])
def test_a_corner_that_nothing_sees_comes_to_the_likeliest_of_what_is_not_ruled_out(
    at: tuple[int, int], steps: tuple[int, ...]
) -> None:
    equations, truth = hidden(*at)
    start = off(equations, truth, at, *steps)
    found = search_pixels(replace(start, determined=torch.ones_like(truth, dtype=torch.bool)), PRIOR, LEVELS)
    scale = typical_deviation(equations, start.fit)
    assert start.is_satisfied
    changed = found.fit.x != truth
    changed[:, *at] = False
    assert not bool(changed.any())
    here = (LEVELS.indices(found.fit.x) - LEVELS.indices(truth))[:, *at]
    least = total(found, scale)
    near, far = (itertools.product(levels, repeat=3) for levels in ((-2, -1, 0, 1, 2), (-6, 0, 6)))
    for more in (*near, *far):
        other = off(equations, truth, at, *(here + torch.tensor(more)).tolist())
        assert total(other, scale) >= least - 1e-6 or not other.is_satisfied


def test_a_corner_that_leaves_equations_unsatisfied_is_put_right() -> None:
    equations, truth = problem(8, 12)
    equations = replace(equations, gradient_noise=NOISE, rounding=torch.full_like(equations.gradient, NOISE))
    equations = replace(equations, target_std=NOISE * equations.output_scale.expand_as(equations.target))
    start = off(equations, truth, (7, 0), -18, -12, -19)
    assert not start.is_satisfied
    found = search_pixels(start, PRIOR, LEVELS)
    assert found.is_satisfied
    assert torch.equal(found.fit.x, truth)
    assert found.determined is not None  # looked at anew
    far = off(equations, truth, (4, 4), 90, -90, 90)  # more than one place is expected to be off by
    assert search_pixels(replace(far, entry_std=torch.zeros_like(truth)), PRIOR, LEVELS).fit is far.fit


def test_what_explains_as_much_is_not_fixed_and_what_was_open_stays_so() -> None:
    at = CORNERS[1]
    equations, truth = hidden(*at)
    start = replace(off(equations, truth, at, 1, 2, -1), determined=torch.ones_like(truth, dtype=torch.bool))
    expected = torch.ones_like(truth, dtype=torch.bool)
    expected[:, *at] = False
    found = search_pixels(start, PRIOR, LEVELS)
    assert not torch.equal(found.fit.x, start.fit.x)
    assert found.determined is not None
    assert torch.equal(found.determined, expected)
    assert torch.equal(PixelSearch(found, PRIOR, LEVELS, at[0] * 8 + at[1]).ambiguity.entries, ~expected)
    likely = replace(found, determined=torch.ones_like(truth, dtype=torch.bool))  # it moves no more
    again = search_pixels(likely, PRIOR, LEVELS)
    assert torch.equal(again.fit.x, found.fit.x)
    assert again.determined is not None
    assert torch.equal(again.determined, expected)
    expected[1, 4, 4] = False
    before = search_pixels(replace(start, determined=expected | (found.fit.x != truth)), PRIOR, LEVELS)
    assert before.determined is not None
    assert not bool(before.determined[1, 4, 4])
    unknown = search_pixels(replace(found, determined=None), PRIOR, LEVELS).determined
    assert unknown is not None
    assert not bool(unknown[:, *at].any())


@one_at_a_time(at=[(0, 0), (7, 7), (3, 4)], noise=[0.01, 1e-5, 0.03])
def test_a_level_is_disputed_where_what_explains_as_much_passes_on_other_positions(
    at: tuple[int, int], noise: float
) -> None:
    equations, truth = hidden(0, 0, noise=noise)
    draw = stream(0, "noise")
    target = equations.target + equations.target_std * torch.randn(equations.target.shape, generator=draw)
    gradient = equations.gradient * (1 + noise * torch.randn(equations.gradient.shape, generator=draw))
    equations = replace(equations, target=target, gradient=gradient)
    now = off(equations, truth, at, 0, 0, 0)
    around = PixelSearch(now, PRIOR, LEVELS, at[0] * 8 + at[1])
    steps, evaluate_with_ties = around._likeliest_combinations
    numbers, elsewhere = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    for step in steps[evaluate_with_ties < evaluate_with_ties[~steps.any(1)] + RULED_OUT_DEVIATIONS**2]:
        number = LEVELS.indices(truth)
        number[:, *at] += step
        numbers |= step != 0
        if not torch.equal(now.with_input(LEVELS.values(number)).fit.selection, now.fit.selection):
            elsewhere |= step != 0
    assert torch.equal(around.ambiguity.entries[:, *at], numbers)
    assert torch.equal(around.ambiguity.other_positions[:, *at], elsewhere)
    assert int(around.ambiguity.entries.sum()) == int(numbers.sum())
    assert int(around.ambiguity.other_positions.sum()) == int(elsewhere.sum())
    kept = search_pixels(replace(now, determined=torch.ones_like(truth, dtype=torch.bool)), PRIOR, LEVELS)
    assert kept.disputed is not None
    assert bool(kept.disputed.any()) is (noise > 1e-3)


def test_what_was_disputed_stays_so() -> None:
    equations, truth = problem(8, 12)
    every, none = torch.ones_like(truth, dtype=torch.bool), Ambiguity.none(truth)
    high, low = truth > truth.median(), truth < truth.quantile(0.2)
    before = LayerSolution(equations, evaluate(equations, truth), every, disputed=high)
    now = replace(before, disputed=low)
    found = now.with_ambiguity(none, before)
    assert found.disputed is not None
    assert torch.equal(found.disputed, high | low)
    assert found.determined is not None
    assert torch.equal(found.determined, ~(high | low))
    unknown = replace(now, determined=None).with_ambiguity(none, before)
    assert unknown.disputed is not None
    assert torch.equal(unknown.disputed, high | low)
    alone = replace(now, disputed=None).with_ambiguity(Ambiguity(high, low))
    assert alone.disputed is not None
    assert torch.equal(alone.disputed, low)
    assert alone.determined is not None
    assert torch.equal(alone.determined, ~(high | low))


@pytest.mark.parametrize("noise", [1e-7, 1e-6, 1e-5])
def test_what_no_equation_tells_is_known_to_be_loose_however_little_is_rounded(noise: float) -> None:
    at = CORNERS[0]
    equations, truth = hidden(*at, noise=noise)
    spread = mark_determined(off(equations, truth, at, 0, 0, 0), LEVELS).entry_std
    assert spread is not None
    assert float((spread / LEVELS.step)[:, *at].min()) > 10
    assert float((spread / LEVELS.step)[:, 4, 4].max()) < 0.1


def test_what_a_place_adds_is_what_the_whole_equations_say() -> None:
    equations, truth = hidden(0, 0)
    rest = equations.target < equations.target.median()  # of a ReLU at rest only a bound is known
    equations = replace(
        equations, target_known=~rest, target=torch.where(rest, equations.target + 0.01, equations.target)
    )
    start = off(equations, truth, (0, 0), 0, 0, 0)
    scale = typical_deviation(equations, start.fit)
    exceeded = 0
    steps = torch.tensor([[0, 0, 0], [1, 0, -1], [0, 2, 0], [-1, -1, 3]], dtype=truth.dtype)
    for place in (0, 7, 20):  # corners, and a pixel that several cells see
        around = PixelSearch(start, PRIOR, LEVELS, place)
        parts = around._output_misfit(steps) + around._prior_penalty(steps) + around._gradient_misfit(steps)
        whole = []
        for step in steps:
            number = LEVELS.indices(truth)
            number[:, place // 8, place % 8] += step
            x = LEVELS.values(number)
            exceeded += int(((equations.layer.pooled_outputs(x) > equations.target) & rest).sum())
            whole.append(total(LayerSolution(equations, evaluate(equations, x)), scale))
        sums = torch.tensor(whole, dtype=parts.dtype)
        torch.testing.assert_close(parts - parts[0], sums - sums[0], rtol=1e-6, atol=1e-6)
    assert exceeded > 2


@pytest.mark.parametrize("level", [0, 255])
def test_only_levels_that_there_are_come_into_question(level: int) -> None:
    equations, truth = hidden(0, 0)
    number = LEVELS.indices(truth)
    number[:] = 255 - level
    number[:, :2, :2] = level
    x = LEVELS.values(number)
    steps = PixelSearch(LayerSolution(equations, evaluate(equations, x)), PRIOR, LEVELS, 0)._combinations
    assert float((steps + level).min()) >= 0
    assert float((steps + level).max()) <= 255
    assert bool((steps == 0).all(1).any())


def test_an_input_on_no_levels_is_left() -> None:
    equations, truth = hidden(0, 0)
    between = LayerSolution(equations, evaluate(equations, truth + 0.3 * LEVELS.step))
    between = replace(between, fit=replace(between.fit, gradient_error=0.0, output_error=0.0))  # satisfied on no levels
    assert search_pixels(between, PRIOR, LEVELS) is between


def test_what_is_expected_decides_only_among_what_explains_about_as_much() -> None:
    equations, truth = hidden(0, 0)
    now = off(equations, truth, (0, 0), 0, 0, 0)
    other = off(equations, truth, (4, 4), 1, 0, 0)
    assert (
        misfit(equations, other.fit, typical_deviation(equations, now.fit))
        > misfit(equations, now.fit, typical_deviation(equations, now.fit)) + RULED_OUT_DEVIATIONS**2
    )
    strong = replace(PRIOR.with_smoothness(1e9), mean=other.fit.x.mean((1, 2)) + 1)
    assert strong.penalty(other.fit.x) < strong.penalty(now.fit.x)
    best, doubt = select_likeliest(now, [other], strong, float("inf"))
    assert best is now
    assert not bool(doubt.entries.any())
    back, doubt = select_likeliest(other, [now], PRIOR, float("inf"))
    assert back is now
    assert bool(doubt.entries[0, 4, 4])


@pytest.mark.parametrize("seen", [True, False])
def test_what_differs_is_disputed_where_an_output_that_is_known_passes_on_another_position(*, seen: bool) -> None:
    equations, truth = problem(8, 12)
    now = off(equations, truth, (4, 4), 0, 0, 0)
    near, far = off(equations, truth, (4, 4), 1, 0, 0), off(equations, truth, (4, 4), 90, -90, 90)
    moved = (far.fit.selection != now.fit.selection).any(-1)
    assert bool(moved.any())
    assert torch.equal(near.fit.selection, now.fit.selection)
    now = replace(now, equations=replace(equations, target_known=equations.target_known & (seen | ~moved)))
    numbers = torch.zeros_like(truth, dtype=torch.bool)
    numbers[:, 4, 4] = True
    assert torch.equal(Ambiguity.between(now, far).entries, numbers)
    assert torch.equal(Ambiguity.between(now, far).other_positions, numbers & seen)
    assert not bool(Ambiguity.between(now, near).other_positions.any())


@pytest.mark.parametrize("step", [decode_jointly, search_pixels])
def test_what_a_step_finds_disputed_is_said(
    step: Callable[[LayerSolution, GaussianPrior, PixelLevels], LayerSolution], monkeypatch: pytest.MonkeyPatch
) -> None:
    equations, truth = hidden(0, 0)
    now = replace(off(equations, truth, (0, 0), 1, 0, 0), determined=torch.ones_like(truth, dtype=torch.bool))
    open_ = torch.zeros_like(truth, dtype=torch.bool)
    open_[1, 2, 3] = True
    monkeypatch.setattr(f"{step.__module__}.select_likeliest", lambda now, *_: (now, Ambiguity(open_, open_)))
    found = step(now, PRIOR, LEVELS)
    assert found.disputed is not None
    assert bool(found.disputed[1, 2, 3])
    assert found.determined is not None
    assert not bool(found.determined[1, 2, 3])
