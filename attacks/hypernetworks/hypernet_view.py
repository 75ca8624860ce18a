"""Parses a hypernetwork's update as the equations that it satisfies, or says why it satisfies none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial

import torch

from attacks.hypernetworks.rank_one_equations import HypernetUpdate, Precision, parameter_names
from attacks.result import NotApplicable
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import adaptive_optimizer_obstacle, deviation_from_loss_gradient
from attacks.update.update_rule import is_sign_compressed
from fl.defense import overrides
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, TRUNK_WEIGHT, Hypernetwork
from fl.privacy.private_method import PrivateMethod
from fl.tensors import Tensors, Value, dense, norm
from fl.types import Group, Phase
from fl.view import ServerView


@dataclass(frozen=True)
class HypernetView:
    """A view of a hypernetwork's update, with the part that weight decay makes taken off.

    Attributes:
        view: what the server saw.
        phase: index of the phase that trains the hypernetwork.
        change: the shared tensors' update without decay.
        update: the same as equations.
    """

    view: ServerView
    phase: int
    change: Tensors
    update: HypernetUpdate

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Local training."""
        return self.view.method.phases(self.view.client.task, self.view.round)

    @property
    def steps(self) -> int | None:
        """Steps of the hypernetwork's phase, None if unknown."""
        return None if self.view.schedule is None else len(self.view.schedule[self.phase])

    @property
    def group(self) -> Group:
        """How the hypernetwork is trained."""
        return self.phases[self.phase].assign({TRUNK_WEIGHT: None})[TRUNK_WEIGHT]

    @property
    def embedding_pace(self) -> float:
        """How far a step moves the embedding, for what it would by the hypernetwork's step size; 0 where it is at rest.

        Where both are clipped apart, the embedding moves further by what the hypernetwork's steps were shortened by: as
        much at the least as all of them together are longer than one step may be.
        """
        phase, group = self.phases[self.phase], self.group
        own = phase.assign({EMBEDDING: None}).get(EMBEDDING)
        if own is None or not own.lr:
            return 0.0
        pace = own.lr / group.lr if group.lr else math.inf
        if own is group or group.max_norm is None:
            return pace
        longest = phase.first_step_size(group) * group.max_norm / (1 - phase.momentum)
        return pace * max(1.0, float(norm(self.change)) / longest)

    def moving_names(self, names: Iterable[str]) -> list[str]:
        """Return which of `names` move together with the hypernetwork."""
        return list(self.phases[self.phase].assign(dict.fromkeys(names)))


def parse_hypernet_view(view: ServerView) -> HypernetView | NotApplicable:
    """Return the hypernetwork's update without decay, or why it can't be had."""
    if view.update and not bool(norm(view.update).isfinite()):
        return NotApplicable("the update is so large that its squares overflow: the client's training diverged")
    reason = _obstacle(view)
    if reason is not None:
        return NotApplicable(reason)
    generator, task = view.method.parametrization, view.client.task
    assert isinstance(generator, Hypernetwork)
    observed = ObservedUpdate(view)
    if missing := observed.unknown_decay:
        return NotApplicable(f"the decay of {missing[0]!r} is unknown: it takes SGD and a known schedule")
    (phase,) = _hypernet_phases(view)
    steps = len(view.schedule[phase]) if view.schedule is not None else 1
    defense = view.client.defense
    cuts = overrides(defense, "surrogate")
    change = observed.change
    update = HypernetUpdate.of(
        view.shared,
        change,
        tuple(generator.generates(task)),
        bias=generator.bias,
        precision=Precision(
            rounding=2 * (steps + 1) * torch.finfo(view.dtype).eps,
            one_step=view.schedule is not None and steps == 1,
            rounded=view.rounded,
        ),
        passed=partial(defense.with_unknown_scale().transmit_known_part, observed=view.update) if cuts else None,
    )
    return HypernetView(view, phase, change, update)


def _hypernet_phases(view: ServerView) -> list[int]:
    """Return the phases that train the hypernetwork, empty ones left out."""
    method, phases = view.method, view.method.phases(view.client.task, view.round)
    counts = [1] * len(phases) if view.schedule is None else [len(steps) for steps in view.schedule]
    chosen = [p for p, phase in enumerate(phases) if counts[p] and method.trains_predictor(phase)]
    return [p for p in chosen if any(group.covers(TRUNK_WEIGHT) for group in phases[p].groups)]


def _has_weight_noise(view: ServerView) -> bool:
    """Return whether steps are astray by noise on the generated weights' gradient alone, before it is pulled back.

    However noisy that gradient is, what the hypernetwork gets of it is outer products with the same factors.
    """
    method = view.method
    return (
        isinstance(method, PrivateMethod)
        and method.clip_target == "weights"
        and method.fine_tuning_method().follows_loss_gradient(None)
    )


def _obeys_equations(generator: Hypernetwork, view: ServerView) -> bool:
    """Return whether it is made of the layers that the equations are of.

    A class of one's own that overrides something of it may be: then it is tried on a random embedding and gradient.
    """
    if type(generator) is Hypernetwork:
        return True
    generator = deepcopy(generator)  # it may keep what it was asked for
    draw, task = torch.Generator().manual_seed(0), view.client.task
    plain = Hypernetwork(**{key.name: getattr(generator, key.name) for key in fields(Hypernetwork)})

    def drawn(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=draw).to(like)

    shared = {name: value for name, value in view.shared.items() if generator.scope(name) is not None}
    embedding = drawn(dense(view.shared[TRUNK_WEIGHT])[0])
    params = {**task.parameters, **generator.lift({**shared, EMBEDDING: embedding})}
    grads = {name: drawn(task.parameters[name]) for name in generator.generates(task)}
    live = list(shared)
    pairs: list[tuple[Mapping[str, Value], Mapping[str, Value]]] = [
        (generator.generate(params, task), plain.generate(params, task)),
        (generator.pull_back(params, grads, task, live), plain.pull_back(params, grads, task, live)),
    ]
    return all(
        ours.keys() == theirs.keys()
        and all(bool((dense(ours[n]) - dense(theirs[n])).norm() <= 1e-3 * dense(theirs[n]).norm()) for n in theirs)
        for ours, theirs in pairs
    )


def _obstacle(view: ServerView) -> str | None:
    """Return why the view can't be peeled, or None."""
    method = view.method
    if not view.update:
        return "nothing is shared"
    generator = method.parametrization
    if not isinstance(generator, Hypernetwork):
        return "the update is that of the network itself: there is nothing to peel"
    kept = [
        n for n in parameter_names(generator.generates(view.client.task), bias=generator.bias) if n not in view.update
    ]
    if kept:
        return f"the hypernetwork is not sent, or not all of it: {kept[0]!r} is missing"
    if not _obeys_equations(generator, view):
        return f"{type(generator).__name__} makes weights in another way than W_k relu(W_0 v + b_0) + b_k"
    if (reason := deviation_from_loss_gradient(view)) is not None and not _has_weight_noise(view):
        return reason
    phases = method.phases(view.client.task, view.round)
    owners = _hypernet_phases(view)
    if len(owners) != 1:
        return f"expected one phase that trains the hypernetwork, got {len(owners)}"
    if (reason := adaptive_optimizer_obstacle([phases[owners[0]]])) is not None:
        return reason
    if not view.client.defense.preserves_norm_ratios():
        return f"{view.defense.name} changes the length of each tensor apart, and their ratios are what is solved for"
    if is_sign_compressed(view):
        return "only signs are sent: they satisfy the equations of an outer product whatever its factors are"
    return None
