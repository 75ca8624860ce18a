"""Descends through residual blocks whose batch normalization is in training mode, from the top to exact features.

A block is y = relu(bn2(conv2(h)) + shortcut(x)), h = relu(bn1(conv1(x))), with x itself or a strided convolution with
batch normalization for a shortcut. From the block's output and what flows back into it follow h, then x and what flows
back into it (`batch_statistics`; docs/design/batch-statistics.md). The top block is solved by shifts, from nothing.

No attack calls this module so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.graph.batch_statistics import (
    KnownInputs,
    KnownSignal,
    NormalizedConvolution,
    correct_mask,
    set_zeros,
    solve_by_shifts,
    solve_inputs,
)

SHIFT_SHARE = 0.8
"""Share of a convolution's channels up to which shifts find its positions: near one they are ill-conditioned."""

ENOUGH = 1.5
"""Equations for each unknown of a block's input above which its open outputs need not tell any."""


@dataclass(frozen=True)
class NormalizedBlock:
    """The convolutions of a residual block, with all that a server sees of them.

    Attributes:
        first: conv1 with bn1.
        second: conv2 with bn2, of stride 1.
        shortcut: a convolution with batch normalization; None where the shortcut is the identity.
    """

    first: NormalizedConvolution
    second: NormalizedConvolution
    shortcut: NormalizedConvolution | None = None


@dataclass(frozen=True)
class BlockFeatures:
    """Features of one block, images in the same order in all.

    Attributes:
        hidden: h (B, C, h, w), the input of the second convolution.
        inputs: x (B, K, H, W), the block's input; None where the descent ended at `hidden`.
        residual: of the gradients' equations, relative, the larger of both.
        unexplained: channels whose equations were left out in the end, since they do not fit.
    """

    hidden: Tensor
    inputs: Tensor | None
    residual: float
    unexplained: int


@dataclass(frozen=True)
class _Above:
    """What is known above a block: its output as solved, and what flows back into that."""

    output: Tensor
    unmasked: Tensor


def descend_blocks(blocks: Sequence[NormalizedBlock], *, half: bool = True) -> Iterator[BlockFeatures]:
    """Yield features block by block from the top one down, as long as there are blocks.

    Args:
        blocks: from the lowest one that is to be solved to the top one. The top one's output may go through anything:
            pooling and classifier are not looked at.
        half: of the lowest block only `hidden`.
    """
    above: _Above | None = None
    for number, block in enumerate(reversed(blocks)):
        last = half and number == len(blocks) - 1
        solved = _solve_second(block.second, above)
        if solved is None:
            return
        hidden, signal, residual, unexplained = solved
        if last:
            yield BlockFeatures(set_zeros(hidden), None, residual, unexplained)
            return
        features, above = _solve_first(block, hidden, signal, above)
        yield replace(
            features,
            residual=max(residual, features.residual),
            unexplained=unexplained + features.unexplained,
        )


def _solve_second(layer: NormalizedConvolution, above: _Above | None) -> tuple[Tensor, Tensor, float, int] | None:
    """Return h with its rounding, s above the second convolution, the residual and how many channels do not fit."""
    positions = layer.images * layer.output_size[0] * layer.output_size[1]
    by_shifts = positions < SHIFT_SHARE * min(layer.weight.shape[:2])
    if above is None:
        top = solve_by_shifts(layer)
        return None if top is None else (top.unrounded, top.signal, top.misfit, 0)
    mask = correct_mask(above.unmasked, above.output, layer.norm.beta_gradient)
    signal = above.unmasked * mask.mask
    solved = solve_by_shifts(layer, like=signal) if by_shifts else None
    if solved is not None:
        told = above.unmasked.abs() > 1e-3 * above.unmasked.abs().amax((2, 3), keepdim=True)
        seen = solved.signal / torch.where(told, above.unmasked, torch.ones_like(solved.signal)) > 0.5
        return solved.unrounded, above.unmasked * torch.where(told, seen, mask.mask), solved.misfit, 0
    nothing = torch.zeros_like(signal)
    found = solve_inputs([KnownSignal(layer, signal, nothing, nothing > 0, above.unmasked)])
    return found.inputs, found.signals[0], found.residual, found.left_out


def _solve_first(
    block: NormalizedBlock, hidden: Tensor, signal: Tensor, above: _Above | None
) -> tuple[BlockFeatures, _Above]:
    """Return the block's features, and what is above the next block."""
    second, first, shortcut = block.second, block.first, block.shortcut
    values = set_zeros(hidden)
    unmasked = second.signal_through(signal, values)
    mask = correct_mask(unmasked, hidden, first.norm.beta_gradient)
    branches = [
        KnownSignal(first, unmasked * mask.mask, first.norm.unscale(values), values > 0, unmasked),
    ]
    if shortcut is not None:
        known = torch.zeros_like(signal) if above is None else set_zeros(above.output)
        rest = known - second.normalized_outputs(values)
        branches.append(KnownSignal(shortcut, signal, shortcut.norm.unscale(rest), known > 0))
    found = solve_inputs(branches, _entries(block, values, above))
    inputs = set_zeros(found.inputs)
    below = first.signal_through(found.signals[0], inputs)
    below = below + (signal if shortcut is None else shortcut.signal_through(signal, inputs))
    return BlockFeatures(values, inputs, found.residual, found.left_out), _Above(found.inputs, below)


def _entries(block: NormalizedBlock, hidden: Tensor, above: _Above | None) -> KnownInputs | None:
    """Return the entries of the block's input that its open outputs tell, where the equations are too few without.

    Behind the identity, x = y - bn2(conv2(h)) where y > 0.
    """
    unknowns = block.first.images * block.first.size[0] * block.first.size[1]
    plenty = block.first.weight.shape[0] * block.first.weight[0, 0].numel() > ENOUGH * unknowns
    if block.shortcut is not None or above is None or plenty:
        return None
    rest = above.output - block.second.normalized_outputs(hidden)
    known = set_zeros(above.output) > 0
    return KnownInputs(rest.clamp(min=0), known)
