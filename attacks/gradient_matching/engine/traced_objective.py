"""A search's objective and its gradient as one list of tensor operations, replayed without autograd or Python.

Each iteration of a search does the same operations on other numbers. Recorded once, derivative of the derivative
included, they are replayed by what torch itself dispatches: no graph is built, nothing is kept longer than it is
needed, and what depends on no variable is computed once (unless it is large, `MAX_FOLDED_BYTES`). The operations are
those of the evaluation by autograd, in its order, so the numbers are the same, on a CPU to the bit: a record of which
that is not so is not used.

Where it is asked for, `torch.compile` makes machine code of a record: operations on the same numbers are fused, so that
these pass through memory once. On a CPU that was measured to be 1.4 to 2.5 times as fast, rounds differently, takes a
C++ compiler and half a minute to two.

On a GPU either is replayed as one CUDA graph. An iteration on a small network is some six hundred operations of a few
microseconds each, and Python takes longer to start one. A graph is captured once for tensors at fixed addresses: what
is given is copied there, and what is found is copied away, since the next replay writes over it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from attacks.gradient_matching.engine.problem import Evaluation
from fl.seeds import stream

log = logging.getLogger(__name__)

ReferencePoints = Sequence[tuple[dict[str, Tensor], object]]
"""Where to compare: variables, and what the evaluation itself gives there."""

STEADY_EVALUATIONS = 10
"""Evaluations of the same trials before they are recorded: what ends at once, and what is set up once, is over."""
MIN_EVALUATIONS_TO_TRACE = 300
"""Evaluations that must be ahead: recording costs as much as a hundred of a single trial, or thirty of a stack."""

MIN_EVALUATIONS_TO_COMPILE = 2000
"""Evaluations that must be ahead to be compiled, which costs as much as thousands of a small stack."""
COMPILED_TOLERANCE = 1e4
"""How far a trial's objective and gradient by compiled code may be from the record's, in units of rounding."""
MAX_FOLDED_BYTES = 2**26
"""Bytes of what depends on no variable up to which it is kept; what is larger is computed at each replay."""

TRACING_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What recording raises where an operation, or a decision by a tensor's number, can't be recorded."""
COMPILING_ERRORS = (*TRACING_ERRORS, ImportError, OSError, MemoryError)
"""What compiling raises, here or by a missing or broken compiler."""


def trace(evaluate: Evaluation, variables: dict[str, Tensor], *, compiled: bool = False) -> Evaluation | None:
    """Return the evaluation as a list of operations, or None where it can't be one.

    None are evaluations that draw random numbers, decide by numbers that depend on the variables (how many entries a
    mask picks, for one), or change tensors of their own; the list is compared with the evaluation itself at another
    point before it is given away.

    Args:
        evaluate: objectives (T,) and their gradients by variable; pure.
        variables: by name; lists hold for those of these shapes, types and devices only.
        compiled: make machine code of the list. Where that can't be done, a warning says why and the list is used.
    """
    draw = stream(0, "recorded")
    noise = {name: torch.randn(value.shape, generator=draw).to(value) for name, value in variables.items()}
    elsewhere = {name: value + noise[name] for name, value in variables.items()}
    points = [(point, evaluate(point)) for point in (elsewhere, variables)]
    try:
        module = _record(evaluate, variables)
        if not _is_replayable(module):
            log.debug("evaluated without a record: it draws or changes tensors")
            return None
        _fold_constants(module)
    except TRACING_ERRORS as error:
        log.debug("evaluated without a record: %s", str(error).splitlines()[:1])
        return None

    def replay(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            values, grads = module({name: value.detach() for name, value in given.items()})
        return values, dict(grads)

    try:
        same = all(_all_equal(found, replay(point)) for point, found in points)
    except RuntimeError as error:  # some layers (recurrent ones) keep between calls what no list of operations has
        log.debug("evaluated without a record: %s", str(error).splitlines()[:1])
        return None
    if not same:
        log.debug("evaluated without a record: it differs")
        return None
    fast = _as_machine_code(module, points) if compiled else None
    return _as_cuda_graph(fast or replay, points) or (replay if fast is None else _CompiledWithFallback(fast, replay))


def _record(evaluate: Evaluation, variables: dict[str, Tensor]) -> fx.GraphModule:
    """Return the operations of an evaluation; one mode for what stands in the notes takes a third off the time."""
    # seconds to import, and short searches don't need it
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(lambda given: evaluate(given))(variables)


def _as_cuda_graph(evaluate: Evaluation, points: ReferencePoints) -> CapturedGraph | None:
    """Return `evaluate` as a CUDA graph; None on another device, or where that can't be done or gives other numbers."""
    variables, _ = points[-1]
    if not variables or not all(value.is_cuda for value in variables.values()):
        return None
    try:
        graph = CapturedGraph(evaluate, variables)
        if all(_all_close(graph(point), found) for point, found in points):
            return graph
        reason = "its numbers differ by more than rounding"
    except COMPILING_ERRORS as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    log.info("searching without a CUDA graph: %s", reason)
    return None


def _as_machine_code(module: fx.GraphModule, points: ReferencePoints) -> Evaluation | None:
    """Return the list as machine code, or None where that can't be done or its numbers at `points` are others."""
    try:
        from torch._inductor import config

        fast = torch.compile(module, fullgraph=True, dynamic=False)

        def call(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            with torch.no_grad():
                values, grads = fast({name: value.detach() for name, value in given.items()})
            return values, dict(grads)

        with config.patch(compile_threads=1):  # a search keeps to its process, which may have others beside it
            same = all(_all_close(call(point), found) for point, found in points)
    except COMPILING_ERRORS as error:
        _warn_not_compiled(error)
        return None
    if not same:
        log.warning("searching without compiled code: its numbers differ by more than rounding")
        return None
    return call


class _CompiledWithFallback:
    """Compiled code, until it fails; then the record."""

    def __init__(self, fast: Evaluation, sure: Evaluation) -> None:
        self.fast: Evaluation | None = fast
        self.sure = sure

    def __call__(self, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.fast is not None:
            try:
                return self.fast(given)
            except COMPILING_ERRORS as error:  # it may compile again, for another number of threads, say
                _warn_not_compiled(error)
                self.fast = None
        return self.sure(given)


def _warn_not_compiled(error: Exception) -> None:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    log.warning("searching without compiled code (is a C++ compiler installed?): %s", reason)


def _fold_constants(module: fx.GraphModule) -> None:
    """Compute what depends on no variable now, instead of at each replay (and of bringing it to a GPU each time).

    Nothing that it was computed from may change afterwards.
    """
    written = _mutated_nodes(module)
    known: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and node not in written and all(x in known for x in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.no_grad():
                value = node.target(*args, **kwargs)
            if sum(part.nbytes for part in pytree.tree_leaves(value) if isinstance(part, Tensor)) <= MAX_FOLDED_BYTES:
                known[node] = value
    for number, (node, value) in enumerate(known.items()):
        needed = any(user not in known and user.op != "output" for user in node.users)  # what is given away is not kept
        if node.op == "call_function" and isinstance(value, Tensor) and needed:
            module.register_buffer(f"_known{number}", value)
            with module.graph.inserting_before(node):
                kept = module.graph.get_attr(f"_known{number}")
            node.replace_all_uses_with(kept, lambda user: user.op != "output")
    module.graph.eliminate_dead_code()
    module.recompile()


def _mutated_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """Return the tensors that operations change in place, and those these are views of."""
    found = {given for node in module.graph.nodes if _mutates(node) for given in node.all_input_nodes}
    rest = list(found)
    while rest:
        node = rest.pop()
        if _may_share_memory(node):
            rest += [given for given in node.all_input_nodes if given not in found]
            found.update(node.all_input_nodes)
    return found


def _may_share_memory(node: fx.Node) -> bool:
    """Return whether a node's result may share memory with its arguments; True for what is no operation of torch."""
    operation = node.target
    return not isinstance(operation, torch._ops.OpOverload) or any(r.alias_info for r in operation._schema.returns)


def _mutates(node: fx.Node) -> bool:
    """Return whether an operation changes a tensor in place."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def _is_replayable(module: fx.GraphModule) -> bool:
    """Return whether a recorded list does the same at every point, and leaves nothing changed for the next time."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operation, given = node.target, pytree.tree_leaves((node.args, node.kwargs))
        if torch.Tag.nondeterministic_seeded in operation.tags or any(isinstance(x, torch.Generator) for x in given):
            return False
        if _mutates(node) and any(isinstance(x, fx.Node) and x.op == "get_attr" for x in given):
            return False
        by_mask = any(_recorded_dtype(x) in (torch.bool, torch.uint8) for x in given[1:])
        if torch.Tag.dynamic_output_shape in operation.tags and (by_mask or operation not in INDEXING_OPERATIONS):
            return False
        if torch.Tag.data_dependent_output in operation.tags:
            return False
    return True


INDEXING_OPERATIONS = (torch.ops.aten.index.Tensor,)
"""Operations whose result has an unknown shape if the index is a mask."""


def _recorded_dtype(node: object) -> torch.dtype | None:
    """Return the type of a recorded tensor; None for a constant."""
    found = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return getattr(found, "dtype", None)


def _all_equal(one: object, other: object) -> bool:
    """Return whether the numbers are the same, not-a-number included; on a GPU up to the order of sums."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(_equal_tensors(a, b) for a, b in pairs)


def _all_close(one: object, other: object) -> bool:
    """Return whether the numbers are the same in each trial (their first dimension) up to rounding."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(a.shape == b.shape and all(map(_close_tensors, a, b)) for a, b in pairs)


def _close_tensors(a: Tensor, b: Tensor) -> bool:
    fine = b.isfinite()
    if not torch.equal(fine, a.isfinite()):
        return False
    rounding = COMPILED_TOLERANCE * torch.finfo(b.dtype).eps
    same = torch.equal(a[~fine].nan_to_num(), b[~fine].nan_to_num())
    return same and bool((a[fine] - b[fine]).norm() <= rounding * b[fine].norm())


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    fine = b.isfinite()
    if not torch.equal(fine, a.isfinite()):
        return False
    a, b = a[fine], b[fine]
    return torch.equal(a, b) if a.device.type == "cpu" else bool((a - b).norm() <= 1e-4 * b.norm())


WARMUP_RUNS = 3
"""Calls before a capture, in which libraries choose and set up what they use."""


class CapturedGraph:
    """`evaluate` at variables of the shapes of `variables`, as one CUDA graph.

    Args:
        evaluate: objectives (T,) and gradients by variable; no operation that waits for the device, none that draws.
        variables: by name, on one CUDA device.

    Raises:
        RuntimeError: if it can't be captured.
    """

    def __init__(self, evaluate: Evaluation, variables: dict[str, Tensor]) -> None:
        self.evaluate = evaluate  # the graph reads its constants by address: they must not be freed
        self.given = {name: value.detach().clone() for name, value in variables.items()}
        device = next(iter(self.given.values())).device
        with torch.cuda.device(device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARMUP_RUNS):
                    evaluate(self.given)
            torch.cuda.current_stream().wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.values, self.grads = evaluate(self.given)

    def __call__(self, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objectives (T,) and gradients by variable at `given`."""
        for name, value in given.items():
            self.given[name].copy_(value.detach())
        self.graph.replay()
        return self.values.clone(), {name: value.clone() for name, value in self.grads.items()}
