"""Descends through residual blocks whose batch normalization is in training mode, from the top to exact features.

A block is y = relu(bn2(conv2(h)) + shortcut(x)), h = relu(bn1(conv1(x))). Its shortcut is x itself, another linear map
without parameters, or a strided convolution with batch normalization. From the block's output and what flows back into
it follow h, then x and what flows back into it (`batch_statistics`; docs/design/batch-statistics.md). The top block is
solved by shifts, from nothing. `residual_blocks` reads blocks off a traced network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.graph.batch_statistics import (
    KnownInputs,
    KnownSignal,
    NormalizedConvolution,
    SolvedConvolution,
    SolvedInputs,
    set_zeros,
    solve_by_shifts,
    solve_inputs,
)
from attacks.analytic.graph.mask_correction import correct_mask
from attacks.analytic.graph.shift_signals import MIN_DIRECTION, UNSHIFTED
from attacks.network.autograd_support import pull_back_or_zeros

SHIFT_SHARE = 0.8
"""Share of a convolution's channels up to which shifts find its positions: near one they are ill-conditioned."""
ENOUGH = 1.5
"""Equations for each unknown of a block's input above which its open outputs need not tell any."""
MIN_RATIO = 1.1
"""Equations there must be for one unknown."""
MAX_RESIDUAL, MAX_TIGHT_RESIDUAL = 1e-3, 5e-5
"""Share of the gradients that a solved input may leave: what leaves more is none. Less where there are fewer equations
than `ENOUGH`: these are ill-conditioned, and a wrong input leaves little, too (one that was off by a quarter left
6e-4, right ones 5e-7 to 4e-5)."""
ASKED_OF_STEPS = " (is it one plain step on so many images?)"
"""What may be wrong where a layer's equations contradict each other."""


class UnsolvedError(Exception):
    """What a layer takes could not be solved for."""


@dataclass(frozen=True)
class LinearShortcut:
    """A shortcut that is linear and has no parameters.

    Attributes:
        apply: from x (B, K, H, W) to what is added to the block's output.
        like: a tensor shaped like x.
    """

    apply: Callable[[Tensor], Tensor]
    like: Tensor

    def pull_back(self, signal: Tensor) -> Tensor:
        """Return what flows back into x from what flows back into the sum."""
        with torch.enable_grad():
            at = torch.zeros_like(self.like).requires_grad_()
            return pull_back_or_zeros([self.apply(at)], at, [signal])


@dataclass(frozen=True)
class NormalizedBlock:
    """The convolutions of a residual block, with all that a server sees of them.

    Attributes:
        first: conv1 with bn1.
        second: conv2 with bn2, of stride 1.
        shortcut: a convolution with batch normalization, or a linear map; None where the shortcut is the identity.
    """

    first: NormalizedConvolution
    second: NormalizedConvolution
    shortcut: NormalizedConvolution | LinearShortcut | None = None


@dataclass(frozen=True)
class BlockFeatures:
    """Features of one block, images in the same order in all, zeros set.

    Attributes:
        hidden: h, the input of the second convolution.
        inputs: x, the block's input; None where the descent ended at `hidden`.
    """

    hidden: SolvedInputs
    inputs: SolvedInputs | None = None


@dataclass(frozen=True)
class Descent:
    """How far a descent came.

    Attributes:
        features: of blocks, the top one first.
        end: why it came no further, in words; empty where there was no further block.
    """

    features: tuple[BlockFeatures, ...]
    end: str = ""


@dataclass(frozen=True)
class _Above:
    """What is known above a block: its output as solved, and what flows back into that."""

    output: Tensor
    unmasked: Tensor


def descend_blocks(blocks: Sequence[NormalizedBlock]) -> Descent:
    """Return the features of blocks, from the top one down as far as their equations do.

    Args:
        blocks: the top one first, each fed by the next. The top one's output may go through
            anything: pooling and classifier are not looked at.
    """
    above: _Above | None = None
    found: list[BlockFeatures] = []
    for block in blocks:
        try:
            hidden, signal = _solve_second(block.second, above)
        except UnsolvedError as error:
            return Descent(tuple(found), str(error))
        try:
            inputs, above = _solve_first(block, hidden.inputs, signal, above)
        except UnsolvedError as error:
            return Descent((*found, BlockFeatures(_with_zeros(hidden))), str(error))
        found.append(BlockFeatures(_with_zeros(hidden), _with_zeros(inputs)))
    return Descent(tuple(found))


def _with_zeros(solved: SolvedInputs) -> SolvedInputs:
    return replace(solved, inputs=set_zeros(solved.inputs))


def _solve_second(layer: NormalizedConvolution, above: _Above | None) -> tuple[SolvedInputs, Tensor]:
    """Return h with its rounding, and s above the second convolution.

    Raises:
        UnsolvedError: its equations do not give it.
    """
    if above is None:
        top = _solve_top(layer)
        return SolvedInputs(top.unrounded, (), top.misfit, 0, 0, 0), top.signal
    mask = correct_mask(above.unmasked, above.output, layer.norm.beta_gradient)
    signal = above.unmasked * mask.mask
    by_shifts = layer.equations.keeps_size and layer.norm.count < SHIFT_SHARE * min(layer.weight.shape[:2])
    solved = solve_by_shifts(layer, like=signal) if by_shifts else None
    if solved is not None and solved.misfit <= MAX_RESIDUAL:
        told = above.unmasked.abs() > 1e-3 * above.unmasked.abs().amax((2, 3), keepdim=True)
        seen = solved.signal / torch.where(told, above.unmasked, torch.ones_like(solved.signal)) > 0.5
        signal = above.unmasked * torch.where(told, seen, mask.mask)
        return SolvedInputs(solved.unrounded, (), solved.misfit, 0, 0, 0), signal
    nothing = torch.zeros_like(signal)
    found = _solve([KnownSignal(layer, signal, nothing, nothing > 0, above.unmasked)])
    return found, found.signals[0]


def _solve_top(layer: NormalizedConvolution) -> SolvedConvolution:
    """Return all that passes through the top block's second convolution, by shifts.

    Raises:
        UnsolvedError: it has too few channels, or its images are not told apart.
    """
    positions, (channels, inputs) = layer.norm.count, layer.weight.shape[:2]
    if not layer.equations.keeps_size:
        raise UnsolvedError(f"{layer.name}: {UNSHIFTED}")
    if positions > inputs or positions - 1 > channels:
        counts = f"{min(channels + 1, inputs)} directions for {positions} positions of {layer.images} images"
        raise UnsolvedError(f"{layer.name}: too few channels to tell positions apart: {counts}")
    top = solve_by_shifts(layer)
    if top is not None and top.misfit <= MAX_RESIDUAL:
        return top
    if reason := _explain_few_directions(layer, positions):
        raise UnsolvedError(f"{layer.name}: {reason}")
    if top is None:
        raise UnsolvedError(f"{layer.name}: the zeros of its input do not tell {layer.images} images apart")
    raise UnsolvedError(f"{layer.name}: {top.misfit:.1e} of the batch's means is left{ASKED_OF_STEPS}")


def _explain_few_directions(layer: NormalizedConvolution, positions: int) -> str:
    """Say what a convolution's equations by shifts lack; empty where they lack nothing."""
    if not bool(layer.gradient.any()):
        return "its gradient is zero"
    if not bool(layer.norm.mean.any()):
        return "the batch's means are zero: are the buffers those that came back after the step?"
    channels, inputs = layer.weight.shape[:2]
    signals = torch.linalg.svdvals(layer.gradient.reshape(channels, -1))
    if positions > 1 and not signals[positions - 2] > MIN_DIRECTION * signals[0]:
        return f"what flows back has fewer than {positions - 1} independent directions"
    values = torch.linalg.svdvals(layer.gradient.transpose(0, 1).reshape(inputs, -1))
    if not values[positions - 1] > MIN_DIRECTION * values[0]:
        return f"what it takes has fewer than {positions} independent directions"
    return ""


def _solve_first(
    block: NormalizedBlock, hidden: Tensor, signal: Tensor, above: _Above | None
) -> tuple[SolvedInputs, _Above]:
    """Return the block's input with its rounding, and what is above the next block.

    Raises:
        UnsolvedError: its equations do not give it.
    """
    second, first, shortcut = block.second, block.first, block.shortcut
    values = set_zeros(hidden)
    unmasked = second.signal_through(signal, values)
    mask = correct_mask(unmasked, hidden, first.norm.beta_gradient)
    branches = [
        KnownSignal(first, unmasked * mask.mask, first.norm.unscale(values), values > 0, unmasked),
    ]
    if isinstance(shortcut, NormalizedConvolution):
        known = torch.zeros_like(signal) if above is None else set_zeros(above.output)
        rest = known - second.normalized_outputs(values)
        branches.append(KnownSignal(shortcut, signal, shortcut.norm.unscale(rest), known > 0))
    found = _solve(branches, _entries(block, values, above))
    inputs = set_zeros(found.inputs)
    below = first.signal_through(found.signals[0], inputs)
    if shortcut is None:
        below = below + signal
    elif isinstance(shortcut, LinearShortcut):
        below = below + shortcut.pull_back(signal)
    else:
        below = below + shortcut.signal_through(signal, inputs)
    return found, _Above(found.inputs, below)


def _solve(branches: Sequence[KnownSignal], entries: KnownInputs | None = None) -> SolvedInputs:
    """Return the common input of convolutions whose signals are known.

    Raises:
        UnsolvedError: they have too few equations, or these leave it open or contradict each other.
    """
    layers = [branch.layer for branch in branches]
    names = " and ".join(layer.name for layer in layers)
    if short := _count_shortfall(layers, entries, MIN_RATIO):
        raise UnsolvedError(f"{names}: {short}")
    most = MAX_TIGHT_RESIDUAL if _count_shortfall(layers, entries, ENOUGH) else MAX_RESIDUAL
    try:
        found = solve_inputs(branches, entries)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise UnsolvedError(f"{names}: its equations leave inputs open") from None
    if not found.residual <= most:
        raise UnsolvedError(
            f"{names}: no input explains its gradient: {found.residual:.1e} of it is left{ASKED_OF_STEPS}"
        )
    return found


def _count_shortfall(layers: Sequence[NormalizedConvolution], entries: KnownInputs | None, ratio: float) -> str:
    """Say how few equations there are for the numbers of an input channel; empty where they are `ratio` times as many.

    With a stride rows and columns are seen by different taps of the kernel, so that each kind is counted by itself.
    """
    first = layers[0]
    for row in range(first.stride):
        for column in range(first.stride):
            places = row, column
            pixels = [len(range(place, size, first.stride)) for place, size in zip(places, first.size, strict=True)]
            unknowns = first.images * pixels[0] * pixels[1]
            if entries is not None:
                unknowns = int((~entries.known).sum((0, 2, 3)).max())
            equations = sum(len(layer.weight) * _count_taps(layer, places) for layer in layers)
            if equations < ratio * unknowns:
                part = "" if first.stride == 1 else f" in one of {first.stride} rows and columns"
                return f"{equations} equations for {unknowns} numbers of each input channel{part}"
    return ""


def _count_taps(layer: NormalizedConvolution, places: tuple[int, int]) -> int:
    """Return how many taps of the kernel see pixels in rows and columns that have these rests by the stride."""
    taps = [
        sum((tap - padding - place) % layer.stride == 0 for tap in range(size))
        for size, padding, place in zip(layer.weight.shape[2:], layer.padding, places, strict=True)
    ]
    return taps[0] * taps[1]


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
