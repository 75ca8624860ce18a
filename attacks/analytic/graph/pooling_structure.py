"""What stands around a max pooling in a traced network, told by what operations do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.network.operation_trace import Ref

EVEN = 1e-6
"""Share by which a channel's numbers may differ for a map to count as the same at all positions."""


@dataclass(frozen=True)
class ChannelMap:
    """What is made of a tensor by operations that scale and shift each channel: slope x + shift, at `end`."""

    end: Ref
    slope: Tensor
    shift: Tensor


@dataclass(frozen=True)
class PooledActivation:
    """A ReLU and a max pooling, in either order, and what they make, `end`."""

    end: Ref
    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


def sole_user(network: NetworkGraph, ref: Ref) -> int | None:
    """Return the operation that alone takes a tensor and takes nothing else that flows, or None."""
    users = network.consumers.get(ref, [])
    return users[0] if len(users) == 1 and network.flows_into(users[0]) == [ref] else None


def follow_scalings(network: NetworkGraph, number: int) -> ChannelMap | None:
    """Return what scalings above a convolution make of its output without bias, or None if positions differ."""
    if network.graph.nodes[number].operation != "convolution":
        return None
    taken = network.layer_input(number)
    zeros = torch.zeros_like(network.graph.value(taken))
    return compose_scalings(network, Ref(number), network.run(number, {taken: zeros}))


def compose_scalings(network: NetworkGraph, ref: Ref, shift: Tensor | None = None) -> ChannelMap | None:
    """Return what scalings of single numbers make of a tensor (B, C, H, W); None if not the same at all positions.

    Args:
        network: the graph.
        ref: the tensor.
        shift: what stands for zero there, by default zero.
    """
    value = network.graph.value(ref)
    slope, shift = torch.ones_like(value), torch.zeros_like(value) if shift is None else shift
    while (above := network.sole_scaling(ref)) is not None and sole_user(network, ref) == above[0]:
        number, factor = above
        if factor.shape != slope.shape:
            return None
        slope, shift = slope * factor, network.run(number, {ref: shift})
        ref = Ref(number)
    if value.ndim != 4 or not (_is_even(slope) and _is_even(shift)):
        return None
    return ChannelMap(ref, slope[:1, :, :1, :1], shift[:1, :, :1, :1])


def _is_even(values: Tensor) -> bool:
    return bool((values - values[:1, :, :1, :1]).abs().max() <= EVEN * values.abs().max())


def read_pooled_activation(network: NetworkGraph, ref: Ref) -> PooledActivation | None:
    """Return the ReLU and the max pooling that alone take a tensor, one after the other, or None."""
    pooling: int | None = None
    rectified = False
    taken = ref
    for _ in range(2):
        number = sole_user(network, ref)
        if number is None:
            return None
        activation = network.activations.get(number)
        if network.is_max_pooling(number):
            pooling, taken = number, ref
        elif activation is not None and activation.slope == 0:
            rectified = True
        ref = Ref(number)
    return None if pooling is None or not rectified else _read_windows(network, pooling, taken, ref)


def _read_windows(network: NetworkGraph, number: int, taken: Ref, end: Ref) -> PooledActivation | None:
    """Return the windows of a max pooling, or None if it has others than these, as adaptive and dilated ones do."""
    node = network.graph.nodes[number]
    if node.operation != "max_pool2d_with_indices":
        return None
    _, *settings, _ = node.args
    window, padding, dilation = _pair(settings[0]), _pair(settings[2]), _pair(settings[3])
    stride = _pair(settings[1]) if settings[1] else window
    sides, made = network.graph.value(taken).shape[2:], node.outputs[0].shape[2:]
    counts = [(sides[k] + 2 * padding[k] - window[k]) // stride[k] + 1 for k in (0, 1)]
    return PooledActivation(end, window, stride, padding) if dilation == (1, 1) and counts == list(made) else None


def _pair(setting: Any) -> tuple[int, int]:
    return int(setting[0]), int(setting[-1])
