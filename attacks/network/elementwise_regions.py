"""Finds activations that a network writes as several operations, and has a record show each as the one that torch has.

A ReLU may be `x * (x > 0)`, `(x + x.abs()) / 2` or a choice between x and zeros. What solves a graph goes by what each
operation does by itself, so that of an activation in pieces it knows little. Here every stretch of operations between
two tensors of one shape is asked by its numbers whether it is a known function of single numbers. Then its last
operation is replaced by that function of the first tensor, and the others are no longer on the way. Operations keep
their numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from attacks.network.autograd_support import pull_back_or_zeros
from attacks.network.operation_recognition import function_on_grid, replay_segment
from attacks.network.operation_trace import IMAGE, MODEL_ERRORS, Graph, Node, Ref, Segment
from fl.seeds import stream

MAX_OPERATIONS = 24
"""Operations of an activation, at most; a GELU by its formula takes eight."""
CLOSE, VERY_CLOSE = 1e-11, 1e-13
"""By how much two formulas of one function differ in double precision, relative and absolute."""
DIGITS = 12
"""Digits to which a slope or a bound is read off a function."""
aten = torch.ops.aten
WITHOUT_SETTINGS = (
    aten.relu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.silu.default,
    aten.mish.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
)


@dataclass(frozen=True)
class Activation:
    """A function of single numbers, as torch has it.

    Attributes:
        start: the tensor that it takes.
        op: the operation.
        settings: its arguments behind the tensor.
        keywords: those that have to be named.
    """

    start: Ref
    op: OpOverload
    settings: tuple[float, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the function makes of a tensor."""
        result: Tensor = self.op(x, *self.settings, **dict(self.keywords))
        return result

    def as_node(self, node: Node) -> Node:
        """Return the operation that stands in the place of another."""
        leaves, spec = pytree.tree_flatten(((self.start, *self.settings), dict(self.keywords)))
        return replace(node, op=self.op, leaves=leaves, spec=spec, outputs=node.outputs[:1], sources=frozenset())

    def is_node(self, node: Node) -> bool:
        """Return whether an operation is this one already."""
        return node.op is self.op and node.leaves == self.as_node(node).leaves


def find_activations(graph: Graph) -> dict[int, Activation]:
    """Return known activations of a record, by the operation with which each ends.

    Args:
        graph: of one image, in double precision.
    """
    found: dict[int, Activation] = {}
    known: dict[Hashable, Activation] = {}  # a network mostly has one many times
    for end in graph.used_operations():
        activation = _find_ending_at(graph, end, found, known)
        if activation is not None:
            found[end] = activation
    return found


def with_activations(graph: Graph, found: Mapping[int, Activation]) -> Graph:
    """Return a record in which activations are single operations.

    Args:
        graph: of any number of images, with the operations that `found` was read off.
        found: as `find_activations` returns them.
    """
    nodes = [
        found[number].as_node(node) if number in found and not found[number].is_node(node) else node
        for number, node in enumerate(graph.nodes)
    ]
    return replace(graph, nodes=nodes)


def _find_ending_at(
    graph: Graph, end: int, found: Mapping[int, Activation], known: dict[Hashable, Activation]
) -> Activation | None:
    """Return the activation by the fewest operations that ends with one; None where there is none.

    Args:
        graph: of one image.
        end: the operation.
        found: activations before it.
        known: those that are one operation, by what that does; this one is noted there.
    """
    passed: list[Activation] = []
    for segment in _segments_to(graph, end):
        function = graph.nodes[end].function_of_one if len(segment.nodes) == 1 else None
        same = known.get(function)
        activation = _read_activation(graph, segment) if same is None else replace(same, start=segment.start)
        if activation is not None and function is not None:
            known[function] = activation
        if activation is not None:
            return None if activation in passed else activation  # what follows one may change nothing
        if segment.start.node in found:
            passed.append(found[segment.start.node])
    return None


def _segments_to(graph: Graph, end: int) -> Iterator[Segment]:
    """Yield what lies between tensors through which all passes that leads to an operation, and it, shortest first."""
    given = graph.value(Ref(end))
    open_, nodes = {Ref(end)}, list[int]()
    if len(graph.nodes[end].outputs) != 1 or not given.is_floating_point() or given.ndim < 2:
        return
    while len(nodes) < MAX_OPERATIONS:
        last = max(ref.node for ref in open_)
        if last == IMAGE or graph.nodes[last].sources & graph.parameters:
            return
        nodes.append(last)
        open_ = {ref for ref in open_ if ref.node != last}
        open_ |= {ref for ref in graph.nodes[last].refs if graph.depends_on_image(ref)}
        if len(open_) != 1:
            continue
        (start,) = open_
        taken = graph.value(start)
        if start.node != IMAGE and taken.is_floating_point() and taken.shape == given.shape:
            yield Segment(tuple(reversed(nodes)), start, Ref(end))


def _read_activation(graph: Graph, segment: Segment) -> Activation | None:
    run, taken = partial(replay_segment, graph, segment), graph.value(segment.start)
    try:
        with torch.no_grad():
            curve = function_on_grid(run, taken)
        if curve is None:
            return None
        with torch.no_grad():
            matching = (a for a in _candidates(segment.start, *curve) if _agree(a(curve[0]), curve[1]))
            activation = next(matching, None)
        if activation is None or not _agree(_slopes(activation, taken), _slopes(run, taken)):
            return None
    except MODEL_ERRORS:  # an operation on numbers that no image makes
        return None
    return activation


def _candidates(start: Ref, grid: Tensor, values: Tensor) -> Iterator[Activation]:
    """Yield functions that values on a grid may be of."""
    for op in WITHOUT_SETTINGS:
        yield Activation(start, op)
    for how in ("none", "tanh"):
        yield Activation(start, aten.gelu.default, keywords=(("approximate", how),))
    low, high = (_rounded(values[at]) for at in (grid.argmin(), grid.argmax()))
    slope = _rounded(-values[(grid + 1).abs().argmin()])
    if 0 < slope < 1:
        yield Activation(start, aten.leaky_relu.default, (slope,))
    if low < 0:
        yield Activation(start, aten.elu.default, (-low,))
    if float(grid.amin()) < low < high < float(grid.amax()):
        yield Activation(start, aten.hardtanh.default, (low, high))


def _rounded(value: Tensor) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _agree(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=CLOSE, atol=VERY_CLOSE)


def _slopes(function: Any, like: Tensor) -> Tensor:
    """Return the derivative of a function at random numbers, which no bend is at."""
    at = 3 * torch.randn(like.shape, generator=stream(0, "slopes"), dtype=torch.float64).to(like)
    with torch.enable_grad():
        at.requires_grad_()
        made = function(at)
        return pull_back_or_zeros([made], at, [torch.ones_like(made)])
