"""Pictures of 8 bits and what a small convolution shows of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.refinement import select_largest
from fl.seeds import stream

MEAN, STD = torch.full((3,), 0.5, dtype=torch.float64), torch.full((3,), 0.25, dtype=torch.float64)
LEVELS = PixelLevels.of(MEAN, STD)


def problem(side: int, filters: int) -> tuple[Equations, Tensor]:
    """What a small convolution with 2x2 pooling shows of a picture of 8 bits, and the picture (3, side, side)."""
    draw = stream(0, "lattice", side)
    weight = torch.randn(filters, 3, 3, 3, generator=draw, dtype=torch.float64)
    bias = torch.randn(filters, generator=draw, dtype=torch.float64)
    made = ConvPoolLayer(weight, bias, (3, side, side), window=(2, 2))
    smooth = torch.rand(3, 1, 1, generator=draw) + 0.2 * torch.rand(3, side, side, generator=draw)
    truth = LEVELS.nearest((0.25 + 0.4 * smooth.double() - 0.5) / 0.25)
    target = made.pooled_outputs(truth)
    signal = torch.randn(target.shape, generator=draw, dtype=torch.float64)
    every = torch.ones_like(target)
    empty = torch.zeros(filters, 27, dtype=torch.float64)
    equations = Equations(made, empty, target, signal, every.bool(), 1e-12 * every, every)
    return replace(equations, gradient=-equations.residual(truth, select_largest(equations, truth))), truth
