"""Records what a network computes from images as the list of tensor operations that it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fl.runtime.double_precision import PrecisionError
from fl.runtime.interruption import ask_now

IMAGE = -1
"""Number of the source that stands for the images."""
MODEL_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError, TypeError)
"""What a network raises on an image that it does not take."""


@dataclass(frozen=True)
class Ref:
    """One of the tensors that flow through a network.

    Attributes:
        node: number of the operation that made it; below zero for a source (the image, a parameter, a buffer).
        output: which of the operation's results it is.
    """

    node: int
    output: int = 0


@dataclass
class Node:
    """One operation.

    Attributes:
        op: of aten.
        leaves: its arguments, flat, with a `Ref` in place of each tensor that comes from a source.
        spec: how they are nested.
        outputs: the tensors that it returned, as they were then.
        flows: whether the image reaches it.
        sources: names of the parameters and buffers that reach it otherwise than by way of the image's flow.
        place: name of the module in whose forward it ran.
        kind: that module's class.
    """

    op: OpOverload
    leaves: list[Any]
    spec: pytree.TreeSpec
    outputs: list[Tensor]
    flows: bool
    sources: frozenset[str]
    place: str
    kind: str

    @property
    def refs(self) -> list[Ref]:
        """The tensors that it takes."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Ref)]

    @property
    def function_of_one(self) -> Hashable | None:
        """What the operation does to its only tensor: equal where others do the same. None where it takes others."""
        if len(self.refs) != 1 or any(isinstance(leaf, Tensor) for leaf in self.leaves):
            return None
        leaves = tuple("" if isinstance(leaf, Ref) else repr(leaf) for leaf in self.leaves)
        return self.op, leaves, repr(self.spec), tuple((out.shape, out.dtype) for out in self.outputs)

    @property
    def operation(self) -> str:
        """The operation's name without that of its overload."""
        return str(self.op.overloadpacket.__name__).strip("_")

    @property
    def args(self) -> list[Any]:
        """Positional arguments by the schema's order, defaults filled in; `Ref` for what comes from a source."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        declared = self.op._schema.arguments
        return [
            args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            for i, argument in enumerate(declared)
        ]

    def __str__(self) -> str:
        """Return where it stands in the model, in words."""
        plain = self.operation.removeprefix("native_").removesuffix("_with_indices")
        if self.kind and self.kind.lower().replace("2d", "") == plain.replace("_", "").replace("2d", ""):
            return f"{self.place} ({self.kind})"
        return f"{self.operation} in {self.place or 'the forward'}" + (f" ({self.kind})" if self.place else "")


@dataclass(frozen=True)
class Segment:
    """What happens between two tensors through which all of the image's flow passes."""

    nodes: tuple[int, ...]
    start: Ref
    end: Ref


@dataclass
class Graph:
    """The operations of one run.

    Attributes:
        image: what flowed: one image or several (B, C, H, W).
        sources: names of parameters and buffers, by the number of their source.
        tensors: of them, by name.
        parameters: names of those that are parameters.
        nodes: in the order they ran.
        returned: what the network returned.
    """

    image: Tensor
    sources: dict[int, str]
    tensors: dict[str, Tensor]
    parameters: frozenset[str]
    nodes: list[Node] = field(default_factory=list)
    returned: Ref | None = None

    def value(self, ref: Ref) -> Tensor:
        """Return the tensor as it was in this run."""
        if ref.node >= 0:
            return self.nodes[ref.node].outputs[ref.output]
        return self.image if ref.node == IMAGE else self.tensors[self.sources[ref.node]].detach()

    def depends_on_image(self, ref: Ref) -> bool:
        """Return whether it depends on the image."""
        return ref.node == IMAGE or (ref.node >= 0 and self.nodes[ref.node].flows)

    def origins(self, ref: Ref) -> frozenset[str]:
        """Return parameters and buffers that a tensor that does not depend on the image is made of."""
        if ref.node >= 0:
            return self.nodes[ref.node].sources
        return frozenset() if ref.node == IMAGE else frozenset({self.sources[ref.node]})

    def replay(self, nodes: Sequence[int], end: Ref, known: Mapping[Ref, Tensor]) -> Tensor:
        """Return the tensor `end` by way of `nodes`, where those of `known` have other values.

        A known tensor of the recorded shape is laid out in memory as the recorded one was, which some operations
        (`view`, `as_strided`) go by.

        Args:
            nodes: numbers of operations, in order.
            end: the tensor wanted.
            known: values of tensors in place of those recorded.
        """
        return self.replay_values(nodes, known)[end]

    def replay_values(self, nodes: Sequence[int], known: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        """Return all tensors that `nodes` make, and those of `known`, which have other values than those recorded."""
        found = {ref: _laid_out_as(value, self.value(ref)) for ref, value in known.items()}
        for number in nodes:
            ask_now()
            node = self.nodes[number]
            leaves = [found.get(leaf, self.value(leaf)) if isinstance(leaf, Ref) else leaf for leaf in node.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, node.spec)
            if node.op._schema.is_mutable:
                written = [i for i, a in enumerate(node.op._schema.arguments[: len(args)]) if _is_written(a)]
                args = [a.clone() if i in written and isinstance(a, Tensor) else a for i, a in enumerate(args)]
            returned = [r for r in pytree.tree_leaves(node.op(*args, **kwargs)) if isinstance(r, Tensor)]
            found |= {Ref(number, k): value for k, value in enumerate(returned)}
        return found

    def as_parameter(self, ref: Ref) -> tuple[str, Tensor | None] | None:
        """Return the parameter that a tensor rearranges, and where each number stands in it.

        Where the tensor does not hold every number of one parameter once, return None.

        The places (shape of the tensor) count the parameter's numbers row by row; None where it is the parameter.
        """
        names = self.origins(ref)
        if len(names) != 1 or not names <= self.parameters:
            return None
        (name,) = names
        if ref.node < 0:
            return name, None
        source = next(Ref(number) for number, other in self.sources.items() if other == name)
        sent, value = self.value(source), self.value(ref)
        if value.numel() != sent.numel():
            return None
        if _permutes_memory(sent, value):  # as a transpose does, of which nothing has to be worked out
            same = value.shape == sent.shape and value.stride() == sent.stride()
            places = torch.arange(0 if same else sent.numel(), device=sent.device)
            return name, None if same else places.as_strided(value.shape, value.stride())
        numbers = torch.arange(sent.numel(), dtype=sent.dtype, device=sent.device).view_as(sent)
        try:
            places = self.replay(self.operations_behind(ref), ref, {source: numbers})
        except MODEL_ERRORS:
            return None
        places = places.round().long().clamp(0, sent.numel() - 1)
        whole = bool((places.flatten().sort().values == numbers.flatten()).all())
        if not whole or not torch.equal(sent.flatten()[places], value):
            return None
        return name, None if value.shape == sent.shape and torch.equal(places, numbers.long()) else places

    def as_scaled_parameter(self, ref: Ref) -> tuple[str, Tensor, Tensor] | None:
        """Return the parameter whose numbers, each times a factor of its own, a tensor is: name, places, factors.

        So are weights under a mask (pruned ones), and those that a constant scales. Places and factors have the
        tensor's shape, which is the parameter's or, of a matrix, that turned. Else None.
        """
        names = self.origins(ref) & self.parameters
        if len(names) != 1 or ref.node < 0:
            return None
        (name,) = names
        source = next(Ref(number) for number, other in self.sources.items() if other == name)
        sent, value = self.value(source), self.value(ref)
        behind = self.operations_behind(ref)

        def made(numbers: Tensor) -> Tensor:
            return self.replay(behind, ref, {source: numbers})

        try:
            offset, factors = made(torch.zeros_like(sent)), made(torch.ones_like(sent))
        except MODEL_ERRORS:
            return None
        if bool(offset.any()) or not bool(factors.isfinite().all()) or not bool(factors.any()):
            return None
        index = torch.arange(sent.numel(), device=sent.device).view_as(sent)
        for places in (index, index.T if index.ndim == 2 else index):
            if places.shape == value.shape and torch.allclose(value, sent.flatten()[places] * factors):
                return name, places, factors
        return None

    def operations_behind(self, ref: Ref) -> list[int]:
        """Return the operations that lead from sources to a tensor, in order."""
        open_, found = [ref.node], set[int]()
        while open_:
            number = open_.pop()
            if number >= 0 and number not in found:
                found.add(number)
                open_ += [other.node for other in self.nodes[number].refs]
        return sorted(found)

    def used_operations(self) -> list[int]:
        """Return the operations through which the image reaches what is returned, in order."""
        assert self.returned is not None
        return [number for number in self.operations_behind(self.returned) if self.nodes[number].flows]

    def segments(self) -> list[Segment]:
        """Return the flow cut wherever all of it passes through one tensor."""
        assert self.returned is not None
        alive = self.used_operations()
        last: dict[Ref, int] = {self.returned: len(self.nodes)}
        for number in alive:
            for ref in self.nodes[number].refs:
                if self.depends_on_image(ref):
                    last[ref] = max(last.get(ref, -1), number)
        segments: list[Segment] = []
        nodes: list[int] = []
        start, reach = Ref(IMAGE), last.get(Ref(IMAGE), -1)
        for number in alive:
            nodes.append(number)
            used = [(ref, last[ref]) for ref in map(lambda k: Ref(number, k), range(len(self.nodes[number].outputs)))
                    if ref in last]  # fmt: skip
            if reach <= number and len(used) == 1:
                segments.append(Segment(tuple(nodes), start, used[0][0]))
                start, nodes = used[0][0], []
            reach = max([reach, *(end for _, end in used)])
        return segments


def trace_operations(model: nn.Module, images: Tensor) -> Graph | str:
    """Return what `model` computes from `images`, or why that can't be told.

    The model is run as it is, without gradients, in the precision of its weights: casts to a lower one are left out,
    but for those that round the pixels themselves by more than half precision does.
    Attention is recorded in plain steps (products and a softmax), not as one fused operation.

    Args:
        model: the network, in the mode in which it is looked at.
        images: (B, C, H, W). Numbers that forward takes from their shape stand in the graph as they are at this B.
    """
    found = _trace(model, images, model)
    if isinstance(found, _PartWritten):
        # with what is written into a part of a tensor put into a new tensor in its place
        functional = _trace(model, images, torch.func.functionalize(model))
        return functional if isinstance(functional, Graph) else str(found)
    return found


class _PartWritten(str):
    """Why a record ended: the network uses a tensor after changing a part of it in place."""


def _trace(model: nn.Module, images: Tensor, run: Callable[[Tensor], object]) -> Graph | str:
    """Return what `run` computes by the tensors of `model`."""
    recorder = _Recorder(model, images)
    with torch.no_grad(), _plain_attention(), _track_modules(model, recorder), _CircularPadding(), recorder:
        try:
            returned = run(recorder.graph.image)
        except _UnreadableError as error:
            return _PartWritten(error)
        except PrecisionError as error:
            return str(error)
        except MODEL_ERRORS as error:
            many = "one image by itself" if len(images) == 1 else f"{len(images)} images"
            return f"the network does not run on {many}: {error}"
    if not isinstance(returned, Tensor):
        return f"the network returns no tensor but a {type(returned).__name__}"
    end = recorder.ref(returned)
    if not isinstance(end, Ref) or not recorder.graph.depends_on_image(end):
        return "what the network returns does not depend on the image"
    recorder.graph.returned = end
    if recorder.random:
        return f"{recorder.random} draws random numbers"
    return recorder.graph


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Have attention computed by the operations it is made of."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _CircularPadding(TorchFunctionMode):
    """Has circular padding done by joining parts, where torch writes them into an empty tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip(("input", "pad", "mode"), args, strict=False)) | (kwargs or {})
        if getattr(func, "__name__", "") != "pad" or given.get("mode") != "circular":
            return func(*args, **(kwargs or {}))
        value: Tensor = given["input"]
        for i in range(len(given["pad"]) // 2):
            (before, after), size = given["pad"][2 * i : 2 * i + 2], value.shape[-1 - i]
            if not (0 <= before <= size and 0 <= after <= size):  # cuts off, or what torch refuses
                return func(*args, **(kwargs or {}))
            dim = value.ndim - 1 - i
            ends = value.narrow(dim, size - before, before), value, value.narrow(dim, 0, after)
            value = torch.cat([part for part in ends if part.shape[dim]], dim)
        return value


def _permutes_memory(sent: Tensor, value: Tensor) -> bool:
    """Return whether a tensor is the memory of one that is laid out row by row, each of its numbers once."""
    if not sent.is_contiguous() or value.is_sparse or value.data_ptr() != sent.data_ptr() or value.dtype != sent.dtype:
        return False
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return step == sent.numel()


def _laid_out_as(value: Tensor, recorded: Tensor) -> Tensor:
    """Return `value` in the memory layout of a recorded tensor, where it has its shape."""
    if value.shape != recorded.shape or value.stride() == recorded.stride():
        return value
    if 0 in recorded.stride() or not torch.ops.aten.is_non_overlapping_and_dense(recorded):
        return value
    return torch.empty_strided(value.shape, recorded.stride(), dtype=value.dtype, device=value.device).copy_(value)


def first_difference(one: Graph, other: Graph) -> str | None:
    """Return the first operation that two runs of a network on two images do not share, or None."""
    for mine, theirs in zip(one.nodes, other.nodes, strict=False):
        same = mine.op is theirs.op and len(mine.leaves) == len(theirs.leaves) and mine.place == theirs.place
        if not same or not all(map(_same_operation, mine.leaves, theirs.leaves)):
            return str(mine)
    if len(one.nodes) != len(other.nodes) or one.returned != other.returned:
        return "the end of the network"
    return None


def _same_operation(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


class _UnreadableError(Exception):
    """The flow can't be followed."""


class _Recorder(TorchDispatchMode):
    """Notes every operation that takes something which comes from a source.

    A tensor is known by where and how it lies in memory: views get new Python objects at every turn. All of them are
    kept until the end, so that no memory is used twice.
    """

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        names = dict(enumerate(tensors))
        self.graph = Graph(
            image.clone(),
            {-2 - i: n for i, n in names.items()},
            tensors,
            frozenset(n for n, _ in model.named_parameters()),
        )
        self.stack: list[tuple[str, str]] = [("", "")]
        self.random = ""
        self._kept: dict[int, list[Tensor]] = {}  # by the memory that they lie in
        self._refs: dict[Any, Ref | None] = {}
        self._written: set[int] = set()
        for number, name in self.graph.sources.items():
            if tensors[name].numel():
                self._bind(tensors[name], Ref(number))
        self._bind(self.graph.image, Ref(IMAGE))

    def ref(self, value: Tensor) -> Ref | Tensor:
        """Return what stands for a tensor: itself where it comes from no source."""
        key = _key(value)
        found = self._refs.get(key, value)
        if found is None or (found is value and key[0] in self._written):
            place, kind = self.stack[-1]
            where = f"{place} ({kind})" if place else "the forward"
            raise _UnreadableError(f"{where} goes on with a tensor of which it changed a part in place")
        return found

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy.default and args[0].dtype == args[1].dtype:
            # what functionalizing makes of a copy into a part: as operations that have a derivative
            spread = self.__torch_dispatch__(torch.ops.aten.expand.default, types, (args[1], list(args[0].shape)))
            contiguous = {"memory_format": torch.contiguous_format}
            return self.__torch_dispatch__(torch.ops.aten.clone.default, types, (spread,), contiguous)
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        refs = [self.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        taken = [ref for ref in refs if isinstance(ref, Ref)]
        if not taken:
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.random = f"{func.overloadpacket.__name__} in {self.stack[-1][0] or 'the forward'}"
            return func(*args, **(kwargs or {}))
        flows = any(self.graph.depends_on_image(ref) for ref in taken)
        if flows and torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs or {}):
            self.random = f"{func.overloadpacket.__name__} in {self.stack[-1][0] or 'the forward'}"
        if func is torch.ops.aten._to_copy.default:
            kwargs, leaves, refs, spec = self._keep_precision(args, dict(kwargs or {}))
        written = [
            v for a, v in zip(func._schema.arguments, args, strict=False) if _is_written(a) and isinstance(v, Tensor)
        ]
        for value in written:
            self._save_before_write(value)
        result = func(*args, **(kwargs or {}))
        outputs = [r for r in pytree.tree_leaves(result) if isinstance(r, Tensor)]
        if not written and len(outputs) == 1 and self._refs.get(_key(outputs[0])) in taken:
            return result  # the same numbers in the same place
        if func is torch.ops.aten.as_strided.default and torch.equal(args[0], result):
            self._bind(result, taken[0])  # only strides of dimensions of size 1 differ
            return result
        origins = [self.graph.origins(ref) for ref in taken if not self.graph.depends_on_image(ref)]
        self.graph.nodes.append(Node(func, refs, spec, outputs, flows, frozenset().union(*origins), *self.stack[-1]))
        for value in written:
            self._invalidate_aliases(value)
        for k, output in enumerate(outputs):
            self._bind(output, Ref(len(self.graph.nodes) - 1, k))
        return result

    def _keep_precision(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Any], list[Any], Any]:
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point and args[0].is_floating_point():
            raised = args[0].dtype != self.graph.image.dtype == dtype  # what meets numbers of that precision
            if not raised and not self._rounds_pixels(args[0], dtype):
                kwargs["dtype"] = args[0].dtype
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return kwargs, leaves, [self.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec

    def _rounds_pixels(self, value: Tensor, dtype: torch.dtype) -> bool:
        """Return whether a cast rounds pixels, before any parameter has met them, by more than half precision does.

        What follows takes other pixels than the image's then: those of bfloat16 are off by up to half a level.
        """
        ref = self.ref(value)
        if torch.finfo(dtype).eps <= torch.finfo(torch.float16).eps or not isinstance(ref, Ref):
            return False
        behind = (self.graph.nodes[number] for number in self.graph.operations_behind(ref))
        return self.graph.depends_on_image(ref) and not any(node.sources & self.graph.parameters for node in behind)

    def _bind(self, value: Tensor, ref: Ref) -> None:
        key = _key(value)
        self._kept.setdefault(key[0], []).append(value)
        self._refs[key] = ref

    def _save_before_write(self, value: Tensor) -> None:
        """Keep a copy of what is about to be overwritten."""
        ref = self._refs.get(_key(value))
        if ref is None:
            return
        if ref.node >= 0:
            self.graph.nodes[ref.node].outputs[ref.output] = value.clone()
        elif ref.node == IMAGE:
            self.graph.image = value.clone()
        else:
            self.graph.tensors[self.graph.sources[ref.node]] = value.clone()

    def _invalidate_aliases(self, value: Tensor) -> None:
        """Forget whatever else lies in the same memory, which is no longer what it was."""
        storage = _key(value)[0]
        self._written.add(storage)
        first, last = _extent(value)
        for kept in self._kept.get(storage, ()):
            start, end = _extent(kept)
            key = _key(kept)
            if start <= last and first <= end and key in self._refs:
                self._refs[key] = None


def _key(value: Tensor) -> tuple[Any, ...]:
    where = value.untyped_storage()._cdata
    return where, value.storage_offset(), tuple(value.shape), tuple(value.stride()), value.dtype


def _extent(value: Tensor) -> tuple[int, int]:
    """Return the first and the last number of its memory that a tensor may hold."""
    start = int(value.storage_offset())
    return start, start + sum((int(n) - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _draws_nothing(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation that could draw random numbers is told not to (`training=False`)."""
    given = {a.name: a.default_value for a in func._schema.arguments}
    given |= {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    return given.get("training", given.get("train")) is False or given.get("dropout_p", given.get("dropout")) == 0.0


@contextmanager
def _track_modules(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Tell the recorder in which module each operation runs."""

    def enter(name: str, kind: str) -> Callable[..., None]:
        return lambda *_: recorder.stack.append((name, kind))

    def leave(*_: Any) -> None:
        recorder.stack.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name, type(module).__name__)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
