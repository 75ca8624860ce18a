"""Finds pictures through a stem: a convolution, what is affine behind it, a ReLU and a max pooling, in either order.

ImageNet's ResNets begin like that. Features below such a stem say too little by themselves: of nine positions one is
passed on. The gradient of the stem's own weight says more, and both are solved together (`pooled_convolution`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attacks.analytic.graph.feature_inversion import GRAY, InvertedImages
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.pooled_convolution import (
    AnnealingSettings,
    PooledConvolution,
    PooledObservation,
    invert_pooled_convolution,
    measure_misfit,
)
from attacks.analytic.graph.propagation import UnknownError
from attacks.analytic.graph.solver import GraphSolver, SolvedTensor
from attacks.network.operation_trace import IMAGE, Ref

MIN_NOISE = 1e-6
"""Relative error of pooled outputs, at least, by sums in float32."""
MAX_MISFIT = 2e-5
"""Share of pooled outputs and gradient that a picture of whole levels may leave. A level of one pixel makes several
times that, even at 224 pixels."""
ROUGHNESS, COLOR_ROUGHNESS = 0.025, 0.0075
"""Scale of differences of neighboring pixels in what all channels share, and in what sets them apart."""
EVEN = 1e-6
"""Share by which a channel's numbers may differ for a map to count as the same at all positions."""


@dataclass(frozen=True)
class PooledStem:
    """A stem with what is known of it.

    Attributes:
        layer: from pixels to pooled outputs; its input are the pixels times `scale`, plus `shift`.
        known: what was solved for.
        scale: (1, I, 1, 1).
        shift: likewise.
        target: the pooled outputs as they were solved for.
        name: of the convolution's weight.
    """

    layer: PooledConvolution
    known: PooledObservation
    scale: Tensor
    shift: Tensor
    target: SolvedTensor
    name: str


@dataclass(frozen=True)
class _ChannelMap:
    """What is made of a tensor by operations that scale and shift each channel: slope x + shift, at `end`."""

    end: Ref
    slope: Tensor
    shift: Tensor


def read_pooled_stem(solver: GraphSolver) -> PooledStem | None:
    """Return the stem of a network whose pooled outputs and their signal are known, or None.

    Args:
        solver: after its run.
    """
    network = solver.network
    before = _follow_scalings(network, Ref(IMAGE))
    number = None if before is None else _sole_user(network, before.end)
    if before is None or number is None or number not in network.layers:
        return None
    layer = network.layers[number]
    if layer.groups != 1 or layer.dilation != (1, 1) or network.graph.nodes[number].operation != "convolution":
        return None
    zeros = torch.zeros_like(network.graph.value(before.end))
    after = _follow_scalings(network, Ref(number), network.run(number, {before.end: zeros}))
    pooling = None if after is None else _read_pooling(network, after.end)
    if after is None or pooling is None:
        return None
    made, (window, stride, padding) = pooling
    target = next((solved for solved in solver.solved if solved.ref == made and solved.scaled), None)
    if target is None:
        return None
    try:
        signal = solver.known.signal(made)
    except UnknownError:
        return None
    slope = after.slope.reshape(-1, 1, 1, 1)
    convolution = PooledConvolution(
        layer.weight * slope, after.shift.flatten(), layer.stride, layer.padding, window, stride, padding
    )
    noise = max(target.misfit, MIN_NOISE)
    known = PooledObservation(target.values, signal, layer.gradient / slope, noise)
    return PooledStem(convolution, known, before.slope, before.shift, target, layer.name)


def invert_pooled_stem(stem: PooledStem, shape: Sequence[int]) -> InvertedImages:
    """Find the pictures of a stem.

    They count as converged where they come out at whole levels of 8 bits and these explain all equations.

    Args:
        stem: with what is known of it.
        shape: (B, I, H, W) of the pictures, with pixels in [0, 1].
    """
    usual = float(stem.scale.abs().mean())
    settings = AnnealingSettings(ROUGHNESS * usual, COLOR_ROUGHNESS * usual)
    start = torch.full(tuple(shape), GRAY, dtype=stem.scale.dtype, device=stem.scale.device)
    found = invert_pooled_convolution(stem.layer, stem.known, stem.scale * start + stem.shift, settings)
    images = (found - stem.shift) / stem.scale
    levels = (255 * images).round().clamp(0, 255) / 255
    missed = measure_misfit(stem.layer, stem.known, found)
    missed_by_levels = measure_misfit(stem.layer, stem.known, stem.scale * levels + stem.shift)
    explained = missed_by_levels <= MAX_MISFIT
    if explained:
        images, missed = levels, missed_by_levels
    each = images.new_ones(len(images))
    steps = torch.full((len(images),), settings.steps, device=images.device)
    return InvertedImages(images, missed * each, (each > 0) & explained, steps, settings.steps)


def _sole_user(network: NetworkGraph, ref: Ref) -> int | None:
    users = network.consumers.get(ref, [])
    return users[0] if len(users) == 1 and network.flows_into(users[0]) == [ref] else None


def _follow_scalings(network: NetworkGraph, ref: Ref, shift: Tensor | None = None) -> _ChannelMap | None:
    """Return what scalings of single numbers make of a tensor (B, C, H, W); None if not the same at all positions.

    Args:
        network: the graph.
        ref: the tensor.
        shift: what stands for zero there, by default zero.
    """
    value = network.graph.value(ref)
    slope, shift = torch.ones_like(value), torch.zeros_like(value) if shift is None else shift
    while (above := network.sole_scaling(ref)) is not None and _sole_user(network, ref) == above[0]:
        number, factor = above
        if factor.shape != slope.shape:
            return None
        slope, shift = slope * factor, network.run(number, {ref: shift})
        ref = Ref(number)
    if value.ndim != 4 or not (_is_even(slope) and _is_even(shift)):
        return None
    return _ChannelMap(ref, slope[:1, :, :1, :1], shift[:1, :, :1, :1])


def _is_even(values: Tensor) -> bool:
    return bool((values - values[:1, :, :1, :1]).abs().max() <= EVEN * values.abs().max())


def _read_pooling(network: NetworkGraph, ref: Ref) -> tuple[Ref, tuple[tuple[int, int], ...]] | None:
    """Return what a ReLU and a max pooling make of a tensor, in either order, and window, stride and padding."""
    found: tuple[tuple[int, int], ...] | None = None
    rectified = False
    for _ in range(2):
        number = _sole_user(network, ref)
        if number is None:
            return None
        activation = network.activations.get(number)
        if network.is_max_pooling(number):
            found = _pooling_geometry(network, number, ref)
        elif activation is not None and activation.slope == 0:
            rectified = True
        ref = Ref(number)
    return (ref, found) if found is not None and rectified else None


def _pooling_geometry(network: NetworkGraph, number: int, taken: Ref) -> tuple[tuple[int, int], ...] | None:
    """Return window, stride and padding of a max pooling, or None if it has others, as adaptive and dilated ones."""
    node = network.graph.nodes[number]
    if node.operation != "max_pool2d_with_indices":
        return None
    _, window, stride, padding, dilation, _ = node.args
    window, padding, dilation = _pair(window), _pair(padding), _pair(dilation)
    stride = _pair(stride) if stride else window
    sides, made = network.graph.value(taken).shape[2:], node.outputs[0].shape[2:]
    counts = [(sides[k] + 2 * padding[k] - window[k]) // stride[k] + 1 for k in (0, 1)]
    return (window, stride, padding) if dilation == (1, 1) and counts == list(made) else None


def _pair(setting: Any) -> tuple[int, int]:
    return int(setting[0]), int(setting[-1])
