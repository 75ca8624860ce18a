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
from attacks.analytic.maxpool.determined_pixels import confirm_pixels, find_determined_pixels
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.expectation_propagation import PropagationState, Schedule, propagate, update_sites
from attacks.analytic.maxpool.gaussian_prior import image_prior
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.refinement import evaluate, select_largest
from attacks.analytic.maxpool.solution import LayerSolution
from fl.seeds import stream


def off(truth: Tensor, *places: tuple[int, int]) -> Tensor:
    """The picture with one level more in all channels of these pixels."""
    wrong = truth.clone()
    for row, column in places:
        wrong[:, row, column] += LEVELS.step.flatten()
    return wrong


def test_equations_confirm_what_is_right_and_nothing_that_is_not() -> None:
    equations, truth = problem(6, 12)
    right = confirm_pixels(equations, truth, LEVELS.step)
    assert right.sum() == 35
    assert not bool(right[0, 5])  # a single output saw this corner
    sure = confirm_pixels(equations, off(truth, (0, 0), (5, 5)), LEVELS.step)
    assert not bool(sure[0, 0])
    assert not bool(sure[5, 5])
    assert int(sure.sum()) > 10


def test_few_of_many_equations_confirm_nothing() -> None:
    equations, truth = problem(6, 12)
    missed = equations.target.clone()
    missed[2:] += 0.1
    assert not bool(confirm_pixels(replace(equations, target=missed), truth, LEVELS.step)[2:4, 2:4].any())
    missed = equations.target.clone()
    missed[8:] += 0.1
    assert bool(confirm_pixels(replace(equations, target=missed), truth, LEVELS.step)[2:4, 2:4].all())


def test_targets_that_are_hardly_known_confirm_nothing() -> None:
    equations, truth = problem(6, 12)
    loose = equations.target_std + 1e-3 * equations.output_scale
    assert not bool(confirm_pixels(replace(equations, target_std=loose), truth, LEVELS.step).any())
    missed, seen = equations.target.clone(), equations.target_known.clone()
    missed[2:] += 0.1
    seen[2:] = False  # only bounds, so that it says nothing that these do not hold
    assert bool(
        confirm_pixels(replace(equations, target=missed, target_known=seen), truth, LEVELS.step)[2:4, 2:4].all()
    )


def test_the_propagation_leaves_out_what_is_confirmed() -> None:
    equations, truth = problem(8, 12)
    schedule = Schedule(noise=1e-2, factor=0.2, iterations=16, least=1e-9)
    states = list(propagate(equations, image_prior(equations.layer, MEAN, STD, 0.3), schedule, LEVELS))
    held = [int(state.confirmed.sum()) for state in states]
    assert held[0] == 0
    assert held[-1] > 55  # of 64
    last = states[-1].confirmed
    assert torch.allclose(states[-1].mean[:, last], truth[:, last])
    plain = propagate(equations, image_prior(equations.layer, MEAN, STD, 0.3), schedule)
    assert not any(bool(state.confirmed.any()) for state in plain)  # without levels there is nothing to confirm


@pytest.mark.parametrize("levels", [LEVELS, None])
def test_noise_does_not_run_ahead_of_the_error(levels: PixelLevels | None, monkeypatch: pytest.MonkeyPatch) -> None:
    equations, _ = problem(8, 12)
    noises: list[float] = []

    def watched(
        equations: Equations, state: PropagationState, mean: Tensor, patches: Tensor, noise: float, damping: float
    ) -> object:
        noises.append(noise)
        return update_sites(equations, state, mean, patches, noise, damping)

    monkeypatch.setattr(expectation_propagation, "update_sites", watched)
    schedule = Schedule(noise=1e-3, factor=1e-2, iterations=6, least=1e-9)
    errors = [s.error for s in propagate(equations, image_prior(equations.layer, MEAN, STD, 0.3), schedule, levels)]
    behind = [noise >= (0.2 * error) ** 2 for noise, error in zip(noises[2:], errors[1:], strict=False)]
    assert all(behind) == (levels is not None)


def test_a_cell_of_certain_pixels_keeps_its_site_and_knows_its_position() -> None:
    equations, truth = problem(6, 4)
    state = replace(PropagationState.first(equations), selection=equations.uniform_selection)
    precision = torch.eye(4).double().expand_as(state.site_precision)
    state = replace(state, site_precision=precision)
    size = equations.layer.cell_layer.filters.shape[1]
    nothing = torch.zeros(equations.layer.cells.shape[0], size, size, dtype=torch.float64)
    site, shift, selection = update_sites(equations, state, truth, nothing, 1e-8, 0.6)
    assert torch.equal(site, precision)
    assert torch.equal(shift, state.site_shift)
    assert torch.equal(selection.argmax(-1), select_largest(equations, truth).argmax(-1))


def test_where_something_is_open_only_what_is_confirmed_counts_as_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(6, 12)
    monkeypatch.setattr(determined_pixels, "movable_ranges", lambda *_: torch.full((1,), float("inf")))
    found = evaluate(equations, off(truth, (5, 5)))
    every = torch.ones_like(truth, dtype=torch.bool)
    assert bool(find_determined_pixels(LayerSolution(equations, evaluate(equations, truth), every), MEAN, STD).all())
    some = every.clone()
    some[0, 2, 2] = False
    sure = find_determined_pixels(LayerSolution(equations, found, some), MEAN, STD)
    assert not bool(sure[:, 5, 5].any())  # its equations do not hold
    assert not bool(sure[0, 2, 2])
    assert bool(sure[1:, 2, 2].all())


def test_pixels_whose_own_equations_fail_are_not_fixed_though_all_were_thought_determined() -> None:
    equations, truth = problem(6, 12)
    every = torch.ones_like(truth, dtype=torch.bool)
    wrong = evaluate(equations, off(truth, (5, 5)))
    sure = find_determined_pixels(LayerSolution(equations, wrong, every), MEAN, STD)
    assert not bool(sure[:, 5, 5].any())
    assert bool(sure[:, 2:4, 2:4].all())


def test_a_pixel_off_its_level_is_not_fixed_whatever_told_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(6, 12)
    monkeypatch.setattr(determined_pixels, "movable_ranges", lambda *_: torch.full((1,), float("inf")))
    some = torch.zeros_like(truth)
    some[0, 2, 2] = float("inf")
    monkeypatch.setattr(LayerSolution, "deviations", lambda _: some)
    sure = find_determined_pixels(LayerSolution(equations, evaluate(equations, off(truth, (5, 5)))), MEAN, STD)
    assert not bool(sure[:, 5, 5].any())
    assert not bool(sure[0, 2, 2])
    assert bool(sure[1:, 2, 2].all())
    between = evaluate(equations, truth + 0.1 * LEVELS.step)  # on no levels: outputs have nothing to confirm
    assert int((~find_determined_pixels(LayerSolution(equations, between), MEAN, STD)).sum()) == 1


@pytest.mark.parametrize(("away", "told"), [(1e-3, False), (0.3, True)])
def test_numbers_next_to_levels_are_told_no_better_than_these_explain(
    away: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equations that are all off a little have a solution beside the levels, which leaves nothing of them."""
    equations, truth = problem(6, 12)
    x = truth + away * LEVELS.step
    equations = replace(equations, target=equations.layer.pooled_outputs(x))
    equations = replace(equations, gradient=equations.gradient - equations.residual(x, select_largest(equations, x)))
    assert evaluate(equations, x).error < 1e-12
    some = torch.zeros_like(truth)
    some[0, 2, 2] = determined_pixels.MAX_ROUNDABLE_STD / 3 * LEVELS.step[0]
    monkeypatch.setattr(determined_pixels, "movable_ranges", lambda *_: torch.full((1,), float("inf")))
    monkeypatch.setattr(LayerSolution, "deviations", lambda of: some * (1 if of.fit.error < 1e-9 else 10))
    sure = find_determined_pixels(LayerSolution(equations, evaluate(equations, x)), MEAN, STD)
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
    equations, truth = problem(6, 12)
    weight = equations.layer.weight.clone()
    weight[:, 1] *= 1e-6
    layer = replace(equations.layer, weight=weight)
    equations = replace(equations, layer=layer, target=layer.pooled_outputs(truth))
    wrong = truth.clone()
    wrong[1] += 20 * LEVELS.step[1]
    assert not bool(confirm_pixels(equations, wrong, LEVELS.step).any())


def test_what_passes_on_other_positions_is_not_ruled_out_by_inequalities(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, truth = problem(6, 12)
    monkeypatch.setattr(determined_pixels, "movable_ranges", lambda *rest: torch.zeros(int(rest[2].sum())))
    some = torch.ones_like(truth, dtype=torch.bool)
    some[:2, 2, 2] = False
    solved = LayerSolution(equations, evaluate(equations, truth), some)
    assert bool(find_determined_pixels(solved, MEAN, STD).all())
    disputed = torch.zeros_like(some)
    disputed[0, 2, 2:4] = True
    sure = find_determined_pixels(replace(solved, disputed=disputed), MEAN, STD)
    assert not bool(sure[0, 2, 2])
    assert not bool(sure[0, 2, 3])
    assert bool(sure[1, 2, 2])  # nothing speaks against it
    loose = torch.full_like(truth, 1e-9)  # by how far it may be off, where nothing else is known
    told = find_determined_pixels(
        LayerSolution(equations, evaluate(equations, truth), None, loose, disputed), MEAN, STD
    )
    assert not bool(told[0, 2, 2] or told[0, 2, 3])
    assert bool(told[1, 2, 2])
