"""The peel of HyperFedNet: one hypernetwork for many filters, whose embeddings its update tells only in part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import NotApplicable, Reconstruction, ViewRewriter, attacks
from attacks.hypernetworks.filter_equations import FilterUpdate
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import adaptive_optimizer_obstacle, deviation_from_loss_gradient, training_phases
from attacks.update.update_rule import is_sign_compressed
from fl.methods.fedavg import FedAvg
from fl.models.hypernetworks.filter_hypernetwork import (
    EMBEDDINGS,
    HYPERNET,
    Filters,
    Shape,
    assemble_filter,
    embedded_weights,
    embeddings_name,
)
from fl.tensors import Tensors, dense
from fl.types import Group, Scope, Task
from fl.view import ServerView

MAX_MISFIT = 1e-2
"""Equations that the update satisfies up to this share of itself confirm their solution."""

RECOVERED_FILTERS = "filters"
"""The payload of a rewritten view that holds what was recovered: read off the update, not sent by the server."""


@dataclass(frozen=True, kw_only=True)
class PartlyKnownWeights(FedAvg):
    """One step of size 1 on a network of which the server holds some weights.

    Attributes:
        names: of these weights and buffers.
    """

    name = "known"

    names: tuple[str, ...]

    def scope(self, name: str, task: Task) -> Scope:
        """Return SHARED for known weights and PRIVATE for all others."""
        return Scope.SHARED if name in self.names else Scope.PRIVATE


@dataclass(frozen=True)
class FilterSolution:
    """What a view tells of the filters.

    Attributes:
        embeddings: by the names of `ServerView.private`.
        weights: the generated convolution weights they make.
        gradient: of these weights and of the network's own shared ones, in the update's own factor; None where it is
            not determined.
        verified: whether the equations confirm all embeddings; those of one step only.
        used_initial_values: whether the values that embeddings started from were used.
        counts: numbers received against unknowns, in words.
    """

    embeddings: dict[str, Tensor]
    weights: dict[str, Tensor]
    gradient: Tensors | None
    verified: bool
    used_initial_values: bool
    counts: str

    def private(self) -> Tensors:
        """Return what was recovered, as in `Reconstruction.private`."""
        return {**self.embeddings, **{f"extractor/{n}": w for n, w in self.weights.items()}}

    def knowledge(self) -> tuple[str, ...]:
        """Return what was taken as known, as in `Reconstruction.knowledge`."""
        return (*(("private_init",) if self.used_initial_values else ()), self.counts)


@attacks.register("filters")
@dataclass(frozen=True, kw_only=True)
class HyperFedNetPeel(ViewRewriter):
    """Reads the embeddings of HyperFedNet (Chen et al., 2024) off its update as far as the numbers reach.

    One hypernetwork serves many filters, so unlike HyperFL's its update is a sum over them (see `FilterUpdate`):

    - a single filter of its shape (LeNet's second convolution): embedding and filter gradient follow exactly, with
      nothing known beside;
    - several: the update fixes the affine hull of their embeddings and is blind to how they mix in it. Where the server
      knows the values they started from, it takes the points of the hull nearest to these: exact in the first round, an
      estimate later. Where filters are so few that their activations are independent (at most d + 1 input channels in
      all), their gradients follow, too.

    What was not shared (first convolution, batch norm, classifier, image, label) is left to the attack that follows:
    `filters+joint` searches for it in the view of the network itself where all filters and gradients follow, else in
    the first view, from the embeddings found. Where a server knows all starting values, nothing of this is unknown
    before the first round but image and label (`filters+dlg`). The result says how many independent numbers were
    received and how many are unknown, images and labels included.

    Threat model: an honest-but-curious server that sees one client's update and knows its local training;
    embeddings are the client's own. The starting values of these, where known, tell what several filters share
    (`knows_private_init`).
    """

    plain: ClassVar[str] = "computes the secret codes of the filters from the update, as far as it has enough numbers."

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Return embeddings and filters, without images."""
        solved = self.solve(view)
        if isinstance(solved, NotApplicable):
            return solved
        found, known = solved.private(), solved.knowledge()
        return Reconstruction(inputs=None, private=found, knowledge=known, verified=solved.verified)

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view of the network itself, or the same view with embeddings to start from."""
        solved = self.solve(view)
        if isinstance(solved, NotApplicable):
            return solved
        if (
            solved.gradient is not None
            and solved.verified
            and view.schedule is not None
            and _count_local_steps(view) == 1
        ):
            easier = network_view(view, solved)
        else:
            easier = replace(view, private_init={**(view.private_init or {}), **solved.embeddings})
        return replace(easier, received={**easier.received, RECOVERED_FILTERS: solved.private()})

    def lift_result(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """Return the result, with embeddings and filters; those that the next attack moved on stay as it left them."""
        solved = self.solve(view)
        assert isinstance(solved, FilterSolution)
        used = _starts_known(view) or ("private_init" in result.knowledge and bool(view.private_init))
        mine = tuple(name for name in solved.knowledge() if name != "private_init")
        others = tuple(name for name in result.knowledge if name != "private_init")
        known = (*others, *(("private_init",) if used or solved.used_initial_values else ()), *mine)
        return replace(result, private={**rewritten.received[RECOVERED_FILTERS], **result.private}, knowledge=known)

    def solve(self, view: ServerView) -> FilterSolution | NotApplicable:
        """Return embeddings, and what follows from them, or why they can't be had."""
        reason = _filters_obstacle(view)
        if reason is not None:
            return NotApplicable(reason)
        change = _shared_change(view)
        if isinstance(change, NotApplicable):
            return change
        updates = _filter_updates(view, change)
        if any(update.is_inactive for update in updates.values()):
            return NotApplicable("no gradient reached the hypernetwork: its update is its decay and rounding")
        counts = _equation_counts(view, list(updates.values()))
        made = embedded_weights(view.private)
        start = view.private_init or {}
        open_ = [
            s for s, update in updates.items() if update.filters > 1 and embeddings_name(s, made[s][0]) not in start
        ]
        if open_:
            update = updates[open_[0]]
            return NotApplicable(
                f"{update.filters} filters share one hypernetwork without activation: its update leaves "
                f"{update.undetermined_numbers:,} numbers of their embeddings open, and their starting values are "
                f"unknown ({counts})"
            )
        return _solve_filters(view, change, updates, counts)


def network_view(view: ServerView, solved: FilterSolution) -> ServerView:
    """Return the view of the network itself after one step.

    Filters and whatever is shared are known, everything else is private.

    Before the first round, private values whose start is known are known, too.
    """
    assert solved.gradient is not None
    (phase,), _ = training_phases(view)
    groups = phase.assign(view.shared)
    group = next(group for name, group in groups.items() if name.startswith(HYPERNET))
    owners = {n: groups.get(n) if n in view.shared else group for n in solved.gradient}  # the others are generated
    known = {n: own for n, own in owners.items() if own is not None and _share_factor(own, group)}
    start = {n: v for n, v in (view.private_init or {}).items() if not n.startswith(EMBEDDINGS)}
    told = start if _starts_known(view) else {}
    private = {n: shape for n, shape in view.private.items() if not n.startswith(EMBEDDINGS) and n not in told}
    direct = {n: v for n, v in view.shared.items() if not n.startswith(HYPERNET)}
    shared: Tensors = {**solved.weights, **direct, **told}
    method = PartlyKnownWeights(
        names=(*shared, *view.buffers), lr=1.0, steps=1, batch_size=None, train_mode=view.method.train_mode
    )
    return replace(
        view,
        method=method,
        defense=view.defense.with_unknown_scale(),
        shared=shared,
        update={n: solved.gradient[n] * (1 / phase.first_step_size(own)) for n, own in known.items()},
        scale_unknown=view.scale_unknown or group.max_norm is not None,
        private=private,
        private_init={n: v for n, v in start.items() if n in private} or None,
        history=(),
    )


def _share_factor(group: Group, other: Group) -> bool:
    """Return whether the gradients that both groups moved along are known up to the same factor."""
    return group is other or (group.lr > 0 and group.max_norm is other.max_norm is None)


def _starts_known(view: ServerView) -> bool:
    """Return whether all private values are known: no round has moved them from where they are known to start."""
    return view.round == 0 and set(view.private) <= set(view.private_init or {})


def _count_local_steps(view: ServerView) -> int | None:
    """Count the local steps; None if unknown."""
    (phase,), schedule = training_phases(view)
    return phase.steps if schedule is None else sum(map(len, schedule))


def _filters_obstacle(view: ServerView) -> str | None:
    """Return why the view can't be peeled, or None."""
    method = view.method
    if not isinstance(method.parametrization, Filters):
        return "no hypernetwork makes single filters: there is nothing to peel"
    if not any(name.startswith(HYPERNET) for name in view.update):
        return "the hypernetwork is not sent"
    if (reason := deviation_from_loss_gradient(view)) is not None:
        return reason
    if not method.minimizes_task_loss(view.client.task, view.round):
        return f"{method.name} has a loss of its own that a plain view does not have"
    phases, _ = training_phases(view)
    if len(phases) != 1:
        return "it takes one phase of SGD"
    if (reason := adaptive_optimizer_obstacle(phases)) is not None:
        return reason
    owners = phases[0].assign(dict.fromkeys(name for name in view.update if name.startswith(HYPERNET)))
    if len({id(group) for group in owners.values()}) > 1:
        return "parts of the hypernetwork are trained apart: their ratios are not the gradients'"
    if not view.client.defense.preserves_norm_ratios():
        return f"{view.defense.name} changes the length of each tensor apart, and their ratios are what is solved for"
    if is_sign_compressed(view):
        return "only signs are sent: they say nothing of sums"
    return None


def _shared_change(view: ServerView) -> Tensors | NotApplicable:
    """Return the update of what is shared, without decay."""
    observed = ObservedUpdate(view)
    if missing := observed.unknown_decay:
        return NotApplicable(f"the decay of {missing[0]!r} is unknown: it takes a known schedule")
    if left_out := [name for name in view.shared if name not in view.update]:
        return NotApplicable(f"{left_out[0]!r} is not sent")
    if (reason := observed.altered()) is not None:
        return NotApplicable(reason)
    return {n: observed.change[n] for n in view.shared}


def _filter_updates(view: ServerView, change: Tensors) -> dict[Shape, FilterUpdate]:
    """Return the equations of every hypernetwork, by the shape of its basic filter."""
    result, steps = {}, sum(map(len, training_phases(view)[1] or ())) or 1
    rounding = 4 * steps * torch.finfo(view.dtype).eps if view.rounded else 0.0
    for shape, weights in embedded_weights(view.private).items():
        tiles = [view.private[embeddings_name(shape, weight)] for weight in weights]
        count = sum(t[0] * t[1] for t in tiles)
        result[shape] = FilterUpdate.of(shape, count, view.shared, change, rounding=rounding)
    return result


def _equation_counts(view: ServerView, updates: Sequence[FilterUpdate]) -> str:
    """Return the numbers received against the unknowns, in words."""
    received = sum(update.independent_numbers for update in updates)
    images = view.batch_size or 1
    pixels = images * math.prod(view.task.input_shape)
    labels = 0 if view.labels is not None else images
    private = 0 if _starts_known(view) else sum(math.prod(shape) for shape in view.private.values())
    unknown = private + pixels + labels
    return f"{received:,} numbers for {unknown:,} unknowns"


def _solve_filters(
    view: ServerView, change: Tensors, updates: Mapping[Shape, FilterUpdate], counts: str
) -> FilterSolution:
    made, start = embedded_weights(view.private), view.private_init or {}
    found, weights = dict[str, Tensor](), dict[str, Tensor]()
    gradient: Tensors | None = {n: v for n, v in change.items() if not n.startswith(HYPERNET)}
    # of several steps the equations give means over the round, which may explain each other without being its start
    fits, started = _count_local_steps(view) == 1, False
    for shape, update in updates.items():
        names = [embeddings_name(shape, weight) for weight in made[shape]]
        tiles = [view.private[name][:2] for name in names]
        if update.filters == 1:
            flat = update.single_embedding()
            back = update.gradient(flat)
            fits = fits and back is not None  # the first layer alone takes any length of its biases' change
        else:
            guesses = torch.cat([dense(start[name]).double().flatten(0, 1) for name in names])
            flat, started = update.nearest_embeddings(guesses), True
            back = update.gradient(flat)
            # the equations confirm any points of the hull: these are right only where they have not moved yet
            fits = fits and view.round == 0 and float((flat - guesses).norm()) < MAX_MISFIT * float(guesses.norm())
        fits = fits and update.misfit(flat) < MAX_MISFIT
        fits = fits and (back is None or update.gradient_misfit(flat, back) < MAX_MISFIT)
        sizes = [math.prod(t) for t in tiles]
        rows = zip(made[shape], names, tiles, flat.split(sizes), update.weights(flat).split(sizes), strict=True)
        for weight, name, tile, v, blocks in rows:
            found[name] = v.unflatten(0, tile).to(view.dtype)
            weights[weight] = assemble_filter(blocks.unflatten(0, tile)).to(view.dtype)
        if back is None or gradient is None:
            gradient = None
        else:
            parts = zip(made[shape], tiles, back.split(sizes), strict=True)
            gradient |= {weight: assemble_filter(g.unflatten(0, tile)).to(view.dtype) for weight, tile, g in parts}
    return FilterSolution(found, weights, gradient, fits, started, counts)
