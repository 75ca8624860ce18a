"""Spreads known values and known signals over a network's graph.

A *value* is what a tensor holds in the client's forward pass, a *signal* is the loss's derivative by it. Both are
worked out when asked for: a value from the values that an operation takes, a signal from the signals of the operations
that take the tensor. What keeps one from being known is raised as `UnknownError`, in words for the user.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.analytic.graph.layer_solves import KnownSignal
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.network.operation_trace import IMAGE, Ref
from fl.seeds import stream

MAX_DOUBTFUL_VALUE = 1e-2
"""Share of the largest output of an activation below which rounding may have made its bit wrong."""


class UnknownError(Exception):
    """A value or a signal does not follow from what is known."""


@dataclass
class Propagation:
    """What is known of values and signals.

    Attributes:
        network: the graph.
        values: solved for, by tensor.
        signals: found otherwise than from above, by tensor.
        masks: of activations, by operation: True where the slope is 1.
    """

    network: NetworkGraph
    values: dict[Ref, Tensor] = field(default_factory=dict)
    signals: dict[Ref, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)
    _forward: dict[Ref, Tensor | None] = field(default_factory=dict)
    _backward: dict[Ref, Tensor] = field(default_factory=dict)

    def set_value(self, ref: Ref, value: Tensor) -> None:
        """Note a value that was solved for."""
        self.values[ref] = value
        self._forward.clear()

    def set_signal(self, ref: Ref, signal: Tensor) -> None:
        """Note a signal, and those of the sums and scalings made of the tensor, if nothing else takes it."""
        while True:
            self.signals[ref] = signal
            above = self.sole_scaling(ref)
            if above is None:
                break
            number, slope = above
            ref, signal = Ref(number), signal.reshape(slope.shape) / slope
        self._backward.clear()

    def set_mask(self, activation: int, mask: Tensor) -> None:
        """Note where an activation's slope is 1."""
        self.masks[activation] = mask
        self._backward.clear()

    def value(self, ref: Ref) -> Tensor:
        """Return the value of a tensor.

        Raises:
            UnknownError: it does not follow from the values that were solved for.
        """
        if ref in self.values:
            return self.values[ref]
        if ref not in self._forward:
            self._forward[ref] = self._work_out_value(ref)
        found = self._forward[ref]
        if found is None:
            raise UnknownError(f"the values at {self._place(ref)} are unknown")
        return found

    def signal(self, ref: Ref) -> Tensor:
        """Return the signal at a tensor.

        Raises:
            UnknownError: it does not follow from the signals that were found.
        """
        if ref in self.signals:
            return self.signals[ref]
        if ref not in self._backward:
            parts = [self._pull_back(number, ref) for number in self.network.consumers.get(ref, [])]
            if not parts:
                raise UnknownError("what the network returns gets an unknown signal")
            self._backward[ref] = sum(parts[1:], start=parts[0])
        return self._backward[ref]

    def layer_signal(self, number: int) -> KnownSignal:
        """Return what flows back into a weighted layer, with the bits of the activation above where there is one.

        Raises:
            UnknownError: it does not follow.
        """
        layer, out = self.network.layers[number], Ref(number)
        gate = self.gate(out)
        shape = layer.output_shape
        if gate is None or out in self.signals:
            return KnownSignal(layer, self.signal(out).reshape(shape))
        activation, slope = gate
        full = slope * self.signal(Ref(activation)).reshape(slope.shape)
        bits, doubtful = self._mask(activation).reshape(shape), None
        if (values := self.values.get(Ref(activation))) is not None:
            doubtful = (values.abs() < MAX_DOUBTFUL_VALUE * values.abs().max()).reshape(shape)
        return KnownSignal(layer, full.reshape(shape), bits, self.network.activations[activation].slope, doubtful)

    def _work_out_value(self, ref: Ref) -> Tensor | None:
        if ref.node == IMAGE:
            return None
        given = {}
        for taken in self.network.flows_into(ref.node):
            if taken not in self.values:
                try:
                    given[taken] = self.value(taken)
                except UnknownError:
                    return None
            else:
                given[taken] = self.values[taken]
        with torch.no_grad():
            return self.network.run(ref.node, given, ref.output)

    def _pull_back(self, number: int, to: Ref) -> Tensor:
        signal = self.signal(Ref(number))
        layer = self.network.layers.get(number)
        like = self.network.graph.value(to).shape
        if layer is not None:
            return layer.pull_back(signal.reshape(layer.output_shape)).reshape(like)
        if self.network.is_affine(number):
            return self.network.pull_back(number, signal, to)
        if number in self.network.activations:
            slope = self.network.activations[number].slope
            return torch.where(self._mask(number), signal, slope * signal)
        given = {ref: self.value(ref) for ref in self.network.flows_into(number)}
        return self.network.pull_back(number, signal, to, given)

    def _mask(self, activation: int) -> Tensor:
        if activation not in self.masks:
            out = self.value(Ref(activation))
            return out > 0
        return self.masks[activation]

    def gate(self, ref: Ref) -> tuple[int, Tensor] | None:
        """Return the only activation that takes a tensor, by way of scalings and sums, and the slope of these."""
        slope = torch.ones_like(self.network.graph.value(ref))
        while True:
            users = self.network.consumers.get(ref, [])
            if len(users) != 1:
                return None
            if users[0] in self.network.activations:
                return users[0], slope
            above = self.sole_scaling(ref)
            if above is None:
                return None
            ref, slope = Ref(above[0]), slope * above[1]

    def sole_scaling(self, ref: Ref) -> tuple[int, Tensor] | None:
        """Return the operation that alone takes a tensor, and its slope, where it scales and shifts every number."""
        users = self.network.consumers.get(ref, [])
        if len(users) != 1 or users[0] in self.network.layers or not self.network.is_affine(users[0]):
            return None
        number = users[0]
        like, out = self.network.graph.value(ref), self.network.graph.value(Ref(number))
        if like.shape != out.shape or self.network.flows_into(number).count(ref) != 1:
            return None
        slope = self.network.pull_back(number, torch.ones_like(out), ref)
        draw = torch.randn(out.shape, generator=stream(0, "scaling"), dtype=out.dtype).to(out)
        if not torch.allclose(self.network.pull_back(number, draw, ref), slope * draw, rtol=1e-9, atol=1e-12):
            return None
        return (number, slope) if bool((slope != 0).all()) else None

    def _place(self, ref: Ref) -> str:
        return "the image" if ref.node < 0 else str(self.network.graph.nodes[ref.node])
