"""Positions of a batch's cells, each filter's decided by the others: against brute force, and where annealing fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.brief import brief_picture_searches
from support.pictures import LEAKY, STEP, network, photograph
from torch import Tensor, nn

from attacks import Reconstruction
from attacks.analytic.cascade import Cascade
from attacks.analytic.maxpool import cavity, solver
from attacks.analytic.maxpool.annealing import anneal
from attacks.analytic.maxpool.cavity import CavityState, CellGeometry, LeaveOneFilterOut, cavity_states, fits_in_memory
from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.pixel_subset import PixelSubset
from attacks.analytic.maxpool.refinement import evaluate, refine, select_largest
from attacks.analytic.maxpool.solution import LayerSolution
from attacks.analytic.maxpool.solver import FAST, SLOW, _solve_by_cavity, solve_layer
from eval.metrics.score import score
from eval.metrics.self_verification import add_self_check_columns
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.seeds import stream
from fl.types import Batch


def randn(*shape: int, key: object) -> Tensor:
    return torch.randn(shape, generator=stream(1, "cavity", str(key)), dtype=torch.float64)


def problem(filters: int, images: int, channels: int = 4, size: int = 8) -> tuple[Equations, Tensor]:
    """A layer under several random inputs, and these."""
    weight, shape = randn(filters, channels, 3, 3, key="weight"), (channels, images * size, size)
    made = ConvPoolLayer(weight, randn(filters, key="bias"), shape, (1, 1), window=(2, 2), images=images)
    x = randn(*shape, key="x")
    target = made.pooled_outputs(x)
    equations = Equations(
        made,
        x.new_zeros(filters, channels * 9),
        target,
        randn(*target.shape, key="signal"),
        torch.ones_like(target, dtype=torch.bool),
        torch.full_like(target, 1e-12),
        torch.ones_like(target),
    )
    return replace(equations, gradient=-equations.residual(x, select_largest(equations, x))), x


def test_what_the_other_filters_say_is_the_least_squares_without_one() -> None:
    equations, x = problem(3, 2, channels=2, size=4)
    layer = equations.layer
    selection = torch.softmax(randn(*equations.uniform_selection.shape, key="shares"), -1)
    noise = randn(3, key="noise").square() + 0.1
    smooth = torch.eye(32).double() * 0.3 + 0.01
    without = LeaveOneFilterOut.of(equations, CavityState(x, selection, noise), smooth, CellGeometry.of(layer))
    assert without is not None
    mean, covariance = without.output_moments
    maps = layer.gradient_map(layer.scatter(selection * equations.signal[..., None])).unflatten(0, (3, -1))
    gradient = equations.gradient.view(3, 2, 9)
    probes = torch.stack([layer.outputs(unit.view(layer.shape)) for unit in torch.eye(64).double()], -1)
    linear = probes - layer.bias[:, None, None, None]  # (O, K, P, N): outputs by unit of the input
    for o in range(3):
        others = [i for i in range(3) if i != o]
        inverse = torch.linalg.inv(sum((maps[i].mT @ maps[i] / noise[i] for i in others), smooth))
        own = torch.stack([inverse @ sum(maps[i].mT @ gradient[i, c] / noise[i] for i in others) for c in range(2)])
        patches = layer.patches(own.view(layer.shape))[layer.cells]
        assert torch.allclose(without.cell_patches[o], patches, atol=1e-6)
        assert torch.allclose(mean[o], patches @ layer.filters[o], atol=1e-6)
        whole = torch.block_diag(inverse, inverse)
        expected = torch.einsum("kpn,nm,krm->kpr", linear[o], whole, linear[o])
        assert torch.allclose(covariance[o], expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(without.residual_covariance[o], maps[o] @ inverse @ maps[o].mT, rtol=1e-5, atol=1e-6)


def test_positions_are_found_where_annealing_stays_stuck() -> None:
    equations, x = problem(20, 3, channels=8, size=6)
    for stretches in (FAST, SLOW):
        stuck, _ = anneal(equations, stretches, lambda _: False)
        assert refine(equations, stuck).error > 0.1
    last = list(cavity_states(equations))[-1]
    right = (last.selection.argmax(-1) == select_largest(equations, x).argmax(-1)).double().mean()
    assert right > 0.97
    solved = solve_layer(equations)
    assert solved.is_satisfied
    assert torch.allclose(solved.fit.x, x, atol=1e-6)


def test_a_filter_whose_gradient_is_zero_is_no_end_of_the_search() -> None:
    equations, _ = problem(8, 3)
    silent = equations.gradient.clone()
    silent[0] = 0
    equations = replace(equations, gradient=silent)
    assert len(list(cavity_states(equations, rounds=2))) == 2
    assert not _solve_by_cavity(equations).is_satisfied
    assert not solve_layer(equations).is_satisfied


def test_what_a_guess_holds_at_once_bounds_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = 3 * 16 * 16**2  # filters, pairs of positions (cells are fewer), pairs of what a cell sees in a channel
    patches = 3 * 8 * 4 * 16 * 9
    plane = (4 * 8 * 8) ** 2
    for shape, size in (((3, 2, 1, 4), pairs), ((3, 2, 16, 4), patches), ((1, 4, 1, 8), plane)):
        equations, _ = problem(*shape)
        monkeypatch.setattr(cavity, "MAX_NUMBERS", size)
        assert fits_in_memory(equations)
        monkeypatch.setattr(cavity, "MAX_NUMBERS", size - 1)
        assert not fits_in_memory(equations)


def test_what_depends_on_the_layer_alone_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ConvPoolLayer] = []
    of = PixelSubset.of
    monkeypatch.setattr(PixelSubset, "of", lambda layer, held: made.append(layer) or of(layer, held))  # type: ignore[func-returns-value]
    assert len(list(cavity_states(problem(3, 2, channels=2, size=4)[0], rounds=3))) == 3
    assert len(made) == 1


def test_a_search_that_never_starts_leaves_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, _ = problem(8, 3)
    monkeypatch.setattr(solver, "cavity_states", lambda _: iter(()))
    assert _solve_by_cavity(equations).fit.x.count_nonzero() == 0


def test_a_search_without_an_end_is_cut_off() -> None:
    equations, x = problem(8, 3)
    assert len(list(cavity_states(replace(equations, gradient=randn(8, 36, key="other")), rounds=4))) == 4
    solved = solve_layer(replace(equations, gradient=randn(8, 36, key="other")))
    assert not solved.is_satisfied
    count, rest = solved.progress_description.split(" ", 1)
    assert rest.startswith("of 384 pooling cells open")
    assert int(count) > 100
    assert LayerSolution(equations, evaluate(equations, x)).progress_description.startswith("0 of 384")


def test_two_blocks_of_few_filters_with_relu() -> None:
    """Nearly half of the outputs are zero and say little: annealing stays stuck."""
    block = (nn.MaxPool2d(2), nn.ReLU())
    task = network(nn.Conv2d(1, 16, 3, padding=1), *block, nn.Conv2d(16, 32, 3, padding=1), *block, size=20)
    batch = Batch(photograph(20), torch.tensor([1]))
    view = Federation(Client(task, STEP), [ClientData(batch, batch)]).observe(0)[0]
    result = Cascade()(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert result.inputs is not None
    assert torch.allclose(result.inputs, batch.inputs, atol=1e-5)


TWICE = (nn.Conv2d(1, 16, 3), nn.MaxPool2d(2), LEAKY, nn.Conv2d(16, 32, 3), nn.MaxPool2d(2), LEAKY)


def test_a_batch_that_is_not_followed_says_how_far_it_got() -> None:
    """The second convolution's gradient is another's: its input is returned, and no picture."""
    task = network(*TWICE)
    one, other = (
        Federation(Client(task, STEP), [ClientData(batch, batch)]).observe(0)[0]
        for image in (photograph(14), 1 - photograph(14))
        for batch in [Batch(torch.cat([image, image.flip(3)]), torch.tensor([0, 1]))]
    )
    name = "body.3.weight"
    result = Cascade()(replace(one, update={**one.update, name: other.update[name]}))
    assert isinstance(result, Reconstruction)
    assert result.inputs is None
    assert result.verified is False
    assert result.private["features/body.3"].shape == (2, 16, 6, 6)
    assert result.note.startswith("body.3: ")
    assert result.note.endswith("the layers below it were not tried")


def test_features_are_told_where_only_the_picture_is_not() -> None:
    """The lowest convolution's gradient is another's: what it returned is still exact, and no picture is."""
    task = network(*TWICE)
    batch = Batch(photograph(14), torch.tensor([0]))
    view = Federation(Client(task, STEP), [ClientData(batch, batch)]).observe(0)[0]
    other = replace(view, update={**view.update, "body.0.weight": -view.update["body.0.weight"]})  # type: ignore[operator]
    with brief_picture_searches():
        result = Cascade()(other)
    assert isinstance(result, Reconstruction)
    assert result.verified is False
    assert result.note.startswith("body.0: ")  # of the right gradient nothing is said
    with torch.no_grad():
        normalize, layers = (task.model.get_submodule(name) for name in ("normalize", "body"))
        true = layers[:3](normalize(batch.inputs))  # type: ignore[index]
    assert [name for name in result.private if name.startswith("features/")] == ["features/body.3"]
    assert torch.allclose(result.private["features/body.3"].to(true), true, atol=1e-5)


def test_features_that_equations_leave_open_are_not_told() -> None:
    """72 equations for 196 numbers: they are satisfied by many inputs of the second convolution."""
    task = network(nn.Conv2d(1, 8, 3, 2, 1), nn.Sigmoid(), nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid())
    batch = Batch(photograph(14), torch.tensor([0]))
    result = Cascade()(Federation(Client(task, STEP), [ClientData(batch, batch)]).observe(0)[0])
    assert isinstance(result, Reconstruction)
    (name,) = (name for name in result.private if name.startswith("features/"))
    assert name.startswith("features/body.5")


@pytest.mark.parametrize("changed", [False, True])
def test_an_end_that_was_reached_has_no_note(changed: bool) -> None:
    task = network(nn.Conv2d(1, 12, 3, padding=1), nn.MaxPool2d(2), LEAKY)
    batch = Batch(photograph(14), torch.tensor([0]))
    view, truth = Federation(Client(task, STEP), [ClientData(batch, batch)]).observe(0)
    if changed:
        view = replace(view, update={**view.update, "body.0.weight": -view.update["body.0.weight"]})  # type: ignore[operator]
    result = Cascade()(view)
    assert isinstance(result, Reconstruction)
    assert bool(result.note) == changed
    assert ("body.0" in result.note) == changed
    (row,) = add_self_check_columns(result, score(result, truth))
    assert row.get("note", "") == result.note


def test_of_one_image_a_second_annealing_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    equations, _ = problem(20, 1, channels=8, size=6)
    nothing = LayerSolution.of(equations, evaluate(equations, equations.layer.weight.new_zeros(equations.layer.shape)))
    ways: list[object] = []

    def annealing(equations: Equations, temperatures: Sequence[float], within: float = math.inf) -> LayerSolution:
        ways.append((temperatures, within))
        return nothing

    def without(equations: Equations) -> LayerSolution:
        ways.append("without")
        return _solve_by_cavity(equations)

    monkeypatch.setattr(solver, "_solve_by_annealing", annealing)
    monkeypatch.setattr(solver, "_solve_by_cavity", without)
    monkeypatch.setattr(solver, "_solve_by_propagation", lambda *_: nothing)
    assert solve_layer(equations).is_satisfied
    assert ways == [(FAST, solver.FEW_PIXELS_OFF), "without"]
    ways.clear()
    monkeypatch.setattr(cavity, "MAX_NUMBERS", 0)  # more than it may hold
    assert not solve_layer(equations).is_satisfied
    assert ways == [(FAST, math.inf), "without", (SLOW, math.inf)]


def test_what_leaves_too_much_is_not_settled_further() -> None:
    equations, x = problem(20, 1, channels=8, size=6)
    off = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    first, settled = refine(equations, off, rounds=1), refine(equations, off)
    assert settled.error < 0.5 * first.error  # it takes several systems
    assert torch.equal(refine(equations, off, within=0.5 * first.error).x, first.x)
    assert torch.equal(refine(equations, off, within=2 * first.error).x, settled.x)
