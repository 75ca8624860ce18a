"""Finds what flows back into a convolution below a ReLU and a max pooling.

Known are the pooled outputs, their signal and the convolution's gradient.

Which position each window passed on is found by annealing (`maxpool.annealing`), together with the convolution's
input. In a deep layer that may end with a tenth of the positions wrong: an input fitted to a filter's gradient bears
out whatever positions were supposed for it. Then the positions of each filter are decided by the input that all other
filters tell (`maxpool.cavity`), which takes five times as long. The input is solved for anew afterwards, by the
equations of every other layer: a wrong position spoils those of its own output channel alone.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor

from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.layer_solves import KnownSignal, count_shortfall, solve_input
from attacks.analytic.graph.pooling_structure import PooledActivation, follow_scalings, read_pooled_activation
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.analytic.maxpool.annealing import anneal, cooling_schedule
from attacks.analytic.maxpool.cavity import cavity_states, fits_in_memory
from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.refinement import evaluate, select_largest

COOLING = cooling_schedule(30.0, 0.65)
"""Temperatures of the annealing."""
NEAR = 1e-3
"""Share of outputs and gradient that may be left where the annealing ends early."""
DAMPING = 0.7
"""Share of the new probabilities that enters a round of the cavity: one image's features allow larger steps than a
batch's."""
CAVITY_ROUNDS = 40
"""Rounds of the cavity at most; VGG-16 took 10 to 14."""
CAVITY_SECONDS = 90.0
"""CPU seconds after which no further round begins."""
CAVITY_NEAR = 2e-2
"""Share of the gradient that may be left where the cavity ends: the few wrong positions spoil few channels."""
ROUNDS = 6
"""Times that positions and input are found from each other afterwards."""
GRADIENT_NOISE = 1e-6
"""Relative error of gradients, by sums in float32."""
TARGET_NOISE = 1e-6
"""Noise of pooled outputs, relative to the largest."""


def find_pooled_signal(known: Propagation, number: int) -> Tensor | None:
    """Return what flows back into a convolution (1, C, h, w), or None where that cannot be found.

    Nothing proves it: the layer's equations must hold with it.

    Args:
        known: values and signals, of one image; pooled outputs and their signal among them.
        number: of the convolution.
    """
    found = _read_pooled_layer(known, number)
    if found is None:
        return None
    layer, slope, signal, equations = found
    x = _search_input(equations)
    positions: Tensor | None = None
    back = signal
    for _ in range(ROUNDS):
        before, positions = positions, select_largest(equations, x)
        if before is not None and torch.equal(before, positions):
            break
        passed = equations.layer.scatter(positions * equations.signal[..., None])
        back = (passed * slope).reshape(layer.output_shape)
        solved = solve_input([KnownSignal(layer, back)])
        if solved is None:
            return None
        x = solved.values[0]
    return back


def _read_pooled_layer(known: Propagation, number: int) -> tuple[LayerEquations, Tensor, Tensor, Equations] | None:
    """Return a convolution, its outputs' slopes (C, 1) up to the pooling, the pooled signal, and all its equations.

    None where it is no single convolution below windows side by side, or the pooled outputs are not known.
    """
    network = known.network
    layer = network.layers[number]
    after = follow_scalings(network, number)
    pooling = None if after is None else read_pooled_activation(network, after.end)
    if after is None or pooling is None or layer.input_shape[0] != 1 or layer.groups != 1 or not _is_tiled(pooling):
        return None
    if (
        layer.sent is not None
        or layer.dilation != (1, 1)
        or count_shortfall([KnownSignal(layer, torch.zeros(layer.output_shape))])
    ):
        return None
    try:
        pooled, signal = known.value(pooling.end), known.signal(pooling.end)
    except UnknownError:
        return None
    slope = after.slope.reshape(-1, 1, 1, 1)
    shape = (layer.input_shape[1], layer.input_shape[2], layer.input_shape[3])
    convolution = ConvPoolLayer(
        layer.weight * slope, after.shift.flatten(), shape, layer.padding, layer.stride, pooling.window
    )
    target = pooled[0].flatten(1)
    is_open = target > 0
    equations = Equations(
        convolution,
        (layer.gradient / slope).flatten(1),
        target,
        signal[0].flatten(1) * is_open,
        is_open,
        torch.full_like(target, TARGET_NOISE * float(target.max())),
        torch.ones_like(target),
        gradient_noise=GRADIENT_NOISE,
    )
    return layer, after.slope.reshape(-1, 1), signal, equations


def _is_tiled(pooling: PooledActivation) -> bool:
    """Return whether windows neither overlap nor reach beyond the rim."""
    return pooling.window == pooling.stride and pooling.padding == (0, 0)


def _search_input(equations: Equations) -> Tensor:
    """Return an input of the convolution (I, h, w) that leaves little of the equations, or the best there is."""
    x, _ = anneal(equations, COOLING, partial(_is_near, equations))
    best = evaluate(equations, x)
    if best.gradient_error < CAVITY_NEAR or not fits_in_memory(equations):
        return x
    began = time.process_time()
    for state in cavity_states(equations, CAVITY_ROUNDS, DAMPING):
        fit = evaluate(equations, state.x)
        best = fit if fit.error < best.error else best
        if best.gradient_error < CAVITY_NEAR or time.process_time() - began > CAVITY_SECONDS:
            break
    return best.x


def _is_near(equations: Equations, x: Tensor) -> bool:
    fit = evaluate(equations, x)
    return fit.gradient_error < NEAR and fit.output_error < NEAR
