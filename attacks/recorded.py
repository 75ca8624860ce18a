"""A search's objective and its gradient as one list of tensor operations, replayed without autograd or Python.

Each iteration of a search does the same operations on other numbers. Recorded once, derivative of the derivative
included, they are replayed by what torch itself dispatches: no graph is built, nothing is kept longer than it is
needed, and what depends on no variable is computed once. The operations are those of the evaluation by autograd, in
its order, so the numbers are the same, on a CPU to the bit: a record of which that is not so is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fl.seeds import stream

log = logging.getLogger(__name__)

Evaluation = Callable[[dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]

STEADY = 10
"""Evaluations of the same trials before they are recorded: what ends at once, and what is set up once, is over."""
WORTH = 300
"""Evaluations that must be ahead: recording costs as much as a hundred of a single trial, or thirty of a stack."""

REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What recording raises where an operation, or a decision by a tensor's number, can't be recorded."""


def record(evaluate: Evaluation, variables: dict[str, Tensor]) -> Evaluation | None:
    """The evaluation as a list of operations, or None where it can't be one.

    None are evaluations that draw random numbers, decide by numbers that depend on the variables (how many entries a
    mask picks, for one), or change tensors of their own; the list is compared with the evaluation itself at another
    point before it is given away.

    Args:
        evaluate: objectives (T,) and their gradients by variable; pure.
        variables: by name; lists hold for those of these shapes, types and devices only.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds to import, and short searches don't need it

    draw = stream(0, "recorded")
    noise = {name: torch.randn(value.shape, generator=draw).to(value) for name, value in variables.items()}
    elsewhere = {name: value + noise[name] for name, value in variables.items()}
    points = [(point, evaluate(point)) for point in (elsewhere, variables)]
    try:
        module = make_fx(lambda given: evaluate(given))(variables)
    except REFUSALS as error:
        log.debug("evaluated without a record: %s", str(error).splitlines()[:1])
        return None
    if not _replayable(module):
        log.debug("evaluated without a record: it draws or changes tensors")
        return None
    module.graph.eliminate_dead_code()
    module.recompile()

    def replay(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            values, grads = module({name: value.detach() for name, value in given.items()})
        return values, dict(grads)

    if not all(_equal(found, replay(point)) for point, found in points):
        log.debug("evaluated without a record: it differs")
        return None
    return replay


def _replayable(module: fx.GraphModule) -> bool:
    """Whether a recorded list does the same at every point, and leaves nothing changed for the next time."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operation, given = node.target, pytree.tree_leaves((node.args, node.kwargs))
        if torch.Tag.nondeterministic_seeded in operation.tags or any(isinstance(x, torch.Generator) for x in given):
            return False
        if operation._schema.is_mutable and any(isinstance(x, fx.Node) and x.op == "get_attr" for x in given):
            return False
        by_mask = any(_dtype(x) in (torch.bool, torch.uint8) for x in given[1:])
        if torch.Tag.dynamic_output_shape in operation.tags and (by_mask or operation not in INDEXED):
            return False
        if torch.Tag.data_dependent_output in operation.tags:
            return False
    return True


INDEXED = (torch.ops.aten.index.Tensor,)
"""Of unknown shape only where the index is a mask."""


def _dtype(node: object) -> torch.dtype | None:
    """That of a recorded tensor; None of what is constant."""
    found = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return getattr(found, "dtype", None)


def _equal(one: object, other: object) -> bool:
    """Whether the numbers are the same, those that are none included; on a GPU up to what sums in another order."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(_same(a, b) for a, b in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    fine = b.isfinite()
    if not torch.equal(fine, a.isfinite()):
        return False
    a, b = a[fine], b[fine]
    return torch.equal(a, b) if a.device.type == "cpu" else bool((a - b).norm() <= 1e-4 * b.norm())
