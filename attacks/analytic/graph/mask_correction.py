"""Corrects activation masks by the gradients of the biases below.

A bias's gradient is the sum of what flows back into its channel, d_c = sum over p of m_p s_p, with m the mask of the
activation above it and s what flows back into that activation's output. Numbers that rounding may have put on the wrong
side of zero are few, and one wrong bit at p leaves just s_p of d_c.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.network.operation_trace import Ref

DOUBTFUL = 1e-4
"""Share of an activation's largest output below which rounding may have made its bit wrong."""
UNUSUAL, EXPLAINED = 30.0, 0.05
"""How many times as much as the median channel one with a wrong bit leaves of its bias's gradient, and the share of it
that turning the bit may leave."""
MAX_TURNED = 4
"""Bits of a channel that are turned, at most."""


def correct_mask(known: Propagation, activation: int) -> None:
    """Turn bits of a ReLU's mask that a bias below contradicts.

    Args:
        known: with the activation's output, and what flows back into that.
        activation: its operation, of one image.
    """
    out = Ref(activation)
    try:
        values, signal, mask = known.value(out), known.signal(out), known.mask(activation)
    except UnknownError:
        return
    if values.ndim < 2 or len(values) != 1:
        return
    channels = values.shape[1]
    for sent, slope in _bias_gradients(known, activation):
        flowing, bits = (slope * signal).reshape(channels, -1), mask.reshape(channels, -1).clone()
        left = sent - (bits * flowing).sum(1)
        usual = float(left.abs().median())
        doubtful = values.reshape(channels, -1).abs() < DOUBTFUL * values.abs().max()
        for channel in (left.abs() > UNUSUAL * usual).nonzero()[:, 0].tolist():
            bits[channel] = _turn(bits[channel], flowing[channel], doubtful[channel], left[channel], UNUSUAL * usual)
        mask = bits.reshape(mask.shape)
    known.set_mask(activation, mask)


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


def _turn(bits: Tensor, flowing: Tensor, doubtful: Tensor, left: Tensor, allowed: float) -> Tensor:
    """Return the bits (P,) of a channel with those turned that explain what is left; as they were if none do.

    Args:
        bits: of the channel.
        flowing: what each passes on where it is set.
        doubtful: which may be wrong.
        left: of the bias's gradient, a number.
        allowed: what may be left of it.
    """
    turned, rest, least = bits.clone(), left, abs(float(left))
    for _ in range(MAX_TURNED):
        change = torch.where(turned, -flowing, flowing)
        misses = torch.where(doubtful, (rest - change).abs(), torch.inf)
        place = int(misses.argmin())
        if not float(misses[place]) < abs(float(rest)):
            break
        turned[place] = ~turned[place]
        rest = rest - change[place]
        if abs(float(rest)) <= max(allowed, EXPLAINED * least):
            return turned
    return bits
