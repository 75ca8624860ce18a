"""Tells whether a tensor inside a network is made of pixels, number by number."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.network.operation_trace import IMAGE, MODEL_ERRORS, Graph, Ref
from fl.seeds import stream

AFFINE_TOLERANCE = 1e-9
"""How far a layer's input may be from one that is affine in the pixels, relative to its size, in double precision."""


def pixel_origin(graph: Graph, ref: Ref) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return offset, slope and pixel of each number of a tensor, or None where it is not made of pixels so."""
    nodes = [number for number in graph.operations_behind(ref) if graph.nodes[number].flows]
    if any(graph.nodes[number].sources & graph.parameters for number in nodes):
        return None  # of what a trained layer returns, or of pixels that a trained scale has changed
    image = graph.image
    count = torch.arange(image.numel(), dtype=image.dtype, device=image.device).view_as(image)

    def run(pixels: Tensor) -> Tensor:
        return graph.replay(nodes, ref, {Ref(IMAGE): pixels}).flatten()

    try:
        offset = run(torch.zeros_like(image))
        slope = run(torch.ones_like(image)) - offset
        moving = slope != 0
        scale = torch.where(moving, slope, torch.ones_like(slope))
        # numbered from 1, so that no pixel is told from a constant by its number alone; scaled into [0, 1]
        index = ((run((count + 1) / image.numel()) - offset) / scale * image.numel() - 1).round().long()
        index = torch.where(moving, index, torch.zeros_like(index))
        if not bool(((index >= 0) & (index < image.numel())).all()):
            return None
        probe = torch.rand(image.shape, generator=stream(0, "pixels"), dtype=torch.float64).to(image)
        expected, seen = offset + slope * probe.flatten()[index], run(probe)
    except MODEL_ERRORS:
        return None
    size = float(seen.abs().max()) + float(offset.abs().max())
    affine = float((seen - expected).abs().max()) <= AFFINE_TOLERANCE * size
    return (offset, slope, index) if affine and bool(moving.any()) else None
