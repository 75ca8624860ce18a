"""The derivative of a function at many points, recorded once: J v and J^T w at the cost of one pass each.

A step of Gauss and Newton multiplies by the Jacobian J of the same point dozens of times. Forward-mode automatic
differentiation evaluates the function anew for each product. Here function and derivative are recorded together and
the record is split: what depends on the direction v is linear in it and is all that a product costs; the rest, the
function's values among it, is evaluated once a point. J^T w goes through autograd's graph of that evaluation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from attacks.network.operation_trace import MODEL_ERRORS
from fl.seeds import stream

Forward = Callable[[Tensor], Sequence[Tensor]]
"""From images (B, ...) to feature tensors (B, ...)."""

_ZEROS = (torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default)
_KEEP_ZERO = (
    torch.ops.aten.expand.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.detach.default,
)
_PRODUCTS = (torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default)


MAX_MISMATCH = 1e-3
"""Share of the larger of |w| |J v| and |J^T w| |v| by which w^T (J v) and (J^T w)^T v may differ for rounding."""


class UnrecordableError(Exception):
    """A function's derivative cannot be recorded."""


class RecordedDerivative:
    """The record of one function for images of one shape."""

    def __init__(self, forward: Forward, images: Tensor) -> None:
        """Record `forward` and its derivative.

        Args:
            forward: differentiable, without control flow that depends on its input's values.
            images: (B, ...), whose shape, type and device the record is for.

        Raises:
            UnrecordableError: torch cannot record `forward` and its derivative, or what a record makes of J and of J^T
                does not agree, as where a function detaches a part of itself or has a derivative of its own.
        """

        def both(point: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
            values, tangents = torch.func.jvp(lambda z: tuple(forward(z)), (point,), (direction,))[:2]
            return (*values, *tangents)

        shapes = TracingContext(FakeTensorMode())  # without, torch makes a mode of its own for every tensor's shape
        with warnings.catch_warnings(), tracing(shapes):
            warnings.simplefilter("ignore")  # torch warns of its own use of deprecated functions
            try:
                module = make_fx(both)(images.detach(), torch.zeros_like(images))
            except MODEL_ERRORS as error:  # a fault of `forward` itself shows where it is evaluated without a record
                raise UnrecordableError(str(error)) from error
        _remove_zero_terms(module.graph)
        self.point_part, self.direction_part, self._values = _split(module)
        try:
            agrees = self._agrees(forward, images)
        except RuntimeError as error:  # autograd misses numbers that were overwritten
            raise UnrecordableError(str(error)) from error
        if not agrees:
            raise UnrecordableError("Products with the record's J and J^T are not those of one matrix.")

    def at(self, images: Tensor) -> tuple[tuple[Tensor, ...], Callable[[Tensor], tuple[Tensor, ...]]]:
        """Return the function's values, and the map from a direction v, shaped like the images, to J v.

        The values have autograd's graph, where that is on and the images require a gradient.
        """
        found = self.point_part(images)
        values, kept = tuple(found[: self._values]), tuple(t.detach() for t in found[self._values :])

        def product(direction: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return tuple(self.direction_part(direction, *kept))

        return values, product

    def _agrees(self, forward: Forward, images: Tensor) -> bool:
        """Return whether w^T (J v) is (J^T w)^T v for a random v and w."""
        draw = stream(0, "products with a recorded derivative")

        def random_like(values: Tensor) -> Tensor:
            return torch.randn(values.shape, generator=draw, dtype=torch.float64).to(values)

        linear, direction = Linearization(forward, images, self), random_like(images)
        weights = [random_like(value) for value in linear.values]
        pushed, pulled = linear.push(direction), linear.pull(weights)
        size = max(_length(weights) * _length(pushed), _length([pulled]) * _length([direction]))
        inner = sum(float((w * p).sum()) for w, p in zip(weights, pushed, strict=True))
        return abs(inner - float((pulled * direction).sum())) <= MAX_MISMATCH * size


def of_any_count(forward: Forward, images: Tensor, single: Forward | None = None) -> Forward:
    """Return a function of images that takes any number of them, where it may have been recorded for one number.

    Some operations have the number of images written into them, as group normalization and views do. Then fewer images
    are filled up with copies of the first, and more go through in parts. A few are taken one by one, if that is told.

    Args:
        forward: from images (b, C, H, W) that do not interact to tensors (b, ...).
        images: (B, C, H, W), as many as it takes for certain.
        single: the same function as recorded for one image.
    """
    count = len(images)
    try:
        with torch.no_grad():
            if all(len(value) == count + 1 for value in forward(torch.cat([images, images[:1]]))):
                return forward
    except MODEL_ERRORS:
        pass

    def in_parts(given: Tensor) -> list[Tensor]:
        if single is not None and 2 * len(given) <= count:
            return [torch.cat(values) for values in zip(*map(single, given.split(1)), strict=True)]
        parts = given.split(count)
        missing = count - len(parts[-1])
        full = [*parts[:-1], torch.cat([parts[-1], given[:1].expand(missing, *given.shape[1:])])] if missing else parts
        made = zip(*map(forward, full), strict=True)
        return [torch.cat(values)[: len(given)] for values in made]

    return in_parts


class RecordedFunction:
    """A function with records of its derivative: one for each shape of images, made when it is first asked for.

    Attributes:
        forward: the function, as for `RecordedDerivative`.
    """

    def __init__(self, forward: Forward) -> None:
        """Begin without records."""
        self.forward = forward
        self._records: dict[tuple[int, ...], RecordedDerivative | None] = {}

    @classmethod
    def of(cls, forward: Forward) -> RecordedFunction:
        """Return a function with records: this one, if it has them already."""
        return forward if isinstance(forward, cls) else cls(forward)

    def __call__(self, images: Tensor) -> Sequence[Tensor]:
        """Return the function's values."""
        return self.forward(images)

    def record(self, images: Tensor) -> RecordedDerivative | None:
        """Return the record for images of this shape; None where torch can make none."""
        shape = tuple(images.shape)
        if shape not in self._records:
            try:
                self._records[shape] = RecordedDerivative(self.forward, images)
            except UnrecordableError:  # what cannot be recorded is differentiated twice instead
                self._records[shape] = None
        return self._records[shape]


class Linearization:
    """A function's values at a point, and products with its Jacobian J there."""

    def __init__(self, forward: Forward, images: Tensor, record: RecordedDerivative | None = None) -> None:
        """Evaluate `forward`.

        Args:
            forward: as for `RecordedDerivative`.
            images: the point, (B, ...).
            record: of the same function and shape. Without one, J v is the derivative of J^T w with respect to w,
                which costs two to three times as much.
        """
        self._point = images.detach().requires_grad_()
        with torch.enable_grad():
            if record is None:
                outputs = tuple(forward(self._point))
            else:
                outputs, self._product = record.at(self._point)
            self.values = tuple(o.detach() for o in outputs)
            self._moving = [o.requires_grad for o in outputs]
            self._outputs = tuple(o for o in outputs if o.requires_grad)
        self._record = record

    def push(self, direction: Tensor) -> tuple[Tensor, ...]:
        """Return J v for a direction v, shaped like the images."""
        if self._record is not None:
            return self._product(direction)
        weights, pulled = self._pulled
        pushed = torch.autograd.grad(
            pulled, weights, direction, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return tuple(t.detach() for t in pushed)

    def push_many(self, directions: Tensor) -> tuple[Tensor, ...]:
        """Return J v (n, ...) for directions v (n, ...), each shaped like the images."""
        if self._record is not None:
            return tuple(torch.func.vmap(self._product)(directions))
        weights, pulled = self._pulled
        pushed = torch.autograd.grad(
            pulled,
            weights,
            directions,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
            is_grads_batched=True,
        )
        return tuple(t.detach() for t in pushed)

    @cached_property
    def _pulled(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """J^T w with autograd's graph of w, and w."""
        weights = tuple(torch.zeros_like(o).requires_grad_() for o in self.values)
        moving = tuple(w for w, moves in zip(weights, self._moving, strict=True) if moves)
        with torch.enable_grad():
            return weights, torch.autograd.grad(self._outputs, self._point, moving, create_graph=True)[0]

    def pull(self, weights: Sequence[Tensor]) -> Tensor:
        """Return J^T w for one weight w for each output."""
        moving = tuple(w for w, moves in zip(weights, self._moving, strict=True) if moves)
        return torch.autograd.grad(self._outputs, self._point, moving, retain_graph=True)[0]

    def pull_many(self, weights: Sequence[Tensor]) -> Tensor:
        """Return J^T w (n, ...) for n weights for each output (n, ...)."""
        moving = tuple(w for w, moves in zip(weights, self._moving, strict=True) if moves)
        return torch.autograd.grad(self._outputs, self._point, moving, retain_graph=True, is_grads_batched=True)[0]


def _remove_zero_terms(graph: fx.Graph) -> None:
    """Drop the derivatives with respect to constants: products with a zero tensor, and sums with one."""
    zero: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        inputs = [a for a in node.args if isinstance(a, fx.Node)]
        zeros = [a in zero for a in inputs]
        if (
            node.target in _ZEROS
            or (node.target in _KEEP_ZERO and zeros[:1] == [True])
            or (node.target in _PRODUCTS and any(zeros))
            or (node.target is torch.ops.aten.convolution.default and node.args[2] is None and any(zeros))
        ):
            zero.add(node)
        elif node.target is torch.ops.aten.add.Tensor and len(inputs) == 2 and any(zeros):
            other = inputs[1] if zeros[0] else inputs[0]
            if all(zeros):
                zero.add(node)
            elif not node.kwargs and _shape(other) == _shape(node):
                node.replace_all_uses_with(other)
    graph.eliminate_dead_code()


def _shape(node: fx.Node) -> object:
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    return None if value is None else tuple(value.shape)


def _length(tensors: Sequence[Tensor]) -> float:
    """Return the length of tensors as one vector."""
    return math.hypot(*(float(t.double().norm()) for t in tensors))


def _split(module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Split a record of (point, direction) -> (values, J v) into the values, with what the rest needs, and the rest.

    The number of values is returned, too.
    """
    nodes = list(module.graph.nodes)
    _, direction = (n for n in nodes if n.op == "placeholder")
    result = nodes[-1].args[0]
    values, tangents = result[: len(result) // 2], result[len(result) // 2 :]
    moving = {direction}
    for node in nodes:
        if any(n in moving for n in node.all_input_nodes):
            moving.add(node)
    linear = [n for n in nodes if n in moving and n.op != "output"]
    kept = list(
        dict.fromkeys(
            n
            for user in (*linear, nodes[-1])
            for n in (user.all_input_nodes if user.op != "output" else tangents)
            if isinstance(n, fx.Node) and n not in moving
        )
    )
    first, second = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in moving and node.op != "output":
            copies[node] = first.node_copy(node, lambda n: copies[n])
    first.output((*(copies[n] for n in values), *(copies[n] for n in kept)))
    first.eliminate_dead_code()
    moved = {direction: second.placeholder("direction")}
    for place, node in enumerate(kept):
        moved[node] = second.placeholder(f"kept_{place}")
    for node in linear:
        if node is not direction:
            moved[node] = second.node_copy(node, lambda n: moved[n])
    second.output(tuple(moved[n] for n in tangents))
    second.eliminate_dead_code()
    return fx.GraphModule(module, first), fx.GraphModule(module, second), len(values)
