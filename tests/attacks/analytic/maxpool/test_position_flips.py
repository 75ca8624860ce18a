"""Positions changed one by one: all filters at once come to what each comes to by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.analytic.maxpool import refinement
from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.position_flips import PositionFlips
from attacks.analytic.maxpool.refinement import evaluate, resolve_ties, select_largest
from fl.seeds import stream

FILTERS, CELLS, POSITIONS, PATCH = 5, 12, 4, 9


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Positions in question, those passed on at first and in truth, patches and signal."""
    draw = stream(seed, "flips")
    near = torch.rand(FILTERS, CELLS, POSITIONS, generator=draw) < 0.6
    near[0] = False  # nothing is in question
    near &= near.sum(-1, keepdim=True) > 1
    first = near.double().argmax(-1)
    last = POSITIONS - 1 - near.flip(-1).double().argmax(-1)
    true = torch.where(near.any(-1), torch.where(torch.rand(first.shape, generator=draw) < 0.5, first, last), first)
    selection, goal = (torch.nn.functional.one_hot(each, POSITIONS).double() for each in (first, true))
    cells = torch.randn(CELLS, POSITIONS, PATCH, generator=draw, dtype=torch.float64)
    return near, selection, goal, cells, torch.randn(FILTERS, CELLS, generator=draw, dtype=torch.float64)


def one_by_one(near: Tensor, selection: Tensor, cells: Tensor, signal: Tensor, left: Tensor, floor: float) -> Tensor:
    """The same, filter after filter, every possible change tried out."""
    selection, left = selection.clone(), left.clone()
    for o in range(len(selection)):
        while left[o].square().sum() >= floor**2 * PATCH:
            tried = []
            for k, p in near[o].nonzero().tolist():
                after = left[o] + signal[o, k] * (selection[o, k] @ cells[k] - cells[k, p])
                tried.append((float(after.square().sum()), k, p, after))
            best = min(tried, default=None, key=lambda change: change[0])
            if best is None or not best[0] < 0.999 * float(left[o].square().sum()):
                break
            _, k, p, left[o] = best
            selection[o, k] = torch.eye(POSITIONS, dtype=torch.float64)[p]
    return selection


@pytest.mark.parametrize("seed", range(4))
def test_all_filters_at_once_are_changed_as_each_by_itself(seed: int) -> None:
    near, selection, goal, cells, signal = problem(seed)
    left = torch.einsum("ok,okp,kpm->om", signal, goal - selection, cells)
    found = selection.clone()
    flips = PositionFlips.of(near, selection, cells, signal, left, torch.full((FILTERS,), 1e-6).double())
    while (made := flips.apply_best()) is not None:
        flips, filters, at, position = made
        found[filters, at] = torch.eye(POSITIONS, dtype=torch.float64)[position]
    assert torch.equal(found, one_by_one(near, selection, cells, signal, left, 1e-6))
    assert not torch.equal(found, selection)
    assert torch.equal(found[0], selection[0])


def test_nothing_in_question_is_nothing_to_change() -> None:
    near, selection, _, cells, signal = problem(0)
    left, floor = torch.ones(FILTERS, PATCH, dtype=torch.float64), torch.zeros(FILTERS, dtype=torch.float64)
    assert PositionFlips.of(near & False, selection, cells, signal, left, floor).apply_best() is None


def test_filters_are_decided_a_few_at_a_time_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = stream(0, "filters")
    weight, bias = torch.randn(6, 1, 3, 3, generator=draw).double(), torch.zeros(6).double()
    layer = ConvPoolLayer(weight, bias, (1, 8, 8), padding=(1, 1), window=(2, 2))
    x, off = (torch.randn(1, 8, 8, generator=stream(0, what)).double() for what in ("x", "off"))
    signal = torch.randn(6, 16, generator=stream(0, "signal")).double()
    blank = torch.ones_like(signal)
    target = layer.pooled_outputs(x)
    zero = Equations(layer, torch.zeros(6, 9).double(), target, signal, blank.bool(), 1e-9 * blank, blank)
    equations = replace(zero, gradient=-zero.residual(x, select_largest(zero, x)))
    now = evaluate(equations, x + 0.05 * off)
    now = replace(now, output_error=1.0)
    together = resolve_ties(equations, now)
    monkeypatch.setattr(refinement, "MAX_PATCH_NUMBERS", 1)
    assert torch.equal(resolve_ties(equations, now), together)
    assert not torch.equal(together, now.selection)
