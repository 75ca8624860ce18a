"""Single pixels with few equations: all levels of their channels are gone through, positions and inequalities too."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.pixels import LEVELS, MEAN, STD, problem
from torch import Tensor

from attacks.exact.equations import Equations
from attacks.exact.likely import misfit, usual
from attacks.exact.places import Place, revised
from attacks.exact.polish import fit, passed
from attacks.exact.propagation import choice_prior
from attacks.exact.solved import Solved
from fl.seeds import stream

CORNER = (slice(None), 0, 0)
PRIOR = choice_prior(problem(8, 12)[0].layer, MEAN, STD)
NOISE = 1e-5


@pytest.fixture
def unseen() -> tuple[Equations, Tensor]:
    """A picture whose corner no filter passes on, so that it is only bounded, and what a convolution shows of it."""
    known, truth = problem(8, 12)
    draw, weight = stream(0, "corner"), known.layer.weight.clone()
    patches = known.layer.patches(truth)[known.layer.cells[0]]
    for o in range(len(weight)):
        while int((patches @ weight[o].flatten()).argmax()) == 0:
            weight[o] = torch.randn(weight[o].shape, generator=draw, dtype=weight.dtype)
    layer = replace(known.layer, weight=weight)
    shown = replace(known, layer=layer, target=layer.pooled_outputs(truth), gradient=torch.zeros_like(known.gradient))
    shown = replace(shown, gradient=-shown.residual(truth, passed(shown, truth)), noise=NOISE)
    loose = NOISE * shown.forward_scale.expand_as(shown.target)
    return replace(shown, grain=torch.full_like(shown.gradient, NOISE), loose=loose), truth


def off(known: Equations, truth: Tensor, *steps: float) -> Solved:
    """The picture with its corner off by so many levels."""
    number = LEVELS.number(truth)
    number[CORNER] += torch.tensor(steps)
    return Solved(known, fit(known, truth)).at(LEVELS.values(number.clamp(0, 255)))


def total(now: Solved, scale: float) -> float:
    return misfit(now.known, now.found, scale) + PRIOR.against(now.found.x)


@pytest.mark.parametrize("steps", [(0, 0, 0), (3, -4, 2), (-2, 1, 0)])
def test_a_corner_that_nothing_sees_comes_to_the_likeliest_of_what_is_not_ruled_out(
    unseen: tuple[Equations, Tensor], steps: tuple[int, ...]
) -> None:
    known, truth = unseen
    start = off(known, truth, *steps)
    found = revised(replace(start, fixed=torch.ones_like(truth, dtype=torch.bool)), PRIOR, LEVELS)
    scale = usual(known, start.found)
    assert start.satisfied
    assert found.fixed is not None
    assert not bool(found.fixed[CORNER].any())
    assert bool(found.fixed[:, 3:, 3:].all())
    assert torch.equal(found.found.x[:, 1:], truth[:, 1:])
    here = (LEVELS.number(found.found.x) - LEVELS.number(truth))[CORNER]
    least = total(found, scale)
    for more in itertools.product((-6, -3, -2, -1, 0, 1, 2, 3, 6), repeat=3):
        other = off(known, truth, *(here + torch.tensor(more)).tolist())
        assert total(other, scale) >= least - 1e-6 or not other.satisfied


def test_what_a_place_adds_is_what_the_whole_equations_say(unseen: tuple[Equations, Tensor]) -> None:
    known, truth = unseen
    start = off(known, truth, 0, 0, 0)
    scale = usual(known, start.found)
    for place in (0, 7, 9):  # a corner, another, and a pixel that four cells see
        around = Place(start, PRIOR, LEVELS, place, scale)
        steps = torch.tensor([[0, 0, 0], [1, 0, -1], [0, 2, 0], [-1, -1, 3]], dtype=truth.dtype)
        parts = around._missed(steps) + around._unexpected(steps) + around._unexplained(steps)
        whole = []
        for step in steps:
            number = LEVELS.number(truth)
            number[:, place // 8, place % 8] += step
            x = LEVELS.values(number)
            whole.append(total(Solved(known, fit(known, x)), scale))
        torch.testing.assert_close(
            parts - parts[0], torch.tensor(whole, dtype=parts.dtype) - whole[0], rtol=1e-6, atol=1e-6
        )


def test_what_equations_tell_stays_and_what_explains_less_than_all_is_left(unseen: tuple[Equations, Tensor]) -> None:
    known, truth = unseen
    number = LEVELS.number(truth)
    number[1, 4, 4] += 1
    wrong = Solved(known, fit(known, truth)).at(LEVELS.values(number))
    assert not wrong.satisfied
    assert revised(wrong, PRIOR, LEVELS) is wrong
    between = Solved(known, fit(known, truth + 0.3 * LEVELS.step))
    between = replace(between, found=replace(between.found, gradient=0.0, forward=0.0))  # satisfied on no levels
    assert revised(between, PRIOR, LEVELS) is between
