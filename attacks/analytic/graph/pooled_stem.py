"""Finds pictures through a stem: a convolution, what is affine behind it, a ReLU and a max pooling, in either order.

ImageNet's ResNets begin like that. Features below such a stem say too little by themselves: of nine positions one is
passed on. The gradient of the stem's own weight says more, and both are solved together (`pooled_convolution`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.feature_inversion import GRAY, InvertedImages
from attacks.analytic.graph.pooled_convolution import (
    AnnealingSettings,
    PooledConvolution,
    PooledObservation,
    invert_pooled_convolution,
    measure_misfit,
)
from attacks.analytic.graph.pooling_structure import (
    compose_scalings,
    follow_scalings,
    read_pooled_activation,
    sole_user,
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


def read_pooled_stem(solver: GraphSolver) -> PooledStem | None:
    """Return the stem of a network whose pooled outputs and their signal are known, or None.

    Args:
        solver: after its run.
    """
    network = solver.network
    before = compose_scalings(network, Ref(IMAGE))
    number = None if before is None else sole_user(network, before.end)
    if before is None or number is None or number not in network.layers:
        return None
    layer = network.layers[number]
    if layer.groups != 1 or layer.dilation != (1, 1):
        return None
    after = follow_scalings(network, number)
    pooling = None if after is None else read_pooled_activation(network, after.end)
    if after is None or pooling is None:
        return None
    target = next((solved for solved in solver.solved if solved.ref == pooling.end and solved.scaled), None)
    if target is None:
        return None
    try:
        signal = solver.known.signal(pooling.end)
    except UnknownError:
        return None
    slope = after.slope.reshape(-1, 1, 1, 1)
    convolution = PooledConvolution(
        layer.weight * slope,
        after.shift.flatten(),
        layer.stride,
        layer.padding,
        pooling.window,
        pooling.stride,
        pooling.padding,
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
