"""Many local steps as one: a view in which the client took a single step from a network between start and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from attacks.base import NotApplicable, Reconstruction, ViewRewriter, attacks
from attacks.update.earlier_rounds import with_history
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import (
    adaptive_optimizer_obstacle,
    deviation_from_loss_gradient,
    freeze_untrained,
    training_phases,
)
from fl.local.optimizers import OptimState, optimize
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.parametrization import Parametrization
from fl.ranges import Count, Share
from fl.simulation.nonfinite_updates import all_finite
from fl.tensors import Tensors, add, mul
from fl.types import Group, Phase, Schedule
from fl.view import ServerView

ONE_STEP_SURROGATE = "one-step surrogate (approximate)"
"""What a result on a rewritten view says under `knowledge`."""


@attacks.register("surrogate")
@dataclass(frozen=True, kw_only=True)
class Surrogate(ViewRewriter):
    """Takes all local steps for one, on all images at once (surrogate model extension, Zhu et al., ICML 2023).

    The update without its decay, divided by what a constant gradient of 1 would have moved (step sizes and momentum
    summed up), is the mean of the gradients along the round. The rewritten view has it as the gradient of the mean loss
    of all images at one network, `sent - along * (sent - returned)`. That costs a search one gradient instead of an
    unrolled round, and asks for no order of the batches; without a schedule it knows the mean gradient up to a factor.

    It is exact for one step only. Of several, that the loss flattens on the way and that batches see different networks
    is lost. The paper searches for the network's place as well; here it is a setting: a quarter of the way was nearest
    to the truth in most of the rounds measured, half of it where steps are short and the loss falls evenly.

    Threat model: an honest server that knows the local optimizer, and the number of images or `images`.

    Attributes:
        along: the network's place on the line from the one sent (0) to the one returned (1).
        images: how many there are taken to be; None takes the view's number.
    """

    plain: ClassVar[str] = "takes many small training steps for one big one, which other attacks can work on."

    along: Share = 0.25
    images: Count | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.along <= 1:
            raise ValueError(f"expected along in [0, 1], got {self.along}")
        if self.images is not None and self.images < 1:
            raise ValueError(f"expected images >= 1 or None, got {self.images}")

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view of one step of size 1 on all images."""
        images = self.images or view.batch_size
        if images is None:
            return NotApplicable("the number of images is unknown: give one by the setting images")
        if images == 0:
            return NotApplicable("no image was fed")
        reason = surrogate_obstacle(view)
        if reason is not None:
            return NotApplicable(reason)
        gradient = mean_gradient(view)
        if isinstance(gradient, NotApplicable):
            return gradient
        kind = FedPer if view.private else FedAvg
        phases, _ = training_phases(view)
        known = view.labels is not None and len(view.labels) == images
        clipped = any(group.max_norm is not None for phase in phases for group in phase.groups)
        along = 0.0 if is_single_step(view) else self.along
        easier = replace(
            view,
            task=freeze_untrained(view),
            method=kind(lr=1.0, steps=1, batch_size=None, train_mode=view.method.train_mode),
            defense=view.defense.with_unknown_scale(),
            shared={n: add(w, view.update[n], -along) if n in view.update else w for n, w in view.shared.items()},
            update=gradient,
            schedule=(((images,),),),
            batch_size=images,
            labels=view.labels if known else None,
            order=None,
            draws=None,
            received={},
            # else the classifier has moved on before the first step on what is shared
            private_init=view.private_init if len(phases) == 1 else None,
            scale_unknown=view.scale_unknown or view.schedule is None or clipped,
            history=(),
        )
        mine = easier.client.task.parameters  # without what a method has put beside the network
        shared, update = ({n: v for n, v in part.items() if n in mine} for part in (easier.shared, gradient))
        return with_history(view, replace(easier, shared=shared, update=update), self.rewrite)

    def lift_result(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """Return the result; of several steps no check of it can tell more than that the approximation fits."""
        if is_single_step(view):
            return result
        return replace(result, knowledge=(*result.knowledge, ONE_STEP_SURROGATE), verified=None, fixed=None)


def count_local_steps(view: ServerView) -> int | None:
    """Count the local steps on at least one image; None if unknown."""
    _, schedule = training_phases(view)
    return None if schedule is None else sum(map(any, (step for phase in schedule for step in phase)))


def is_single_step(view: ServerView) -> bool:
    """Return whether there is one step, and on all images: a method may look at more than it trains on."""
    fed = [sum(step) for phase in training_phases(view)[1] or () for step in phase if any(step)]
    return len(fed) == 1 and view.batch_size in {None, *fed}


def surrogate_obstacle(view: ServerView) -> str | None:
    """Return why a view's local training can't be taken for one step of plain FedAvg or FedPer, or None."""
    if not view.update:
        return "nothing is shared"
    if not all_finite(view.update):  # an earlier view, which is then left out
        return "the update has numbers that are not finite"
    if (reason := deviation_from_loss_gradient(view)) is not None:
        return reason
    if type(view.method.parametrization) is not Parametrization:
        return "the network's weights are generated: peel it first"
    if not view.method.minimizes_task_loss(view.client.task, view.round):
        return f"{view.method.name} has a loss of its own that a plain view does not have"
    if any(n in view.task.parameters and not n.startswith(view.task.head) for n in view.private):
        return "more than the classifier is private"
    return None


def mean_gradient(view: ServerView) -> Tensors | NotApplicable:
    """Return the mean of the gradients along the round, by name.

    It has an unknown factor where clipping or the schedule hides it.
    """
    phases, schedule = training_phases(view)
    if (reason := adaptive_optimizer_obstacle(phases)) is not None:
        return NotApplicable(f"only SGD's update is a sum of gradients: {reason}")
    sent = {n: v for n, v in view.update.items() if n in view.shared}
    if schedule is None and (len(phases) > 1 or any(g.weight_decay for g in phases[0].groups)):
        return NotApplicable("the local schedule is unknown, so phases and weight decay can't be told apart")
    owners = {name: tuple(phase.assign({name: 0}).get(name) for phase in phases) for name in sent}
    groups = {id(group) for mine in owners.values() for group in mine if group is not None}
    if len(groups) > 1 and any(group.max_norm is not None for phase in phases for group in phase.groups):
        return NotApplicable("several groups of parameters are clipped apart: their sizes can't be compared")
    moves = {mine: total_step_size(phases, schedule, mine) for mine in set(owners.values())}
    change = ObservedUpdate(view).change
    gradient = {n: mul(change[n], 1 / moves[mine]) for n, mine in owners.items() if moves[mine]}
    return gradient or NotApplicable("nothing that is shared is trained")


def total_step_size(phases: Sequence[Phase], schedule: Schedule | None, owners: Sequence[Group | None]) -> float:
    """Return how far local SGD moves a parameter against a constant gradient of 1, its decay included.

    SGD is linear, so this is the sum of the weights that the parameter's gradients have in the update. Steps without an
    image (Poisson sampling) have none; without a schedule it is one step's, and the others multiply it for all alike.

    Args:
        phases: local training.
        schedule: batch sizes, phase by phase and step by step; None if unknown.
        owners: the parameter's group in each phase, None where it stands still.
    """
    params, zero = {"": torch.zeros((), dtype=torch.float64)}, torch.zeros((), dtype=torch.float64)
    for p, (phase, owner) in enumerate(zip(phases, owners, strict=True)):
        if owner is None:
            continue
        free, state = {"": replace(owner, max_norm=None)}, OptimState()
        for step in ((1,),) if schedule is None else schedule[p]:
            grads = {"": zero + float(any(step))}
            params, state = optimize(phase, free, params, grads, state)  # type: ignore[arg-type, assignment]
    return -float(params[""])
