"""Spreads known values and known signals over a network's graph.

A *value* is what a tensor holds in the client's forward pass, a *signal* is the loss's derivative by it. Both are
worked out when asked for: a value from the values that an operation takes, a signal from the signals of the operations
that take the tensor. What keeps one from being known is raised as `UnknownError`, in words for the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.analytic.graph.layer_solves import KnownSignal
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.sibling_activations import find_output_by_siblings
from attacks.network.curved_activations import MonotoneActivation
from attacks.network.operation_trace import IMAGE, Ref
from fl.tensors import per_image

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
    _forward: dict[Ref, Tensor | str] = field(default_factory=dict)  # worked out, or why it could not be
    _backward: dict[Ref, Tensor | str] = field(default_factory=dict)
    _slopes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of curved activations, by their outputs

    def set_value(self, ref: Ref, value: Tensor) -> None:
        """Note a value that was solved for."""
        self.values[ref] = value
        self._forward = {at: known for at, known in self._forward.items() if not isinstance(known, str)}
        self._forget_signals(below=-1)

    def set_signal(self, ref: Ref, signal: Tensor) -> None:
        """Note a signal, and those of the sums and scalings made of the tensor, if nothing else takes it."""
        while True:
            self.signals[ref] = signal
            above = self.network.sole_scaling(ref)
            if above is None:
                break
            number, slope = above
            ref, signal = Ref(number), signal.reshape(slope.shape) / slope
        self._forget_signals(below=ref.node + 1)

    def set_mask(self, activation: int, mask: Tensor) -> None:
        """Note where an activation's slope is 1."""
        self.masks[activation] = mask
        self._forget_signals(below=activation)

    def restore(self, signals: Mapping[Ref, Tensor], masks: Mapping[int, Tensor]) -> None:
        """Take back what was noted since signals and masks were these."""
        self.signals, self.masks = dict(signals), dict(masks)
        self._backward.clear()

    def rescale(self, factors: Tensor, beside: Propagation) -> None:
        """Multiply the signals of each image by its factor (B,), and divide its values by the size of that.

        Args:
            factors: of the images.
            beside: what has its size already.
        """
        for ref, signal in self.signals.items():
            if ref not in beside.signals:
                self.signals[ref] = signal * per_image(factors, signal)
        for ref, value in self.values.items():
            if ref not in beside.values:
                self.values[ref] = value / per_image(factors.abs(), value)
        self._forward.clear()
        self._backward.clear()

    def snapshot(self) -> Propagation:
        """Return what is known now."""
        return Propagation(self.network, dict(self.values), dict(self.signals), dict(self.masks))

    def since(self, before: Propagation) -> Propagation:
        """Return what is known that was not known before; of masks all, which have no size."""
        return Propagation(
            self.network,
            {ref: value for ref, value in self.values.items() if ref not in before.values},
            {ref: signal for ref, signal in self.signals.items() if ref not in before.signals},
            dict(self.masks),
        )

    def _forget_signals(self, below: int) -> None:
        """Forget worked out signals at what operations before `below` made, and why others could not be worked out.

        What flows back into a tensor hangs on operations after it alone.
        """
        self._backward = {
            at: known for at, known in self._backward.items() if at.node >= below and not isinstance(known, str)
        }

    def value(self, ref: Ref) -> Tensor:
        """Return the value of a tensor.

        Raises:
            UnknownError: it does not follow from the values that were solved for.
        """
        for needed in self._missing(ref, self.values, self._forward, self._below):
            self._forward[needed] = self._work_out_value(needed)
        found = self.values[ref] if ref in self.values else self._forward[ref]
        if isinstance(found, str):
            raise UnknownError(found)
        return found

    def signal(self, ref: Ref) -> Tensor:
        """Return the signal at a tensor.

        Raises:
            UnknownError: it does not follow from the signals that were found.
        """
        for needed in reversed(self._missing(ref, self.signals, self._backward, self._above)):
            self._backward[needed] = self._work_out_signal(needed)
        found = self.signals[ref] if ref in self.signals else self._backward[ref]
        if isinstance(found, str):
            raise UnknownError(found)
        return found

    def layer_signal(self, number: int) -> KnownSignal:
        """Return what flows back into a weighted layer, with the bits of the activation above where there is one.

        Raises:
            UnknownError: it does not follow.
        """
        layer, out = self.network.layers[number], Ref(number)
        gate = self.network.gate(out)
        shape = layer.output_shape
        if gate is None or out in self.signals:
            return KnownSignal(layer, self.signal(out).reshape(shape))
        activation, slope = gate
        full = slope * self.signal(Ref(activation)).reshape(slope.shape)
        bits, doubtful = self.mask(activation).reshape(shape), None
        if (values := self.values.get(Ref(activation))) is not None:
            doubtful = (values.abs() < MAX_DOUBTFUL_VALUE * values.abs().max()).reshape(shape)
        return KnownSignal(layer, full.reshape(shape), bits, self.network.activations[activation].slope, doubtful)

    def _below(self, ref: Ref) -> list[Ref]:
        return [] if ref.node < 0 else self.network.flows_into(ref.node)

    def _above(self, ref: Ref) -> list[Ref]:
        return [Ref(number) for number in self.network.consumers.get(ref, [])]

    @staticmethod
    def _missing(
        ref: Ref,
        solved: Mapping[Ref, Tensor],
        worked_out: Mapping[Ref, Tensor | str],
        neighbors: Callable[[Ref], list[Ref]],
    ) -> list[Ref]:
        """Return what must be worked out for a tensor, itself included, in the order in which the network makes it."""
        waiting, found = [ref], set[Ref]()
        while waiting:
            needed = waiting.pop()
            if needed not in found and needed not in solved and needed not in worked_out:
                found.add(needed)
                waiting += neighbors(needed)
        return sorted(found, key=lambda needed: (needed.node, needed.output))

    def _work_out_value(self, ref: Ref) -> Tensor | str:
        if ref.node == IMAGE:
            return "the image is unknown"
        given = {}
        for taken in self.network.flows_into(ref.node):
            value = self.values[taken] if taken in self.values else self._forward[taken]
            if isinstance(value, str):
                told = self._ask_siblings(ref)
                return f"the values at {self._place(ref)} are unknown" if told is None else told
            given[taken] = value
        with torch.no_grad():
            return self.network.run(ref.node, given, ref.output)

    def _ask_siblings(self, ref: Ref) -> Tensor | None:
        """Return what an activation returned, as others of the same numbers tell; None where they do not."""
        if ref.node not in self.network.activations:
            return None

        def held(origin: Ref) -> Tensor | None:
            found = self.values.get(origin, self._forward.get(origin))
            return None if isinstance(found, str) else found

        return find_output_by_siblings(self.network, ref.node, self.values, held)

    def _work_out_signal(self, ref: Ref) -> Tensor | str:
        users = self.network.consumers.get(ref, [])
        if not users:
            return "what the network returns gets an unknown signal"
        total: Tensor | None = None
        for number in users:
            above = Ref(number)
            signal = self.signals[above] if above in self.signals else self._backward[above]
            if isinstance(signal, str):
                return signal
            try:
                part = self._pull_back(number, ref, signal)
            except UnknownError as error:
                return str(error)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _pull_back(self, number: int, to: Ref, signal: Tensor) -> Tensor:
        layer = self.network.layers.get(number)
        like = self.network.graph.value(to).shape
        if layer is not None:
            return layer.pull_back(signal.reshape(layer.output_shape)).detach().reshape(like)
        if self.network.is_affine(number):
            return self.network.pull_back(number, signal, to)
        if number in self.network.activations:
            slope = self.network.activations[number].slope
            return torch.where(self.mask(number), signal, slope * signal)
        curved, out = self.network.curved_activations.get(number), self.values.get(Ref(number))
        if curved is not None and out is not None:
            return signal * self._curved_slope(number, curved, out)
        given = {ref: self.value(ref) for ref in self.network.flows_into(number)}
        return self.network.pull_back(number, signal, to, given)

    def _curved_slope(self, number: int, curved: MonotoneActivation, out: Tensor) -> Tensor:
        """Return the derivative of an activation where it returned `out`; 0 at its level ends, which pass no signal."""
        kept = self._slopes.get(number)
        if kept is None or kept[0] is not out:
            taken, told = curved.inverse(out)
            kept = self._slopes[number] = (out, curved.derivatives(taken)[0] * told)
        return kept[1]

    def mask(self, activation: int) -> Tensor:
        """Return where an activation's slope is 1.

        Raises:
            UnknownError: it does not follow from the values that were solved for.
        """
        if activation not in self.masks:
            out = self.value(Ref(activation))
            return out > 0
        return self.masks[activation]

    def _place(self, ref: Ref) -> str:
        return "the image" if ref.node < 0 else str(self.network.graph.nodes[ref.node])
