"""Clients whose mean alone the server sees, as under secure aggregation: one view, made of parts.

A step of the group is that of all its clients together: its batch is the parts' batches one after the other. So an
order of the group is an ordinary one, and where every client takes one step the group is one client with all images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl.defense import overrides
from fl.local import sampling
from fl.tensors import Tensors, dense, weighted_sum
from fl.types import Candidate, Draws, Order, Schedule, Trace
from fl.view import Part, ServerView

if TYPE_CHECKING:
    from fl.types import Truth


@dataclass(frozen=True, kw_only=True)
class AggregationGroups:
    """Who is aggregated with whom: one fixed division of the participants into groups that do not overlap.

    Clients 0 to `size - 1` are the first group, the next `size` the second, and so on; those left over at the end join
    the last, so that no group is smaller than asked for. Groups that overlapped would give single updates away: three
    clients' follow from the means over the first two, the last two, and the first and the last.

    Attributes:
        size: fewest clients in a group; 1 aggregates none.
        participants: how many clients take part; those with higher numbers never do.
        asked: how many of them are asked for an update in a round.
    """

    size: int
    participants: int
    asked: int

    def of(self, number: int) -> range:
        """Return the clients that are aggregated with client `number`, itself among them.

        Raises:
            ValueError: a round has fewer clients than the group, or the client never takes part.
        """
        if self.size == 1:
            return range(number, number + 1)
        if self.size > self.asked:
            raise ValueError(
                f"expected groups of at most the {self.asked} clients of a round, got {self.size}; make them smaller"
            )
        if not 0 <= number < self.participants:
            raise ValueError(
                f"expected one of the {self.participants} clients that take part, got client {number}; no group has it"
            )
        last = self.participants // self.size - 1
        at = min(number // self.size, last)
        group = range(at * self.size, self.participants if at == last else (at + 1) * self.size)
        if len(group) > self.asked:
            raise ValueError(
                f"expected groups of at most the {self.asked} clients of a round, got clients {group[0]} to "
                f"{group[-1]}, those left over among them; choose a size that divides {self.participants}"
            )
        return group


def weighted_update(updates: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return the sum of `updates`, each times its weight."""
    return {name: weighted_sum([update[name] for update in updates], weights) for name in updates[0]}


def combine_views(seen: Sequence[tuple[ServerView, Truth]], weights: Sequence[float]) -> tuple[ServerView, Truth]:
    """Return the view of a group, and its truth, from what would be seen of each client alone.

    Args:
        seen: of every client, all under the same method, defense and threat model and in the same round.
        weights: of the clients in the server's mean, in any unit.

    Raises:
        ValueError: if the clients do not receive the same.
    """
    views, truths = [view for view, _ in seen], [truth for _, truth in seen]
    first = views[0]
    for view in views[1:]:
        for what in ("shared", "buffers", "received"):
            if not _hold_same_numbers(getattr(view, what), getattr(first, what)):
                raise ValueError(
                    f"{first.method.name}: expected all clients of a group to receive the same, got {what}"
                )
    shares = [weight / sum(weights) for weight in weights]
    parts = tuple(
        # a weight would tell the number of images
        Part(
            weight=math.nan if view.batch_size is None else share,
            private=view.private,
            schedule=view.schedule,
            batch_size=view.batch_size,
        )
        for view, share in zip(views, shares, strict=True)
    )
    labels = [view.labels for view in views if view.labels is not None]
    draws = [view.draws for view in views if view.draws is not None]
    orders = [view.order for view in views if view.order is not None]
    starts = [view.private_init or {} for view in views]
    buffers = [_floating_buffers(view.buffers_after or {}) for view in views]
    view = replace(
        first,
        update=weighted_update([view.update for view in views], shares),
        private=_prefix_by_client([view.private for view in views]),
        schedule=joint_schedule(parts),
        batch_size=_sum_if_known([view.batch_size for view in views]),
        labels=torch.cat(labels) if len(labels) == len(views) else None,
        buffers_after=None if first.buffers_after is None else weighted_update(buffers, shares),  # type: ignore[arg-type]
        order=_joint_order(orders, truths) if len(orders) == len(views) else None,
        draws=_joint_draws(draws) if len(draws) == len(views) else None,
        private_init=_prefix_by_client(starts) or None,
        parts=parts,
    )
    return view, _joint_truth(truths)


def as_mean_of_clients(view: ServerView, clients: int) -> ServerView:
    """Return a view of one client as that of the mean of several alike, each with as many images.

    Args:
        view: whose `update` is the mean already; without labels.
        clients: how many, >= 1; of one the view is returned as it is.
    """
    if clients == 1:
        return view
    part = Part(weight=1 / clients, private=view.private, schedule=view.schedule, batch_size=view.batch_size)
    parts = (part,) * clients
    return replace(
        view,
        private=_prefix_by_client([view.private] * clients),
        schedule=joint_schedule(parts),
        batch_size=_sum_if_known([view.batch_size] * clients),
        parts=parts,
    )


def member_view(view: ServerView, candidate: Candidate, i: int) -> tuple[ServerView, Candidate]:
    """Return one client of a group: its own view but for the update, and its share of a candidate whose order is known.

    Raises:
        ValueError: if a client's schedule is unknown, so that nothing says whose images are whose.
    """
    part, prefix = view.parts[i], f"part/{i}/"
    sizes = [other.schedule for other in view.parts if other.schedule is not None]
    if len(sizes) < len(view.parts):
        raise ValueError("expected a group whose clients' schedules are known, got one of which they are not")
    assert candidate.order is not None
    mine = replace(
        view,
        parts=(),
        private=part.private,
        schedule=part.schedule,
        batch_size=part.batch_size,
        order=None,
        draws=None,
        private_init=None,
    )
    return mine, replace(
        candidate,
        private={name.removeprefix(prefix): v for name, v in candidate.private.items() if name.startswith(prefix)},
        order=_member_order(candidate.order, sizes, i),
        draws=None if candidate.draws is None else _own_draws(candidate.draws, prefix, sizes[i]),
    )


def joint_schedule(parts: Sequence[Part]) -> Schedule | None:
    """Return the batch sizes of the whole group, step by step; None if one client's are unknown."""
    known = [part.schedule for part in parts if part.schedule is not None]
    if len(known) < len(parts):
        return None
    return tuple(
        tuple(
            tuple(map(sum, zip_longest(*(step for step in steps if step is not None), fillvalue=0)))
            for steps in zip_longest(*phases)
        )
        for phases in zip(*known, strict=True)
    )


def sequential_order(view: ServerView, count: int) -> Order | None:
    """Return each client's images one after the other.

    A guess of an unknown order. None where the schedule is unknown.
    """
    if view.schedule is None:
        return None
    if not view.parts:
        return sampling.sequential_order(view.schedule, count)
    sizes = [part.batch_size or 0 for part in view.parts]
    orders = []
    for part, size, end in zip(view.parts, sizes, accumulate(sizes), strict=True):
        assert part.schedule is not None
        orders.append(_offset_order(sampling.sequential_order(part.schedule, max(size, 1)), end - size))
    return _concatenate_orders(orders)


def as_single_client(view: ServerView) -> ServerView | str:
    """Return the view of one client with the images of all, where the group's mean is just what that client would send.

    It is after one step of SGD on a mean loss each, with batches as large as the weights, nothing private, and nothing
    that is not linear in the gradient. Otherwise the reason.
    """
    method, client = view.method, view.client
    phases = method.phases(client.task, view.round)
    if view.private:
        return "every client of the group has private tensors of its own"
    if view.schedule is None or sum(map(len, view.schedule)) != 1:
        return "clients that take several steps, or an unknown number, do not add up to one with all images"
    linear = method.has_per_sample_loss and method.follows_loss_gradient(1)
    if not linear or any(p.optimizer != "sgd" or any(g.max_norm is not None for g in p.groups) for p in phases):
        return f"{method.name}: what a client sends is not linear in its images' gradients"
    if any(overrides(client.defense, hook) for hook in ("gradient", "transform_update", "draw", "transform_batch")):
        return "every client of the group defends its own update"
    if any(isinstance(m, nn.modules.batchnorm._NormBase) and m.training for m in client.task.model.modules()):
        return "batch norm takes every client's statistics apart"
    sizes = [sum(sum(step) for steps in part.schedule or () for step in steps) for part in view.parts]
    shares = [size / max(sum(sizes), 1) for size in sizes]
    if any(abs(share - part.weight) > 1e-6 for share, part in zip(shares, view.parts, strict=True)):
        return "the clients' weights are not those of their batches"
    past = (as_single_client(earlier) for earlier in view.history)
    return replace(view, parts=(), history=tuple(earlier for earlier in past if isinstance(earlier, ServerView)))


# ---- orders and draws of several clients in one ----------------------------------------------------------------------
def _joint_truth(truths: Sequence[Truth]) -> Truth:
    traces = [truth.trace for truth in truths]
    return replace(
        truths[0],
        trace=Trace(
            order=_joint_order([trace.order for trace in traces], truths),
            inputs=torch.cat([trace.inputs for trace in traces]),
            labels=torch.cat([trace.labels for trace in traces]),
            indices=torch.cat([trace.indices for trace in traces]),
            draws=_joint_draws([trace.draws for trace in traces]),
            own=_joint_originals(traces),
        ),
        private=_prefix_by_client([truth.private for truth in truths]),
        extractor=_prefix_by_client([truth.extractor for truth in truths]),
    )


def _joint_originals(traces: Sequence[Trace]) -> Tensor | None:
    """Return the clients' own pictures, where a defense changed those of any."""
    if all(trace.own is None for trace in traces):
        return None
    return torch.cat([trace.inputs if trace.own is None else trace.own for trace in traces])


def _hold_same_numbers(a: Any, b: Any) -> bool:
    """Return whether two tensors, or two mappings of them, hold the same numbers."""
    if a is b:
        return True
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_hold_same_numbers(value, b[name]) for name, value in a.items())
    return torch.equal(dense(a), dense(b))


def _floating_buffers(buffers: Mapping[str, Tensor]) -> Tensors:
    """Return what of them is averaged: integers (counters of batches) never are."""
    return {name: value for name, value in buffers.items() if value.is_floating_point()}


def _prefix_by_client(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the clients' tensors under names of their own."""
    return {f"part/{i}/{name}": value for i, part in enumerate(each) for name, value in part.items()}


def _sum_if_known(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _joint_order(orders: Sequence[Order], truths: Sequence[Truth]) -> Order:
    sizes = [len(truth.trace.inputs) for truth in truths]
    return _concatenate_orders(
        [_offset_order(o, end - n) for o, n, end in zip(orders, sizes, accumulate(sizes), strict=True)]
    )


def _offset_order(order: Order, by: int) -> Order:
    return tuple(tuple(tuple(index + by for index in step) for step in steps) for steps in order)


def _concatenate_orders(orders: Sequence[Order]) -> Order:
    """Return step by step the clients' batches one after the other; a client that has finished adds nothing."""
    return tuple(
        tuple(
            tuple(torch.cat([b for b in batches if b is not None]) for batches in zip_longest(*filter(None, steps)))
            for steps in zip_longest(*phases)
        )
        for phases in zip(*orders, strict=True)
    )


def _member_order(order: Order, schedules: Sequence[Schedule], member: int) -> Order:
    """Return one client's part of the group's order, whose batches are the clients' one after the other."""

    def own_part(phase: int, step: int, batch: int, size: int) -> Tensor:
        before = sum(_member_batch_size(other, phase, step, batch) for other in schedules[:member])
        return order[phase][step][batch][before : before + size]

    return tuple(
        tuple(
            tuple(own_part(phase, step, batch, size) for batch, size in enumerate(sizes))
            for step, sizes in enumerate(steps)
        )
        for phase, steps in enumerate(schedules[member])
    )


def _member_batch_size(schedule: Schedule, phase: int, step: int, batch: int) -> int:
    steps = schedule[phase]
    return steps[step][batch] if step < len(steps) and batch < len(steps[step]) else 0


def _joint_draws(each: Sequence[Draws]) -> Draws:
    return tuple(
        tuple(_prefix_by_client(list(drawn)) for drawn in zip_longest(*steps, fillvalue={}))
        for steps in zip(*each, strict=True)
    )


def _own_draws(draws: Draws, prefix: str, schedule: Schedule) -> Draws:
    return tuple(
        tuple(
            {name.removeprefix(prefix): value for name, value in step.items() if name.startswith(prefix)}
            for step in steps[: len(sizes)]
        )
        for steps, sizes in zip(draws, schedule, strict=True)
    )
