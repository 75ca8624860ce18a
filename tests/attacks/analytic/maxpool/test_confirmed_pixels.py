"""Pixels that equations leave no doubt of: which are, and what the propagation and the attack make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.pictures import LEAKY, network, victim
from support.pixels import LEVELS, MEAN, STD, problem
from torch import Tensor, nn

from attacks import Reconstruction
from attacks.analytic.cascade import Cascade
from attacks.analytic.maxpool import determined_pixels, expectation_propagation
from attacks.analytic.maxpool.confirmed_pixels import confirmed
from attacks.analytic.maxpool.determined_pixels import fixed_pixels
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.expectation_propagation import Schedule, State, image_prior, propagate, sites
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.refinement import fit, passed
from attacks.analytic.maxpool.solution import Solved
from fl.seeds import stream


def off(truth: Tensor, *places: tuple[int, int]) -> Tensor:
    """The picture with one level more in all channels of these pixels."""
    wrong = truth.clone()
    for row, column in places:
        wrong[:, row, column] += LEVELS.step.flatten()
    return wrong


def test_equations_confirm_what_is_right_and_nothing_that_is_not() -> None:
    known, truth = problem(6, 12)
    right = confirmed(known, truth, LEVELS.step)
    assert right.sum() == 35
    assert not bool(right[0, 5])  # a single output saw this corner
    sure = confirmed(known, off(truth, (0, 0), (5, 5)), LEVELS.step)
    assert not bool(sure[0, 0])
    assert not bool(sure[5, 5])
    assert int(sure.sum()) > 10


def test_few_of_many_equations_confirm_nothing() -> None:
    known, truth = problem(6, 12)
    missed = known.target.clone()
    missed[2:] += 0.1
    assert not bool(confirmed(replace(known, target=missed), truth, LEVELS.step)[2:4, 2:4].any())
    missed = known.target.clone()
    missed[8:] += 0.1
    assert bool(confirmed(replace(known, target=missed), truth, LEVELS.step)[2:4, 2:4].all())


def test_targets_that_are_hardly_known_confirm_nothing() -> None:
    known, truth = problem(6, 12)
    loose = known.loose + 1e-3 * known.forward_scale
    assert not bool(confirmed(replace(known, loose=loose), truth, LEVELS.step).any())
    missed, seen = known.target.clone(), known.seen.clone()
    missed[2:] += 0.1
    seen[2:] = False  # only bounds, so that it says nothing that these do not hold
    assert bool(confirmed(replace(known, target=missed, seen=seen), truth, LEVELS.step)[2:4, 2:4].all())


def test_the_propagation_leaves_out_what_is_confirmed() -> None:
    known, truth = problem(8, 12)
    schedule = Schedule(noise=1e-2, factor=0.2, iterations=16, least=1e-9)
    states = list(propagate(known, image_prior(known.layer, MEAN, STD, 0.3), schedule, LEVELS))
    held = [int(state.held.sum()) for state in states]
    assert held[0] == 0
    assert held[-1] > 55  # of 64
    last = states[-1].held
    assert torch.allclose(states[-1].mean[:, last], truth[:, last])
    plain = propagate(known, image_prior(known.layer, MEAN, STD, 0.3), schedule)
    assert not any(bool(state.held.any()) for state in plain)  # without levels there is nothing to confirm


@pytest.mark.parametrize("levels", [LEVELS, None])
def test_noise_does_not_run_ahead_of_the_error(levels: Levels | None, monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = problem(8, 12)
    noises: list[float] = []

    def watched(known: Equations, state: State, mean: Tensor, patches: Tensor, noise: float, damping: float) -> object:
        noises.append(noise)
        return sites(known, state, mean, patches, noise, damping)

    monkeypatch.setattr(expectation_propagation, "sites", watched)
    schedule = Schedule(noise=1e-3, factor=1e-2, iterations=6, least=1e-9)
    errors = [s.error for s in propagate(known, image_prior(known.layer, MEAN, STD, 0.3), schedule, levels)]
    behind = [noise >= (0.2 * error) ** 2 for noise, error in zip(noises[2:], errors[1:], strict=False)]
    assert all(behind) == (levels is not None)


def test_a_cell_of_certain_pixels_keeps_its_site_and_knows_its_position() -> None:
    known, truth = problem(6, 4)
    state = replace(State.first(known), shares=known.start)
    precision = torch.eye(4).double().expand_as(state.precision)
    state = replace(state, precision=precision)
    size = known.layer.windows.filters.shape[1]
    nothing = torch.zeros(known.layer.cells.shape[0], size, size, dtype=torch.float64)
    site, shift, shares = sites(known, state, truth, nothing, 1e-8, 0.6)
    assert torch.equal(site, precision)
    assert torch.equal(shift, state.shift)
    assert torch.equal(shares.argmax(-1), passed(known, truth).argmax(-1))


def test_where_something_is_open_only_what_is_confirmed_counts_as_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(6, 12)
    monkeypatch.setattr(determined_pixels, "spans", lambda *_: torch.full((1,), float("inf")))
    found = fit(known, off(truth, (5, 5)))
    every = torch.ones_like(truth, dtype=torch.bool)
    assert bool(fixed_pixels(Solved(known, found, every), MEAN, STD).all())
    some = every.clone()
    some[0, 2, 2] = False
    sure = fixed_pixels(Solved(known, found, some), MEAN, STD)
    assert not bool(sure[:, 5, 5].any())  # its equations do not hold
    assert not bool(sure[0, 2, 2])
    assert bool(sure[1:, 2, 2].all())


def test_a_pixel_off_its_level_is_not_fixed_whatever_told_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(6, 12)
    monkeypatch.setattr(determined_pixels, "spans", lambda *_: torch.full((1,), float("inf")))
    some = torch.zeros_like(truth)
    some[0, 2, 2] = float("inf")
    monkeypatch.setattr(Solved, "deviations", lambda _: some)
    sure = fixed_pixels(Solved(known, fit(known, off(truth, (5, 5)))), MEAN, STD)
    assert not bool(sure[:, 5, 5].any())
    assert not bool(sure[0, 2, 2])
    assert bool(sure[1:, 2, 2].all())
    between = fit(known, truth + 0.1 * LEVELS.step)  # on no levels: outputs have nothing to confirm
    assert int((~fixed_pixels(Solved(known, between), MEAN, STD)).sum()) == 1


@pytest.mark.parametrize(("away", "told"), [(1e-3, False), (0.3, True)])
def test_numbers_next_to_levels_are_told_no_better_than_these_explain(
    away: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equations that are all off a little have a solution beside the levels, which leaves nothing of them."""
    known, truth = problem(6, 12)
    x = truth + away * LEVELS.step
    known = replace(known, target=known.layer.pooled_outputs(x))
    known = replace(known, gradient=known.gradient - known.residual(x, passed(known, x)))
    assert fit(known, x).error < 1e-12
    some = torch.zeros_like(truth)
    some[0, 2, 2] = determined_pixels.LOOSE / 3 * LEVELS.step[0]
    monkeypatch.setattr(determined_pixels, "spans", lambda *_: torch.full((1,), float("inf")))
    monkeypatch.setattr(Solved, "deviations", lambda of: some * (1 if of.found.error < 1e-9 else 10))
    sure = fixed_pixels(Solved(known, fit(known, x)), MEAN, STD)
    assert bool(sure[0, 2, 2]) == told
    assert int((~sure).sum()) == (not told)


def test_black_ground_is_no_sign_of_levels() -> None:
    """A picture that is on none but for its ground is verified as any other."""
    draw = stream(0, "ground")
    picture = (torch.rand(1, 1, 8, 8, generator=draw, dtype=torch.float64) * 16).round() / 16
    picture[torch.rand(picture.shape, generator=draw) < 0.6] = 0
    task = network(nn.Conv2d(1, 16, 3, stride=2, padding=1), LEAKY, size=8)
    result = Cascade()(victim(task, picture))
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert (result.inputs - picture).abs().max() < 1e-4
    assert result.verified


def test_outputs_that_hardly_see_a_channel_do_not_confirm_it() -> None:
    known, truth = problem(6, 12)
    weight = known.layer.weight.clone()
    weight[:, 1] *= 1e-6
    layer = replace(known.layer, weight=weight)
    known = replace(known, layer=layer, target=layer.pooled_outputs(truth))
    wrong = truth.clone()
    wrong[1] += 20 * LEVELS.step[1]
    assert not bool(confirmed(known, wrong, LEVELS.step).any())


def test_what_passes_on_other_positions_is_not_ruled_out_by_inequalities(monkeypatch: pytest.MonkeyPatch) -> None:
    known, truth = problem(6, 12)
    monkeypatch.setattr(determined_pixels, "spans", lambda *rest: torch.zeros(int(rest[2].sum())))
    some = torch.ones_like(truth, dtype=torch.bool)
    some[:2, 2, 2] = False
    solved = Solved(known, fit(known, truth), some)
    assert bool(fixed_pixels(solved, MEAN, STD).all())
    disputed = torch.zeros_like(some)
    disputed[0, 2, 2:4] = True
    sure = fixed_pixels(replace(solved, disputed=disputed), MEAN, STD)
    assert not bool(sure[0, 2, 2])
    assert not bool(sure[0, 2, 3])
    assert bool(sure[1, 2, 2])  # nothing speaks against it
    loose = torch.full_like(truth, 1e-9)  # by how far it may be off, where nothing else is known
    told = fixed_pixels(Solved(known, fit(known, truth), None, loose, disputed), MEAN, STD)
    assert not bool(told[0, 2, 2] or told[0, 2, 3])
    assert bool(told[1, 2, 2])
