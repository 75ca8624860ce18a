"""A traced network as a graph of weighted layers, affine maps and activations, for batches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.network.autograd_support import pull_back_or_zeros
from attacks.network.curved_activations import MonotoneActivation
from attacks.network.operation_recognition import (
    has_trained_weight,
    parameters_behind,
    product_operands,
    recognize,
    replay_segment,
)
from attacks.network.operation_trace import MODEL_ERRORS, Graph, Ref, Segment
from fl.seeds import stream

AFFINE_TOLERANCE = 1e-9
"""Share of a map's own size by which sums of probes may miss."""


@dataclass(frozen=True)
class Activation:
    """A function of single numbers that is linear on either side of zero, with slope 1 above.

    Attributes:
        slope: below zero; less than 1.
    """

    slope: float


@dataclass(frozen=True)
class SingleEntries:
    """A tensor made of single numbers t of other tensors, scaled and shifted: slope * t[index] + offset.

    Attributes:
        tensors: the others; t has all their numbers, one after the other.
        index: (N,), into t.
        slope: (N,).
        offset: (N,).
    """

    tensors: tuple[Ref, ...]
    index: Tensor
    slope: Tensor
    offset: Tensor


@dataclass
class NetworkGraph:
    """What a network computes from a batch, by operations of one trace.

    Attributes:
        graph: traced at the batch's size.
        single: the same traced with one image, from which activations are recognized.
        gradient: that was sent, by parameter, dense, in float64.
        sent: bool, by parameter, which entries of its gradient are known; of parameters without a gap none.
    """

    graph: Graph
    single: Graph
    gradient: Mapping[str, Tensor]
    sent: Mapping[str, Tensor] = field(default_factory=dict)
    _affine: dict[int, bool] = field(default_factory=dict)
    _scalings: dict[Ref, tuple[int, Tensor] | None] = field(default_factory=dict)
    _single_entries: dict[Ref, SingleEntries | None] = field(default_factory=dict)
    _origins: dict[Ref, SingleEntries] = field(default_factory=dict)

    @cached_property
    def used(self) -> list[int]:
        """The operations on the way from the image to what is returned, in order."""
        return self.graph.used_operations()

    @cached_property
    def consumers(self) -> dict[Ref, list[int]]:
        """The used operations that take a tensor, by tensor."""
        found: dict[Ref, list[int]] = {}
        for number in self.used:
            for ref in dict.fromkeys(self.flows_into(number)):
                found.setdefault(ref, []).append(number)
        return found

    def flows_into(self, number: int) -> list[Ref]:
        """Return the tensors that an operation takes and that depend on the image."""
        return [ref for ref in self.graph.nodes[number].refs if self.graph.depends_on_image(ref)]

    @cached_property
    def layers(self) -> dict[int, LayerEquations]:
        """Weighted layers whose gradient was sent, by operation, in order; each weight used once."""
        found: dict[int, LayerEquations] = {}
        names: list[str] = []
        for number in self.used:
            layer = self._read_layer(number)
            if layer is not None:
                found[number] = layer
                names.append(layer.name)
        return {number: layer for number, layer in found.items() if names.count(layer.name) == 1}

    @cached_property
    def activations(self) -> dict[int, Activation]:
        """Activations that are linear on either side of zero, by operation."""
        return {number: act for number, act in self._all_activations.items() if isinstance(act, Activation)}

    @cached_property
    def curved_activations(self) -> dict[int, MonotoneActivation]:
        """Other activations that never fall, by operation, such as ELU or ReLU6."""
        return {number: act for number, act in self._all_activations.items() if isinstance(act, MonotoneActivation)}

    @cached_property
    def _all_activations(self) -> dict[int, Activation | MonotoneActivation]:
        found: dict[int, Activation | MonotoneActivation] = {}
        known: dict[Hashable, Activation] = {}  # a network mostly has one many times
        for number in self.used:
            flows = self.flows_into(number)
            if number in self.layers or len(flows) != 1:
                continue
            function = self.single.nodes[number].function_of_one
            activation = known.get(function) or self._find_activation(number, flows[0])
            if activation is not None:
                found[number] = activation
            if isinstance(activation, Activation) and function is not None:
                known[function] = activation
        return found

    def _find_activation(self, number: int, taken: Ref) -> Activation | MonotoneActivation | None:
        return None if self.is_affine(number) else self._read_activation(number, taken)

    def is_affine(self, number: int) -> bool:
        """Return whether an operation is affine in all that it takes of the image's flow, taken together."""
        if number not in self._affine:
            self._affine[number] = self._test_affine(number)
        return self._affine[number]

    def is_max_pooling(self, number: int) -> bool:
        """Return whether an operation passes on the largest numbers of windows."""
        return self.graph.nodes[number].operation in {"max_pool2d_with_indices", "adaptive_max_pool2d"}

    def run(self, number: int, values: Mapping[Ref, Tensor], output: int = 0) -> Tensor:
        """Return what an operation makes of other values."""
        return self.graph.replay([number], Ref(number, output), values)

    def pull_back(self, number: int, signal: Tensor, to: Ref, values: Mapping[Ref, Tensor] | None = None) -> Tensor:
        """Return what flows back through an operation into one of the tensors it takes, or one of its parameters.

        Args:
            number: of the operation; affine, or else `values` are of all that it takes of the image's flow.
            signal: at its output.
            to: the tensor.
            values: of what it takes; by default those of the trace.
        """
        given = {ref: self.graph.value(ref) for ref in self.flows_into(number)} | dict(values or {})
        start = given[to] if to in given else self.graph.value(to)
        if not start.is_floating_point():  # a mask, or indices
            return torch.zeros_like(start, dtype=signal.dtype)
        with torch.enable_grad():
            at = start.detach().clone().requires_grad_()
            out = self.run(number, {**given, to: at})
            # batch normalization's backward of PyTorch 2.15 is wrong for signals in another memory layout
            return pull_back_or_zeros([out], at, [signal.reshape(out.shape).contiguous()])

    def gate(self, ref: Ref) -> tuple[int, Tensor] | None:
        """Return the only activation that takes a tensor, by way of scalings and sums, and the slope of these."""
        slope = torch.ones_like(self.graph.value(ref))
        while True:
            users = self.consumers.get(ref, [])
            if len(users) != 1:
                return None
            if users[0] in self.activations:
                return users[0], slope
            above = self.sole_scaling(ref)
            if above is None:
                return None
            ref, slope = Ref(above[0]), slope * above[1]

    def is_rectified(self, ref: Ref) -> bool:
        """Return whether a ReLU made a tensor."""
        activation = self.activations.get(ref.node)
        return activation is not None and activation.slope == 0

    def sole_scaling(self, ref: Ref) -> tuple[int, Tensor] | None:
        """Return the operation that alone takes a tensor, and its slope, where it scales and shifts every number."""
        if ref not in self._scalings:
            self._scalings[ref] = self._find_scaling(ref)
        return self._scalings[ref]

    def _find_scaling(self, ref: Ref) -> tuple[int, Tensor] | None:
        users = self.consumers.get(ref, [])
        if len(users) != 1 or users[0] in self.layers or not self.is_affine(users[0]):
            return None
        number = users[0]
        like, out = self.graph.value(ref), self.graph.value(Ref(number))
        if like.shape != out.shape or self.flows_into(number).count(ref) != 1:
            return None
        slope = self.pull_back(number, torch.ones_like(out), ref)
        draw = _noise(out, 3)
        if not torch.allclose(self.pull_back(number, draw, ref), slope * draw, rtol=1e-9, atol=1e-12):
            return None
        return (number, slope) if bool((slope != 0).all()) else None

    def single_entries(self, ref: Ref) -> SingleEntries | None:
        """Return from which numbers an operation makes each number; None if it sums several, or is a weighted layer.

        Normalizations in evaluation mode, concatenations and slices are such operations.
        """
        if ref not in self._single_entries:
            single = ref.node >= 0 and ref.node not in self.layers and self.is_affine(ref.node)
            self._single_entries[ref] = self._find_single_entries(ref) if single else None
        return self._single_entries[ref]

    def trace_entries(self, ref: Ref) -> SingleEntries:
        """Return from which numbers a tensor is made, down to where operations act on more than single numbers."""
        if ref not in self._origins:
            own = self.single_entries(ref)
            if own is None:
                return _identity(ref, self.graph.value(ref))
            self._origins[ref] = self._trace_further(own)
        return self._origins[ref]

    def _trace_further(self, own: SingleEntries) -> SingleEntries:
        parts = [self.trace_entries(taken) for taken in own.tensors]
        sizes = [sum(self.graph.value(origin).numel() for origin in part.tensors) for part in parts]
        index = torch.cat([part.index + sum(sizes[:place]) for place, part in enumerate(parts)])[own.index]
        slope, offset = (torch.cat([getattr(p, name) for p in parts])[own.index] for name in ("slope", "offset"))
        tensors = tuple(origin for part in parts for origin in part.tensors)
        return SingleEntries(tensors, index, own.slope * slope, own.slope * offset + own.offset)

    def _find_single_entries(self, ref: Ref) -> SingleEntries | None:
        flows = tuple(dict.fromkeys(self.flows_into(ref.node)))
        likes = [self.graph.value(taken) for taken in flows]
        total = sum(like.numel() for like in likes)
        like = likes[0]

        def made(numbers: Tensor) -> Tensor:
            parts = numbers.to(like).split([x.numel() for x in likes])
            given = {taken: part.reshape(x.shape) for taken, part, x in zip(flows, parts, likes, strict=True)}
            return self.run(ref.node, given, ref.output).flatten()

        draw = _noise(torch.empty(total, dtype=torch.float64), 4)
        with torch.no_grad():
            offset = made(torch.zeros(total))
            slope = made(torch.ones(total)) - offset
            places = (made(torch.arange(total)) - offset) / torch.where(slope == 0, 1.0, slope)
            index = places.round().clamp(0, total - 1).long()
            alone = torch.allclose(made(draw) - offset, slope * draw.to(like)[index], rtol=1e-9, atol=1e-9)
        return SingleEntries(flows, index, slope, offset) if alone else None

    def operations_to(self, refs: Sequence[Ref]) -> list[int]:
        """Return the operations that lead from the image to some tensors, in order."""
        needed = {number for ref in refs for number in self.graph.operations_behind(ref)}
        return [number for number in sorted(needed) if self.graph.nodes[number].flows]

    def _test_affine(self, number: int) -> bool:
        flows = list(dict.fromkeys(self.flows_into(number)))
        node = self.graph.nodes[number]
        taken = [self.single.value(ref) for ref in flows]
        if not flows or not all(tensor.is_floating_point() for tensor in [*node.outputs[:1], *taken]):
            return False
        one, other = ([_noise(tensor, key) for tensor in taken] for key in (0, 1))
        draws = [0 * x for x in one], one, other, [2 * a - 3 * b for a, b in zip(one, other, strict=True)]
        try:
            with torch.no_grad():
                none, first, second, both = (
                    self.single.replay([number], Ref(number), dict(zip(flows, values, strict=True))) for values in draws
                )
        except MODEL_ERRORS:
            return False
        if not both.is_floating_point():
            return False
        expected = 2 * (first - none) - 3 * (second - none)
        return bool((both - none - expected).norm() <= AFFINE_TOLERANCE * (expected.norm() + both.norm()))

    def _read_activation(self, number: int, taken: Ref) -> Activation | MonotoneActivation | None:
        node = self.single.nodes[number]
        if len(node.outputs) != 1 or node.outputs[0].shape != self.single.value(taken).shape:
            return None
        segment = Segment((number,), taken, Ref(number))
        found = recognize(self.single, segment)
        if isinstance(found, nn.ReLU):
            return Activation(0.0)
        if isinstance(found, nn.LeakyReLU):
            return Activation(float(found.negative_slope))
        if isinstance(found, (nn.Tanh, nn.Sigmoid)):
            return MonotoneActivation(partial(replay_segment, self.single, segment), node.outputs[0].shape[1:])
        return found if isinstance(found, MonotoneActivation) else None

    def _read_layer(self, number: int) -> LayerEquations | None:
        node = self.graph.nodes[number]
        if not has_trained_weight(self.graph, node) or len(node.outputs[0].shape) > 4:
            return None
        if node.operation == "convolution":
            return self._read_convolution(number)
        pair = product_operands(node)
        if node.operation not in {"addmm", "mm"} or not self.graph.depends_on_image(pair[0]):
            return None
        found = self._sent_gradient(pair[1])
        if found is None:
            return None
        name, gradient, sent = found
        weight = self.graph.value(pair[1]).mT[..., None, None]
        shape = self.graph.value(pair[0]).shape
        return LayerEquations(
            name, weight, gradient.mT[..., None, None], (1, 1), (0, 0), (1, 1), 1,
            torch.Size((*shape, 1, 1)), torch.Size((*node.outputs[0].shape, 1, 1)),
            None if sent is None else sent.mT[..., None, None],
        )  # fmt: skip

    def _read_convolution(self, number: int) -> LayerEquations | None:
        node = self.graph.nodes[number]
        taken, weight, _, stride, padding, dilation, transposed, _, groups = node.args
        value = self.graph.value(weight)
        found = self._sent_gradient(weight)
        if transposed or value.ndim != 4 or found is None or not self.graph.depends_on_image(taken):
            return None
        return LayerEquations(
            found[0], value, found[1], _pair(stride), _pair(padding), _pair(dilation), int(groups),
            self.graph.value(taken).shape, node.outputs[0].shape, found[2],
        )  # fmt: skip

    def _sent_gradient(self, ref: Ref) -> tuple[str, Tensor, Tensor | None] | None:
        """Return the parameter behind a weight, its gradient and what of that is known, as the weight lies, or None."""
        found = self.graph.as_parameter(ref)
        if found is None or found[0] not in self.gradient:
            return None
        shape, places = self.graph.value(ref).shape, found[1]

        def as_weight(values: Tensor) -> Tensor:
            return (values if places is None else values.flatten()[places]).reshape(shape)

        known = self.sent.get(found[0])
        return found[0], as_weight(self.gradient[found[0]]), None if known is None else as_weight(known)

    def layer_input(self, number: int) -> Ref:
        """Return the tensor that a weighted layer takes."""
        return self.flows_into(number)[0]

    def bias_like_parameters(self, number: int) -> list[tuple[Ref, str]]:
        """Return parameters with a sent gradient that an operation adds to what it takes, as they are."""
        node = self.graph.nodes[number]
        return [
            (ref, self.graph.sources[ref.node])
            for ref in dict.fromkeys(node.refs)
            if ref.node < -1 and self.graph.sources[ref.node] in self.gradient and self._is_added(number, ref)
        ]

    def _is_added(self, number: int, ref: Ref) -> bool:
        """Return whether an operation's change with a parameter hangs on nothing that flows."""
        value = self.graph.value(ref)
        if not parameters_behind(self.graph, ref) or value.ndim > 1:
            return False
        flows = self.flows_into(number)
        draw = _noise(value, 2)
        changes = []
        with torch.no_grad():
            for factor in (0.0, 1.0):
                given = {r: factor * self.graph.value(r) for r in flows}
                changes.append(self.run(number, {**given, ref: value + draw}) - self.run(number, given))
        return bool(changes[0].any()) and torch.allclose(changes[0], changes[1], rtol=1e-6, atol=1e-9)

    def graph_in_precision(self, dtype: torch.dtype) -> Graph:
        """Return the trace with its tensors in another precision."""
        return in_type(self.graph, dtype)


def in_type(graph: Graph, dtype: torch.dtype) -> Graph:
    """Return a trace with its tensors in another precision."""
    nodes = [
        replace(node, outputs=[_cast(t, dtype) for t in node.outputs], leaves=[_cast(x, dtype) for x in node.leaves])
        for node in graph.nodes
    ]
    tensors = {name: _cast(value, dtype) for name, value in graph.tensors.items()}
    return replace(graph, image=_cast(graph.image, dtype), tensors=tensors, nodes=nodes)


def _identity(ref: Ref, value: Tensor) -> SingleEntries:
    """Return a tensor as made of itself."""
    one = torch.ones_like(value).flatten()
    return SingleEntries((ref,), torch.arange(len(one), device=one.device), one, torch.zeros_like(one))


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    """Return a tensor or a type of numbers in another precision; complex numbers of its two parts."""
    if isinstance(leaf, torch.dtype):
        return dtype.to_complex() if leaf.is_complex else dtype if leaf.is_floating_point else leaf
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(dtype.to_complex()) if leaf.is_complex() else leaf.to(dtype) if leaf.is_floating_point() else leaf


def _noise(like: Tensor, key: int) -> Tensor:
    return torch.randn(like.shape, generator=stream(key, "affine"), dtype=like.dtype).to(like)


def _pair(setting: Sequence[int]) -> tuple[int, int]:
    return int(setting[0]), int(setting[-1])
