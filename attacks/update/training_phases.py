"""Selects a round's phases that train the network: not those that only look, or move what it never reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fl.runtime.module_copies import deep_copy
from fl.types import Phase, Schedule, Task, frozen
from fl.view import Part, ServerView

SEARCH_HINT = "a search that takes the same step on its guess can be tried: ig"
"""What there is where no equation of gradients holds."""


def surrogate_hint(view: ServerView, link: str) -> str:
    """Return `link` and the advice to take all steps for one.

    It is empty for a group, as several clients' steps are not one client's.
    """
    return "" if view.parts else f"{link}take all steps for one by surrogate+ before the attack"


def training_phases(
    view: ServerView, part: Part | ServerView | None = None
) -> tuple[tuple[Phase, ...], Schedule | None]:
    """Return the phases whose steps move what the network predicts by, and their part of the schedule.

    Args:
        view: what the server saw.
        part: whose schedule is meant: one client of the view's group; None takes the view's.

    Returns:
        The phases, and the batch sizes of each step of each phase, None if unknown.
    """
    phases = view.method.phases(view.client.task, view.round)
    chosen = [p for p, phase in enumerate(phases) if view.method.trains_predictor(phase)]
    schedule = (part or view).schedule
    return tuple(phases[p] for p in chosen), None if schedule is None else tuple(schedule[p] for p in chosen)


def deviation_from_loss_gradient(view: ServerView) -> str | None:
    """Say along what else than its loss's gradient the client steps; None if it is that."""
    _, schedule = training_phases(view)
    steps = None if schedule is None else sum(map(len, schedule))
    first = view.method.initial_memory_is_known and not any("memory/" in name for name in view.private)
    if (view.method.first_round_follows_loss_gradient if first else view.method.follows_loss_gradient)(steps):
        return None
    why = f": {view.method.deviation_reason}" if view.method.deviation_reason else ""
    return f"{view.method.name} does not step along the gradient of its loss alone{why}"


def adaptive_optimizer_obstacle(phases: Iterable[Phase]) -> str | None:
    """Say which optimizer of local training divides each number by its own size; None where it is SGD.

    Its step is then no multiple of a gradient, and no equation of gradients holds for it.
    """
    odd = next((phase.optimizer for phase in phases if phase.optimizer != "sgd"), None)
    if odd is None:
        return None
    return f"{odd} rescales every number apart: its step is not the gradient's direction; {SEARCH_HINT}"


def freeze_untrained(view: ServerView) -> Task:
    """Return the task with what the method keeps frozen frozen in its network, too: the plain method would train it."""
    still = frozen(view.client.task.model).keys() - frozen(view.task.model).keys()
    if not still:
        return view.task
    model = deep_copy(view.task.model)
    for name, value in model.named_parameters():
        value.requires_grad_(value.requires_grad and name not in still)
    return replace(view.task, model=model)
