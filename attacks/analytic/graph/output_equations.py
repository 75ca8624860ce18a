"""Equations for what a layer takes by what activations above it returned: they let on what went into them.

Where an activation's output was solved for and is open, what went into it is known as well. From a tensor below, that
the network computes by convolutions, scalings and sums, each is one linear equation for that tensor. Where a skip
connection or a scaling carries the tensor there, such an equation has one number of it alone, which is known outright.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.graph.joint_equations import KnownEntries
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.network.autograd_support import pull_back_or_zeros
from attacks.network.operation_trace import Ref
from fl.seeds import stream

MIN_OPEN = 1e-4
"""Share of the largest output of an activation above which it was open for certain."""

MIN_SLOPE = 1e-3
"""Share of the largest slope of a scaling above which it tells what it took: what is left of less is rounding."""

MAX_WRONG = 0.01
"""Share of equations that are left out of a misfit."""


@dataclass(frozen=True)
class _Output:
    """What goes into one activation.

    Attributes:
        ref: the tensor.
        nodes: the operations between x and it.
        wanted: its value, where it is known.
        known: where that is.
    """

    ref: Ref
    nodes: tuple[int, ...]
    wanted: Tensor
    known: Tensor


@dataclass
class OutputEquations:
    """F x = t, weighed by the size of each output.

    Attributes:
        known: what the network holds elsewhere.
        start: x.
        shape: of x as layers take it (n, K, H, W).
        outputs: of F.
        constants: what else flows into the operations between x and the outputs.
    """

    known: Propagation
    start: Ref
    shape: torch.Size
    outputs: list[_Output]
    constants: dict[Ref, Tensor]

    def __post_init__(self) -> None:
        self._weights = [
            out.known / out.wanted[out.known].square().mean().sqrt().nan_to_num(1.0).clamp_min(1e-300)
            for out in self.outputs
        ]
        point = self.known.network.graph.value(self.start).new_zeros(self.shape).requires_grad_()
        with torch.enable_grad():
            self._offset = self._run(point)
        self._point = point

    @property
    def count(self) -> int:
        """Number of equations."""
        return sum(int(out.known.sum()) for out in self.outputs)

    def _run(self, x: Tensor) -> list[Tensor]:
        return [w * self._follow(out, x) for out, w in zip(self.outputs, self._weights, strict=True)]

    def _follow(self, out: _Output, x: Tensor) -> Tensor:
        graph = self.known.network.graph
        x = x.reshape(graph.value(self.start).shape)
        return graph.replay(out.nodes, out.ref, {**self.constants, self.start: x})

    def push(self, x: Tensor) -> list[Tensor]:
        """Return F x for x (n, K, H, W)."""
        with torch.no_grad():
            return [now - at.detach() for now, at in zip(self._run(x), self._offset, strict=True)]

    def pull(self, weights: Sequence[Tensor]) -> Tensor:
        """Return F^T w."""
        return pull_back_or_zeros(self._offset, self._point, weights)

    def right_side(self) -> list[Tensor]:
        """Return t, less what is there without x."""
        return [
            w * out.wanted.where(out.known, 0.0) - at.detach()
            for out, w, at in zip(self.outputs, self._weights, self._offset, strict=True)
        ]

    def hold_back(self, share: float) -> tuple[OutputEquations, OutputEquations]:
        """Return most of the equations and a random share of them: what they tell alone must answer the others, too."""
        draw = stream(0, "equations held back")
        kept, held = [], []
        for out in self.outputs:
            chosen = torch.rand(out.known.shape, generator=draw).to(out.known.device) < share
            kept.append(replace(out, known=out.known & ~chosen))
            held.append(replace(out, known=out.known & chosen))
        return replace(self, outputs=kept), replace(self, outputs=held)

    def split_entries(self, nonnegative: bool) -> tuple[KnownEntries | None, OutputEquations]:
        """Return what equations with one number of x tell of these, if there are any, and the other equations.

        Args:
            nonnegative: whether no number of x is below zero.
        """
        mixed, known = [], torch.zeros(self.shape, dtype=torch.bool, device=self._point.device)
        values = self._point.detach().clone()
        upper = torch.full_like(values, math.inf)
        for out in self.outputs:
            scaling = self._find_scaling(out)
            if scaling is None:
                mixed.append(out)
                continue
            slope, offset = (part.reshape(self.shape) for part in scaling)
            heard = slope.abs() > MIN_SLOPE * slope.abs().max()
            found = (out.wanted.reshape(self.shape) - offset) / torch.where(heard, slope, 1.0)
            told = out.known.reshape(self.shape) & heard
            known, values = known | told, torch.where(told, found, values)
            bounded = (out.wanted.reshape(self.shape) == 0) & (slope > 0)
            upper = torch.where(bounded, torch.minimum(upper, found), upper)
        some = nonnegative or bool(known.any())
        return KnownEntries(known, values, nonnegative, upper) if some else None, replace(self, outputs=mixed)

    def _find_scaling(self, out: _Output) -> tuple[Tensor, Tensor] | None:
        """Return by what each number of x is multiplied, and what is added to it, where an output has no other."""
        if out.wanted.numel() != self.shape.numel():
            return None
        point = self._point.detach()
        with torch.no_grad():
            offset = self._follow(out, point)
            slope = self._follow(out, point + 1) - offset
            draw = torch.randn(self.shape, generator=stream(0, "scaling"), dtype=torch.float64).to(point)
            scaled = self._follow(out, draw) - offset
        alone = torch.allclose(
            scaled, slope * draw.reshape(slope.shape), rtol=1e-9, atol=1e-9 * float(slope.abs().max())
        )
        return (slope, offset) if alone else None

    def misfit(self, x: Tensor) -> float:
        """Return the share of the right side that x leaves, without the worst equations, whose bits may be wrong."""
        known = [out.known for out in self.outputs]
        right = torch.cat([t[k] for t, k in zip(self.right_side(), known, strict=True)])
        residual = right - torch.cat([now[k] for now, k in zip(self.push(x), known, strict=True)])
        best = residual.abs().argsort()[: max(1, round((1 - MAX_WRONG) * len(residual)))]
        return float(residual[best].norm() / right[best].norm().clamp_min(1e-300))


def find_output_equations(known: Propagation, start: Ref, shape: torch.Size) -> OutputEquations | None:
    """Return what solved outputs of activations say of a tensor; None where they say nothing.

    Args:
        known: what was solved for.
        start: the tensor.
        shape: of it as layers take it (n, K, H, W).
    """
    network, constants, outputs = known.network, dict[Ref, Tensor](), list[_Output]()
    for number, activation in network.activations.items():
        ref = Ref(number)
        if ref not in known.values or start.node >= number:
            continue
        before = network.flows_into(number)[0]
        path = _affine_path(known, start, before, constants)
        if path is None:
            continue
        value = known.values[ref]
        is_open = value > MIN_OPEN * value.abs().max()
        if activation.slope > 0:
            value, is_open = torch.where(value > 0, value, value / activation.slope), torch.ones_like(is_open)
        outputs.append(_Output(before, path, value, is_open))
    return OutputEquations(known, start, shape, outputs, constants) if outputs else None


def _affine_path(known: Propagation, start: Ref, end: Ref, constants: dict[Ref, Tensor]) -> tuple[int, ...] | None:
    """Return the operations that make `end` of `start`, if all are affine, and note what else flows in."""
    network = known.network
    leads: dict[Ref, bool] = {start: True}
    waiting, inner = [end], set[Ref]()
    while waiting:
        ref = waiting.pop()
        if ref in inner or ref == start:
            continue
        if ref.node <= start.node or ref in known.values:
            leads[ref] = False
            continue
        inner.add(ref)
        waiting += network.flows_into(ref.node)
    for ref in sorted(inner, key=lambda r: (r.node, r.output)):
        leads[ref] = any(leads[taken] for taken in network.flows_into(ref.node))
    if not leads.get(end, False):
        return None
    nodes = sorted({ref.node for ref in inner if leads[ref]})
    if not all(number in network.layers or network.is_affine(number) for number in nodes):
        return None
    others = {taken for number in nodes for taken in network.flows_into(number) if not leads[taken]}
    try:
        constants |= {taken: known.value(taken) for taken in others}
    except UnknownError:
        return None
    return tuple(nodes)
