"""Numbers of a layer's input that no equation sees are said to be open, and nothing is expected of them below."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.refinement import evaluate
from attacks.analytic.maxpool.solution import LayerSolution
from attacks.analytic.recursive.pooled_conv_equations import OPEN_STD, ActivationOutputs
from attacks.network.curved_activations import ValleyActivation
from attacks.network.layer_chain import Stage
from fl.seeds import stream


def _unseen_corner() -> LayerSolution:
    """The true input of a layer whose filters pass on no position that sees the first corner."""
    draw = stream(0, "open inputs")
    layer = ConvPoolLayer(
        torch.randn(8, 2, 3, 3, generator=draw, dtype=torch.float64), torch.zeros(8).double(), (2, 6, 6), window=(2, 2)
    )
    x = torch.randn(2, 6, 6, generator=draw, dtype=torch.float64)
    outputs = layer.outputs(x)
    known = torch.ones(8, 4, dtype=torch.bool)
    known[:, 0] = outputs[:, 0].argmax(-1) != 0
    signal = torch.randn(8, 4, generator=draw, dtype=torch.float64) * known
    target = torch.where(known, layer.pooled_outputs(x), 1e3)
    tiny = torch.full_like(signal, 1e-7)
    blank = Equations(layer, torch.zeros(8, 18).double(), target, signal, known, tiny, torch.ones_like(signal))
    fit = evaluate(blank, x)
    gradient = layer.weight_gradient(layer.scatter(fit.selection * signal[..., None]), x)
    equations = replace(blank, gradient=gradient)
    return LayerSolution.of(equations, evaluate(equations, x))


def test_what_no_passed_on_position_sees_is_uncertain() -> None:
    off = _unseen_corner().relative_uncertainty()
    unseen = torch.zeros(2, 6, 6, dtype=torch.bool)
    unseen[:, 0, 0] = True
    assert bool((off[unseen] > OPEN_STD).all())
    assert bool((off[~unseen] < OPEN_STD).all())


def _silu() -> ValleyActivation:
    return ValleyActivation(functional.silu, torch.Size([16]), torch.tensor([-1.4, -1.2], dtype=torch.float64))


def test_an_uncertain_output_has_no_target() -> None:
    conv = nn.Conv2d(1, 1, 1).double()
    stage = Stage("below", conv, torch.Size((1, 4, 4)), activation=nn.ReLU())
    above = Stage("above", nn.Conv2d(1, 1, 1).double(), torch.Size((1, 4, 4)))
    values = torch.ones(1, 1, 4, 4).double()
    values[..., 0, 2] = 0
    off = torch.full_like(values, 1e-6)
    off[..., 0, 1] = 0.5
    found = ActivationOutputs.of(stage, above, values, torch.ones_like(values), off)
    assert found.inputs.known[0, :4].tolist() == [True, False, False, True]
    assert float(found.inputs.values[0, 1]) > 100  # no bound either
    assert float(found.inputs.values[0, 2]) == 0
    unsolved = ActivationOutputs.of(stage, above, values, torch.ones_like(values), torch.full_like(off, 0.5))
    assert int(unsolved.inputs.known.sum()) == 15


def test_neither_input_of_an_uncertain_output_is_a_target() -> None:
    stage = Stage("below", nn.Conv2d(1, 1, 1).double(), torch.Size((1, 4, 4)), activation=_silu())
    above = Stage("above", nn.Conv2d(1, 1, 1).double(), torch.Size((1, 4, 4)))
    values = torch.full((1, 1, 4, 4), -0.2).double()
    values[..., 2:, :] = 0.5
    off = torch.full_like(values, 1e-6)
    off[..., 0, 1] = 0.5
    found = ActivationOutputs.of(stage, above, values, torch.ones_like(values), off)
    assert found.inputs.known[0].tolist() == [False] * 8 + [True] * 8
    assert (found.side_factor[0] != 1).tolist() == [True, False] + [True] * 6 + [False] * 8
