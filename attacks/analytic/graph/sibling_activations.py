r"""What a ReLU returned, as other activations of the same numbers tell.

In a dense block every layer takes all that was made before it, through a normalization and a ReLU of its own. So one
number t goes into several activations, each time scaled and shifted: x_j = a_j t + b_j. An open ReLU j tells
t = (x_j - b_j) / a_j; a closed one bounds it, a_j t + b_j <= 0. Of another ReLU i of the same number that tells
what it returned, if t is known, or if a_i t + b_i is not above zero anywhere within the bounds. Its input may still be
unknown then: a signal passes it all the same.

Numbers are followed through operations of which each number is one of those taken, scaled and shifted: normalizations
in evaluation mode, concatenations, slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.network.operation_trace import Ref

MIN_SLOPE = 1e-3
"""Share of the largest slope above which a number tells what it is made of: what is left of less is rounding."""
ROUNDING = 1e-9
"""Share of the largest number by which bounds may be missed."""


@dataclass
class _Bounds:
    """Between which limits the numbers of a tensor lie, flat."""

    lower: Tensor
    upper: Tensor


def find_output_by_siblings(
    network: NetworkGraph, activation: int, solved: Mapping[Ref, Tensor], value: Callable[[Ref], Tensor | None]
) -> Tensor | None:
    """Return what a ReLU returned, or None where others do not tell all of it.

    Args:
        network: the graph.
        activation: of slope zero or more.
        solved: outputs that were solved for.
        value: what a tensor held, or None where that is unknown.
    """
    taken = network.flows_into(activation)[0]
    if not any(Ref(sibling) in solved for sibling in _siblings(network, taken)):
        return None  # what follows takes more time and memory
    entries = network.trace_entries(taken)
    bounds = {}
    for ref in entries.tensors:
        held = value(ref)
        found = (
            _Bounds(held.flatten(), held.flatten()) if held is not None else _bound_by_activations(network, ref, solved)
        )
        if found is None:
            return None
        bounds[ref] = found
    lower = torch.cat([bounds[ref].lower for ref in entries.tensors])[entries.index]
    upper = torch.cat([bounds[ref].upper for ref in entries.tensors])[entries.index]
    ends = torch.stack([_scale(entries.slope, t, entries.offset) for t in (lower, upper)])
    least, most = ends.amin(0), ends.amax(0)
    known = lower == upper
    size = most[known].abs().max() if bool(known.any()) else most.new_zeros(())
    told = known | ((most <= ROUNDING * size) & (network.activations[activation].slope == 0))
    if not bool(told.all()):
        return None
    before = torch.where(known, least, torch.zeros_like(least)).reshape(network.graph.value(taken).shape)
    with torch.no_grad():
        return network.run(activation, {taken: before})


def _scale(slope: Tensor, numbers: Tensor, offset: Tensor) -> Tensor:
    """Return slope * t + offset, where a slope of zero makes nothing of infinite numbers."""
    return torch.where(slope == 0, offset, slope * numbers + offset)


def _bound_by_activations(network: NetworkGraph, ref: Ref, solved: Mapping[Ref, Tensor]) -> _Bounds | None:
    """Return what activations that take a tensor's numbers tell of these; None where none that was solved for does."""
    like = network.graph.value(ref)
    lower = torch.full((like.numel(),), -math.inf, dtype=like.dtype, device=like.device)
    upper = -lower
    total, times = torch.zeros_like(lower), torch.zeros_like(lower)
    for activation in _lead_up(network, ref):
        out = solved.get(Ref(activation))
        if out is None:
            continue
        entries = network.trace_entries(network.flows_into(activation)[0])
        if ref not in entries.tensors:
            continue
        first = sum(network.graph.value(r).numel() for r in entries.tensors[: entries.tensors.index(ref)])
        heard = entries.slope.abs() > MIN_SLOPE * entries.slope.abs().max()
        mine = heard & (entries.index >= first) & (entries.index < first + like.numel())
        place, slope = entries.index[mine] - first, entries.slope[mine]
        y, below = out.flatten()[mine], network.activations[activation].slope
        x = torch.where(y > 0, y, y / below if below > 0 else torch.zeros_like(y))
        t, told = (x - entries.offset[mine]) / slope, (y > 0) | (below > 0)
        total.index_add_(0, place[told], t[told])
        times.index_add_(0, place[told], torch.ones_like(t[told]))
        above, under = ~told & (slope < 0), ~told & (slope > 0)
        lower.scatter_reduce_(0, place[above], t[above], "amax")
        upper.scatter_reduce_(0, place[under], t[under], "amin")
    if not bool(times.any()):
        return None
    mean = total / times.clamp_min(1)
    return _Bounds(torch.where(times > 0, mean, lower), torch.where(times > 0, mean, upper))


def _siblings(network: NetworkGraph, taken: Ref) -> set[int]:
    """Return activations to which affine operations lead from what makes a tensor, by such operations, too."""
    waiting, below = [taken], {taken}
    while waiting:
        ref = waiting.pop()
        if ref.node >= 0 and ref.node not in network.layers and network.is_affine(ref.node):
            more = [flow for flow in network.flows_into(ref.node) if flow not in below]
            below |= set(more)
            waiting += more
    return {activation for ref in below if len(network.consumers[ref]) > 1 for activation in _lead_up(network, ref)}


def _lead_up(network: NetworkGraph, ref: Ref) -> set[int]:
    """Return the activations to which affine operations lead from a tensor."""
    waiting, seen, found = [ref], {ref}, set[int]()
    while waiting:
        for number in network.consumers.get(waiting.pop(), []):
            if number in network.activations:
                found.add(number)
            elif Ref(number) not in seen and number not in network.layers and network.is_affine(number):
                seen.add(Ref(number))
                waiting.append(Ref(number))
    return found
