"""The pieces of the exact inversion, each against autograd or brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.analytic.maxpool import annealing
from attacks.analytic.maxpool.closed_form import solve_by_row_space
from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.determined_pixels import movable_ranges
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.expectation_propagation import Schedule, propagate
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior, image_prior
from attacks.analytic.maxpool.normal_equations import NormalEquations, Preconditioner, _cholesky
from attacks.analytic.maxpool.pixel_levels import SHARP, PixelLevels
from attacks.analytic.maxpool.refinement import evaluate, evaluate_with_ties, refine, select_largest
from attacks.analytic.maxpool.solution import LayerSolution
from attacks.analytic.maxpool.solver import _reweight, solve_layer
from attacks.search_control import SearchControl, StoppedError, limited_by
from fl.seeds import stream

SHAPES = {
    "plain": dict(shape=(2, 8, 7), padding=(0, 0), stride=(1, 1), window=(2, 2)),
    "padded": dict(shape=(1, 6, 6), padding=(1, 2), stride=(1, 1), window=(2, 2)),
    "strided": dict(shape=(2, 9, 8), padding=(1, 1), stride=(2, 1), window=(1, 1)),
    "odd": dict(shape=(1, 9, 9), padding=(0, 0), stride=(1, 1), window=(3, 2)),
    "overlapping": dict(shape=(2, 9, 10), padding=(1, 1), stride=(1, 1), window=(3, 2), pool_stride=(2, 1)),
    "strided and overlapping": dict(
        shape=(1, 15, 14), padding=(0, 1), stride=(2, 1), window=(3, 3), pool_stride=(2, 2)
    ),
    "average": dict(shape=(2, 8, 8), padding=(1, 1), stride=(1, 1), window=(2, 2), is_average=True),
}


def randn(*shape: int, key: object = "x") -> Tensor:
    return torch.randn(shape, generator=stream(0, "exact", str(key), *shape), dtype=torch.float64)


def layer(name: str, filters: int = 3) -> ConvPoolLayer:
    settings = SHAPES[name]
    return ConvPoolLayer(randn(filters, settings["shape"][0], 3, 3, key="w"), randn(filters, key="b"), **settings)  # type: ignore[index]


def problem(made: ConvPoolLayer, x: Tensor) -> Equations:
    """What a network would show of `x`, with a random signal behind the pooling."""
    target = made.pooled_outputs(x)
    signal = randn(*target.shape, key="signal")
    equations = Equations(
        made,
        x.new_zeros(len(made.weight), made.filters.shape[1]),
        target,
        signal,
        torch.ones_like(target, dtype=torch.bool),
        torch.zeros_like(target) + 1e-12,
        torch.ones_like(target),
    )
    return replace(equations, gradient=-equations.residual(x, select_largest(equations, x)))


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_maps_of_a_layer_are_autograd_s(name: str) -> None:
    made, x = layer(name), randn(*SHAPES[name]["shape"])  # type: ignore[misc]
    weight, x = made.weight.clone().requires_grad_(), x.requires_grad_()
    outputs = F.conv2d(x[None], weight, made.bias, made.stride, made.padding)
    pool = F.avg_pool2d if made.is_average else F.max_pool2d
    pooled = pool(outputs, made.window, made.window_stride)[0].flatten(1)
    assert torch.allclose(made.pooled_outputs(x), pooled)
    equations = problem(made, x.detach())
    back, down = torch.autograd.grad((pooled * equations.signal).sum(), [weight, x])
    assert torch.allclose(equations.gradient, back.flatten(1))
    signal = made.scatter(select_largest(equations, x.detach()) * equations.signal[..., None])
    assert torch.allclose(made.backpropagate(signal), down)
    maps = made.gradient_map(signal)
    planes = torch.stack([maps @ plane.flatten() for plane in x.detach()], 1).view(3, 3, 3, -1)
    assert torch.allclose(planes.permute(0, 3, 1, 2).flatten(1), equations.gradient)


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_matrices_of_a_layer_are_the_forms_they_stand_for(name: str) -> None:
    made, x = layer(name), randn(*SHAPES[name]["shape"])  # type: ignore[misc]
    flat, channel = x.flatten(), x[0].flatten()
    patches = made.patches(x)
    kernels = randn(*patches.shape, patches.shape[1], key="kernel")
    assert torch.allclose(
        flat @ made.quadratic_form(kernels) @ flat, torch.einsum("lm,lmn,ln->", patches, kernels, patches)
    )
    weights = randn(3, len(patches), key="weights").square()
    only = torch.zeros_like(x)
    only[0] = x[0]
    expected = (weights * made.linear_outputs(only).square()).sum()
    assert torch.allclose(channel @ made.channel_blocks(weights)[0] @ channel, expected)
    assert torch.allclose(made.mean_block(weights), made.channel_blocks(weights).mean(0))
    cells = made.patches(only)[made.cells]
    between = randn(len(cells), cells.shape[1], cells.shape[1], key="pairs")
    assert torch.allclose(
        channel @ made.within_cell_form(between) @ channel, torch.einsum("kpm,kpr,krm->", cells, between, cells)
    )


@pytest.mark.parametrize("name", ["plain", "overlapping", "strided and overlapping"])
def test_what_a_cell_sees_is_one_patch_of_its_window(name: str) -> None:
    made, x = layer(name), randn(*SHAPES[name]["shape"])  # type: ignore[misc]
    outputs = made.cell_layer.linear_outputs(x).unflatten(0, (3, -1)).transpose(1, 2)
    assert torch.allclose(outputs + made.bias[:, None, None], made.outputs(x))


@pytest.mark.parametrize("preconditioner", ["channels", "mean", "whole"])
@pytest.mark.parametrize("name", ["plain", "average"])
def test_conjugate_gradients_solve_the_dense_system(name: str, preconditioner: Preconditioner) -> None:
    made = layer(name, 6)
    equations = problem(made, randn(*SHAPES[name]["shape"]))  # type: ignore[misc]
    selection = (
        torch.softmax(randn(*equations.uniform_selection.shape, key="shares"), -1)
        if made.positions_unknown
        else equations.uniform_selection
    )
    noise, forward = equations.gradient_scale * 0.1, equations.output_scale * 0.3
    prior = GaussianPrior(
        torch.eye(2).double() * 2, torch.eye(made.shape[1] * made.shape[2]).double(), torch.ones(2).double()
    )
    sites = randn(2, *made.shape, key="sites").abs()
    prior = replace(prior, sites=sites)
    system = NormalEquations.of(equations, selection, noise, forward, prior=prior)
    bare = NormalEquations.of(equations, selection, noise, forward).dense()
    matrix = bare + torch.kron(prior.channels, prior.pixels) + torch.diag(sites[0].flatten())
    found = system.solve(torch.zeros(made.shape).double(), 1e-12, preconditioner=preconditioner)
    assert torch.allclose(system.dense(), matrix)
    assert torch.allclose(found.flatten(), torch.linalg.solve(matrix, system.rhs.flatten()), atol=1e-9)


def test_enough_filters_give_the_input_in_closed_form() -> None:
    made = ConvPoolLayer(randn(40, 6, 3, 3, key="w"), randn(40, key="b"), (6, 6, 6), (1, 1), window=(2, 2))
    x = randn(6, 6, 6)
    found = solve_by_row_space(problem(made, x))
    assert found is not None
    assert torch.allclose(found, x, atol=1e-8)
    few = ConvPoolLayer(made.weight[:30], made.bias[:30], made.shape, (1, 1), window=(2, 2))
    assert solve_by_row_space(problem(few, x)) is None


@pytest.mark.parametrize("noise", [0.0, 1e-3, 2.0])
def test_an_annealing_that_ends_early_finds_what_it_would_have_found(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ConvPoolLayer(randn(6, 4, 3, 3, key="w"), randn(6, key="b"), (4, 8, 8), (1, 1), window=(2, 2))
    equations = problem(made, randn(4, 8, 8))
    off = noise * equations.gradient_scale[:, None] * randn(*equations.gradient.shape, key="noise")
    loose = equations.target_std + noise * equations.output_scale
    equations = replace(equations, gradient=equations.gradient + off, target_std=loose, gradient_noise=max(noise, 1e-7))
    stretches = list[int]()

    def never(_x: Tensor) -> bool:
        stretches.append(0)
        return False

    _, selection = annealing.anneal(equations, annealing.cooling_schedule(100.0, 0.75), never)
    early = len(stretches)
    monkeypatch.setattr(annealing, "STATIONARY", -1.0)
    _, whole = annealing.anneal(equations, annealing.cooling_schedule(100.0, 0.75), never)
    assert len(stretches) - early == 23
    assert early < 23 or noise == 2.0  # of which nothing is told, and positions stay open to the end
    assert float((selection - whole).abs().max()) < 1e-2


def test_positions_are_found_where_filters_are_fewer() -> None:
    made = ConvPoolLayer(randn(16, 4, 3, 3, key="w"), randn(16, key="b"), (4, 8, 8), (1, 1), window=(2, 2))
    x = randn(4, 8, 8)
    equations = problem(made, x)
    solved = solve_layer(equations)
    assert solved.is_satisfied
    assert torch.equal(solved.fit.selection, select_largest(equations, x))
    assert torch.allclose(solved.fit.x, x, atol=1e-6)
    assert float(solved.deviations().max()) < 1e-3


def test_solving_a_large_layer_ends_at_the_time_limit() -> None:
    made = ConvPoolLayer(randn(16, 4, 3, 3, key="w"), randn(16, key="b"), (4, 8, 8), (1, 1), window=(2, 2))
    equations = problem(made, randn(4, 8, 8))
    even, forward = equations.noise_floor.expand(16), 1e-5 * equations.output_scale
    system = NormalEquations.of(equations, select_largest(equations, randn(4, 8, 8)), even, forward)
    with limited_by(SearchControl(time_limit=0)), pytest.raises(StoppedError):
        system.solve(torch.zeros(4, 8, 8, dtype=torch.float64))


def test_features_are_weighed_by_the_gradient_s_rounding_and_not_by_what_a_search_had_left() -> None:
    made = ConvPoolLayer(randn(16, 4, 3, 3, key="w"), randn(16, key="b"), (4, 8, 8), (1, 1), window=(2, 2))
    x = randn(4, 8, 8)
    equations = problem(made, x)
    rounding = 1e-5 * equations.gradient.square().mean().sqrt() * randn(16, 36, key="rounding")
    equations = replace(
        equations, gradient=equations.gradient + rounding, gradient_noise=1e-5, target_std=equations.target_std + 1e-2
    )
    forward, even = 1e-5 * equations.output_scale, equations.noise_floor.expand(16)
    uneven = even * torch.where(torch.arange(16) < 8, 1.0, 1e3)  # as where half of the filters were decoded last
    rough, best = (
        NormalEquations.of(equations, select_largest(equations, x), noise, forward).solve(x, 1e-12)
        for noise in (uneven, even)
    )
    sharper = _reweight(LayerSolution.of(equations, evaluate(equations, rough))).fit.x
    assert (rough - x).norm() > 2 * (best - x).norm()
    assert (sharper - x).norm() < 1.1 * (best - x).norm()


def test_numbers_of_the_gradient_count_by_their_own_rounding() -> None:
    made = ConvPoolLayer(randn(16, 4, 3, 3, key="w"), randn(16, key="b"), (4, 8, 8), window=(2, 2))
    x = randn(4, 8, 8)
    equations = problem(made, x)
    grain = 2 ** -randn(16, 36, key="grain").abs().mul(3)
    grain = grain / grain.square().mean().sqrt()
    rounding = 1e-3 * equations.gradient.square().mean().sqrt() * grain * randn(16, 36, key="rounding")
    equations = replace(
        equations,
        gradient=equations.gradient + rounding,
        gradient_noise=1e-3,
        target_std=equations.target_std + 10,
        rounding=1e-3 * grain,
    )
    selection, forward = select_largest(equations, x), equations.output_scale
    plain, fine = (
        NormalEquations.of(equations, selection, equations.noise_floor.expand(16), forward, per_equation=fine)
        for fine in (False, True)
    )
    near, nearer = (system.solve(torch.zeros_like(x), 1e-12) for system in (plain, fine))
    assert (nearer - x).norm() < 0.5 * (near - x).norm()
    assert torch.allclose((fine.dense() @ nearer.flatten()).view(4, -1), fine.rhs, rtol=1e-6)
    off = (
        LayerSolution(equations, evaluate(equations, nearer, selection)).relative_uncertainty()
        * nearer.square().mean().sqrt()
    )
    assert 0.5 < ((nearer - x) / off).square().mean().sqrt() < 2  # it knows how far it is off
    coarse = NormalEquations.of(
        equations, selection, 100 * equations.noise_floor.expand(16), forward, per_equation=True
    )  # rounding is not the matter
    assert torch.allclose(
        coarse.gradient_form[0] * 1e4, plain.gradient_form, rtol=0.1, atol=1e-2 * float(plain.gradient_form.max())
    )


def test_a_pixel_that_nothing_fixes_is_not_called_known() -> None:
    made = ConvPoolLayer(
        randn(8, 1, 2, 2, key="w"), randn(8, key="b"), (1, 8, 8), window=(2, 2)
    )  # the last row is never seen
    x = randn(1, 8, 8)
    equations = problem(made, x)
    assert float(LayerSolution(equations, evaluate(equations, x)).deviations().max()) > 0.1


def test_an_output_on_the_wrong_side_of_the_bend_is_put_right() -> None:
    made = ConvPoolLayer(randn(16, 4, 3, 3, key="w"), randn(16, key="b"), (4, 8, 8), (1, 1), window=(2, 2))
    x = randn(4, 8, 8)
    true = problem(made, x)
    factor = torch.ones_like(true.signal)
    factor[3, 5] = 100.0
    doubt = torch.ones_like(factor)
    doubt[3, 5], doubt[2, 1] = 0.01, 0.01  # one is wrong, the other only might be
    solved = LayerSolution.of(
        *(lambda k: (k, evaluate(k, x)))(replace(true, signal=true.signal * factor, side_factor=doubt))
    )
    assert torch.allclose(solved.equations.signal, true.signal)
    assert torch.allclose(solved.equations.target_std / true.target_std, factor)  # the slope magnifies rounding as well
    assert solved.fit.gradient_error < 1e-9


def test_one_flipped_position_is_found_by_the_gradient() -> None:
    made = ConvPoolLayer(randn(16, 4, 3, 3, key="w"), randn(16, key="b"), (4, 8, 8), (1, 1), window=(2, 2))
    x = randn(4, 8, 8)
    equations = problem(made, x)
    near = x + 1e-4 * randn(4, 8, 8, key="error")
    found = refine(equations, near)
    assert found.error < 1e-9
    assert torch.allclose(found.x, x, atol=1e-8)


def test_of_two_outputs_alike_up_to_rounding_the_gradient_says_which_was_passed_on() -> None:
    made = ConvPoolLayer(randn(16, 4, 3, 3, key="w"), randn(16, key="b"), (4, 8, 8), (1, 1), window=(2, 2))
    x = randn(4, 8, 8)
    first, second = made.patches(x)[made.cells[5]][:2]
    apart = second - first
    weight = made.weight.clone()
    weight[3] = (30 * (first + second) / (first + second).norm()).view_as(weight[3])  # these two are the cell's largest
    weight[3] += ((1e-8 - weight[3].flatten() @ apart) / (apart @ apart) * apart).view_as(weight[3])
    equations = problem(replace(made, weight=weight), x)
    selection = select_largest(equations, x)
    assert selection[3, 5].argmax() == 0  # as of equal ones, which these are but for 1e-8
    selection[3, 5] = torch.eye(4, dtype=selection.dtype)[1]
    equations = replace(equations, gradient=torch.zeros_like(equations.gradient))
    equations = replace(equations, gradient=-equations.residual(x, selection))
    assert evaluate(equations, x).gradient_error > 1e-3
    assert evaluate_with_ties(equations, x).gradient_error < 1e-12
    assert torch.equal(evaluate_with_ties(equations, x).selection, selection)
    found = refine(equations, x + 1e-7 * randn(4, 8, 8, key="error"))
    assert found.error < 1e-9
    assert LayerSolution.of(equations, found).is_satisfied
    assert _reweight(
        LayerSolution.of(equations, evaluate(equations, x + 1e-7 * randn(4, 8, 8, key="error")))
    ).is_satisfied


def wave() -> tuple[Equations, Tensor, GaussianPrior, PixelLevels]:
    """A smooth image of 8 bits behind a pooled convolution, and what is expected of it."""
    rows = torch.linspace(0, 1, 12, dtype=torch.float64)
    image = 0.5 + 0.3 * torch.sin(6 * rows)[:, None] * torch.cos(5 * rows) + 0.1 * randn(12, 12, key="image")
    made = ConvPoolLayer(randn(12, 1, 3, 3, key="w"), randn(12, key="b"), (1, 12, 12), (1, 1), window=(2, 2))
    mean, std = torch.tensor([0.5]).double(), torch.tensor([0.25]).double()
    x = ((image[None] * 255).round().clamp(0, 255) / 255 - mean[0]) / std[0]
    return problem(made, x), x, image_prior(made, mean, std, 0.3), PixelLevels.of(mean, std)


def test_propagation_approaches_the_image() -> None:
    equations, x, prior, levels = wave()
    slow = Schedule(noise=1e-2, factor=0.6, iterations=20)
    states = list(propagate(equations, prior, slow))
    errors = [float((state.mean - x).norm() / x.norm()) for state in states]
    assert errors[5] < 0.5 * errors[0]
    assert errors[-1] < 1e-2
    assert states[-1].error < 1e-2 * states[0].error
    on = [state.mean for state in propagate(equations, prior, slow, levels)][14]
    assert float((on - x).norm() / x.norm()) < 0.8 * errors[14]
    assert torch.allclose(levels.nearest(on), x)


def test_doubtful_signals_do_not_mislead_the_propagation() -> None:
    equations, x, prior, _ = wave()
    wrong = torch.ones_like(equations.signal)
    wrong[2, 7] = 100.0
    doubt = torch.ones_like(wrong)
    doubt[2, 7] = 0.01
    slow = Schedule(noise=1e-2, factor=0.6, iterations=15)

    def error(given: Equations) -> float:
        last = [state.mean for state in propagate(given, prior, slow)][-1]
        return float((last - x).norm() / x.norm())

    misled = replace(equations, signal=equations.signal * wrong)
    assert error(replace(misled, side_factor=doubt)) < 0.3 * error(misled)


def test_sites_of_levels_have_the_moments_of_the_levels() -> None:
    levels = PixelLevels(torch.tensor([[[-1.0]]]).double(), torch.tensor([[[0.1]]]).double(), 21)
    every = -1 + 0.1 * torch.arange(21).double()
    mean, variance = torch.tensor([[[0.11, -1.03, 0.4]]]).double(), torch.tensor([[[0.001, 0.002, 1.0]]]).double()
    none = torch.zeros_like(mean)
    precision, shift = levels.match_moments(mean, variance, none, none)
    for n in range(2):
        weights = torch.softmax(-0.5 * (every - mean[0, 0, n]) ** 2 / variance[0, 0, n], 0)
        center = (weights * every).sum()
        spread = (weights * (every - center) ** 2).sum() + (SHARP * 0.1) ** 2
        together = precision[0, 0, n] + 1 / variance[0, 0, n]
        assert together == pytest.approx(float(1 / spread), rel=1e-3)
        assert float((shift[0, 0, n] + mean[0, 0, n] / variance[0, 0, n]) / together) == pytest.approx(float(center))
    assert precision[0, 0, 2] == shift[0, 0, 2] == 0  # levels that can't be told apart say nothing


def test_single_pixels_move_to_the_levels_that_explain_most() -> None:
    levels = PixelLevels(torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double(), 8)
    draw = randn(12, 9, key="form")
    matrix = draw.mT @ draw + torch.eye(9).double()
    x = torch.arange(9).double().remainder(8).view(1, 3, 3)
    start = x.clone()
    start[0, 0, 1], start[0, 2, 2] = 3, 1
    assert torch.equal(levels.coordinate_descent(start, matrix, matrix @ x.flatten()), x)


def test_what_pooling_did_not_pass_on_bounds_what_no_equation_fixes() -> None:
    made = ConvPoolLayer(randn(16, 1, 3, 3, key="w"), randn(16, key="b"), (1, 6, 6), window=(2, 2))
    x = torch.full((1, 6, 6), 0.25).double()  # all outputs of a cell are equal: the first is passed on
    equations = problem(made, x)
    free = torch.zeros(1, 6, 6, dtype=torch.bool)
    free[0, 5, 5] = free[0, 0, 5] = True
    low, high = torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double()
    assert float(movable_ranges(equations, evaluate(equations, x), free, low, high).max()) < 1e-4
    one = replace(made, weight=made.weight[:1], bias=made.bias[:1])  # one filter bounds a corner from one side
    lone = problem(one, x)
    free[0, 0, 5] = False
    reach = float(movable_ranges(lone, evaluate(lone, x), free, low, high).max())
    assert reach == pytest.approx(0.25 if one.weight[0, 0, 2, 2] > 0 else 0.75, abs=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_factors_of_what_has_none_are_not_sought_for_ever(value: float) -> None:
    assert _cholesky(torch.full((1, 2, 2), value).double()).shape == (1, 2, 2)
