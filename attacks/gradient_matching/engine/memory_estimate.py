"""Estimates what a search will keep in memory, before it begins."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attacks.gradient_matching.engine.batching import BatchableProblem
from attacks.gradient_matching.engine.problem import MatchingProblem, Variables
from fl.aggregated_view import joint_schedule
from fl.types import Schedule
from fl.view import ServerView

GIB = 2**30
SPARE = 1.4
"""What the derivative holds for a while, and what the allocator loses, beside what is kept: measured, 1.3 to 2."""


CACHE = 16 * 2**20
"""Bytes that the gradients of a stack may take up on a CPU. With more the stack goes slower than in parts, by a tenth
(0.1 million weights, 64 trials) to a half (2.2 million, 4 trials); measured on two processors, in float32."""


def trials_in_cache(view: ServerView) -> int:
    """Return how many trials' gradients stay in a CPU's caches, at least one; no bound on any other device."""
    if view.device.type != "cpu":
        return sys.maxsize
    weights = sum(weight.numel() for weight in view.client.task.parameters.values())
    return max(CACHE // max(weights * view.dtype.itemsize, 1), 1)


MAX_VIEWS_EACH = 16
"""Trials in one of several processes, at most: on a CPU larger stacks are hardly faster, and leave cores idle."""


def split_into_portions(views: Sequence[ServerView], stack: int, restarts: int) -> list[Sequence[int]]:
    """Return consecutive views whose trials fill one stack, as evenly as can be.

    Args:
        views: of one kind, as a rule; the first tells how many trials go well together.
        stack: trials at most.
        restarts: trials of each view.
    """
    if not views:
        return []
    most = MAX_VIEWS_EACH if views[0].device.type == "cpu" else stack
    together = max(min(stack, trials_in_cache(views[0]), most) // restarts, 1)
    parts = -(-len(views) // together)
    bounds = [len(views) * i // parts for i in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def bytes_per_trial(problem: MatchingProblem, variables: Variables) -> int:
    """Return bytes that it takes to differentiate the objective of one guess, about.

    They grow with the local steps: every step's activations, gradient and the derivative's own intermediate values
    stay until the last step has been taken. So the objective is evaluated with one step of each phase, then with a
    second one of each in turn, and the other steps are taken to cost the same. Batches count as large as the largest.

    Args:
        problem: of a view with a known schedule.
        variables: a guess (no dimension for the stack).
    """
    rounds = [replace(part, earlier=()) for part in (problem, *problem.earlier)]
    return round(SPARE * sum(_bytes_of_round(part, variables) for part in rounds))


def _bytes_of_round(problem: MatchingProblem, variables: Variables) -> int:
    """Return the bytes that autograd keeps for all steps of a round."""
    counts = [len(steps) for steps in problem.view.schedule or ()]
    ones = [min(count, 1) for count in counts]
    least = whole = _bytes_with_steps(problem, variables, ones)
    for phase, count in enumerate(counts):
        if count > 1:
            more = [n + (i == phase) for i, n in enumerate(ones)]
            whole += (_bytes_with_steps(problem, variables, more) - least) * (count - 1)
    return whole


def _bytes_with_steps(problem: MatchingProblem, variables: Variables, counts: Sequence[int]) -> int:
    """Return the bytes for so many steps of each phase, by trying."""
    return saved_bytes(replace(problem, view=_with_step_counts(problem.view, counts)), variables)


def saved_bytes(problem: BatchableProblem, variables: Variables) -> int:
    """Return the bytes that autograd keeps of one evaluation, its constants apart, by trying.

    Args:
        problem: any.
        variables: a guess (no dimension for the stack).
    """
    leaves = {name: value.detach().requires_grad_() for name, value in variables.items()}
    with torch.enable_grad():
        value = problem.value(leaves, problem.constants, problem.view.client, vmapped=False)
    given = {_storage_key(leaf) for leaf in pytree.tree_leaves(problem.constants) if isinstance(leaf, Tensor)}
    sizes = {_storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in _saved_tensors(value)}
    return sum(size for place, size in sizes.items() if place not in given)


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _saved_tensors(value: Tensor) -> Iterator[Tensor]:
    """Return every tensor that the graph behind `value` holds on to.

    The graph is read, not watched as it grows (`saved_tensors_hooks`): methods that take derivatives by torch.func
    allow no hooks.
    """
    names: dict[type, list[str]] = {}
    seen, todo = set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_saved_")]
        yield from getattr(node, "saved_tensors", ())  # of a function with a derivative of its own
        for name in names[kind]:
            held = getattr(node, name)
            yield from (x for x in (held if isinstance(held, tuple | list) else [held]) if isinstance(x, Tensor))


def _with_step_counts(view: ServerView, counts: Sequence[int]) -> ServerView:
    """Return the view with only the largest steps of each phase, in no known order."""
    assert view.schedule is not None
    parts = tuple(replace(part, schedule=_largest_steps(part.schedule or (), counts)) for part in view.parts)
    schedule = joint_schedule(parts) if parts else _largest_steps(view.schedule, counts)
    return replace(view, schedule=schedule, parts=parts, order=None, draws=None)


def _largest_steps(schedule: Schedule, counts: Sequence[int]) -> Schedule:
    """Return the `counts` largest steps of each phase."""
    return tuple(tuple(sorted(phase, key=sum, reverse=True)[:n]) for phase, n in zip(schedule, counts, strict=True))
