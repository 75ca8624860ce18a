"""Corrects activation masks by the gradients of the biases below.

A bias's gradient is the sum of what flows back into its channel, d_c = sum over p of m_p s_p, with m the mask of the
activation above it and s what flows back into that activation's output. Numbers that rounding may have put on the wrong
side of zero are few, and one wrong bit at p leaves just s_p of d_c.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.network.operation_trace import Ref

ZERO_MARGIN = 5.0
"""How many times the most negative entry a solved input must be to count as above zero: a ReLU's output has none."""
MASK_MARGIN = 20.0
"""How many times its typical error beta's gradient must be missed by before bits of a mask are changed."""


def correct_by_biases(known: Propagation, activation: int, values: Tensor) -> None:
    """Correct a ReLU's mask by the first bias below that is added to what it takes, if there is one.

    Args:
        known: with what flows back into the activation's output.
        activation: its operation.
        values: the activation's output (B, C, h, w) as it was solved, with its rounding.
    """
    try:
        signal = known.signal(Ref(activation))
    except UnknownError:
        return
    shape = signal.shape
    channels = (len(signal), shape[1], -1, 1)
    for sent, slope in _bias_gradients(known, activation):
        flowing = (slope * signal).reshape(channels)
        known.set_mask(activation, correct_mask(flowing, values.reshape(channels), sent).mask.reshape(shape))
        return


def _bias_gradients(known: Propagation, activation: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sent gradients (C,) of biases that are added to what an activation takes, with the slope in between."""
    network = known.network
    channels = network.graph.value(Ref(activation)).shape[1]
    for number in network.used:
        gate = network.gate(Ref(number)) if number < activation else None
        if gate is None or gate[0] != activation:
            continue
        for _, name in network.bias_like_parameters(number):
            if network.gradient[name].numel() == channels and name not in network.sent:
                yield network.gradient[name].flatten(), gate[1]


@dataclass(frozen=True)
class CorrectedMask:
    """The mask of an activation, checked by beta's gradient.

    Attributes:
        mask: boolean (B, C, h, w).
        changed: how many bits were changed.
        open_channels: channels (indices) whose sum still misses beta's gradient.
    """

    mask: Tensor
    changed: int
    open_channels: tuple[int, ...]


def correct_mask(unmasked: Tensor, values: Tensor, beta_gradient: Tensor) -> CorrectedMask:
    """Return which positions pass a signal on: those with values above zero, near ties decided by beta's gradient.

    Of every channel the signal that is passed on sums to beta's gradient. Where it misses that, one or two bits of
    values near zero are changed.

    Args:
        unmasked: what flows back into the activation (B, C, h, w).
        values: the activation's output as it was solved, with its rounding.
        beta_gradient: (C,), of the normalization below the activation.
    """
    signal, value = (t.transpose(0, 1).flatten(1) for t in (unmasked, values))
    rounding = ZERO_MARGIN * float(values.min().abs())
    mask = value > rounding
    miss = (signal * mask).sum(1) - beta_gradient
    tolerance = MASK_MARGIN * float(miss.abs().median()) + 1e-13 * float(signal.abs().max())
    near = value.abs() < max(4 * rounding, 1e-4 * float(value.max()))
    changed, left = 0, []
    for c in torch.nonzero(miss.abs() > tolerance)[:, 0].tolist():
        at = torch.nonzero(near[c])[:, 0]
        flips = _matching_flips(at, torch.where(mask[c], -signal[c], signal[c]), value[c], float(miss[c]), tolerance)
        mask[c, flips] = ~mask[c, flips]
        changed += len(flips)
        if not flips:
            left.append(c)
    shape = unmasked.transpose(0, 1).shape
    return CorrectedMask(mask.reshape(shape).transpose(0, 1), changed, tuple(left))


def _matching_flips(at: Tensor, change: Tensor, value: Tensor, miss: float, tolerance: float) -> list[int]:
    """Return one or two of the positions `at` whose change of the sum makes up for what it misses."""
    if not len(at):
        return []
    fits = at[(miss + change[at]).abs() < tolerance]
    if len(fits):
        return [int(fits[value[fits].argmax()])]
    at = at[value[at].argsort(descending=True)[:60]]
    rest = (miss + change[at][:, None] + change[at]).abs()
    rest.fill_diagonal_(float("inf"))
    best = int(rest.argmin())
    if not float(rest.flatten()[best]) < tolerance:
        return []
    return [int(at[best // len(at)]), int(at[best % len(at)])]
