"""The gradient that a client's one local step was taken along, as far as its update gives it away."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attacks.result import NotApplicable
from attacks.update.rescaling import in_unit
from attacks.update.training_phases import rescaled, training
from attacks.update.update_rule import SIGNS, signs_only
from fl.defense import overrides
from fl.local.weight_decay import decay_shares, without_decay
from fl.parametrization import Parametrisation
from fl.tensors import Tensors, Value, dense
from fl.types import ServerView


def astray(view: ServerView) -> str | None:
    """That the client steps along something else than the gradient of its method's loss, or None if it does not."""
    _, schedule = training(view)
    if view.method.plain_gradient(None if schedule is None else sum(map(len, schedule))):
        return None
    why = f": {view.method.detour}" if view.method.detour else ""
    return f"{view.method.name} does not step along the gradient of its loss alone{why}"


def obstacle(view: ServerView, *, batches: bool = False) -> str | None:
    """Why the classifier can't be cut off, or None; `batches` are left to an attack that tells their images apart."""
    if not view.update:
        return "nothing is shared"
    if (reason := astray(view)) is not None:
        return reason
    if type(view.method.parametrisation) is not Parametrisation:
        return "the network's weights are generated: peel it first"
    if overrides(view.defense, "wrap_model"):
        return f"the defence {view.defense.name} puts layers of its own into the network"
    if not view.task.head:
        return "the network has no classifier to cut off"
    steps = [step for steps in training(view)[1] or () for step in steps]
    if len(steps) != 1:
        several = "it takes one local step: where several are short, `first-step` works out the first"
        return several if view.schedule is not None else "the number of local steps is unknown"
    if sum(steps[0]) != 1 and not batches:
        return "it takes a batch of one: the signals of several images are summed in the bias gradient"
    if view.batch_size not in {None, sum(steps[0])}:
        one = "one image" if not batches else "as many images as the step's batch has"
        return f"it takes a client of {one}: which of {view.batch_size} the one step was on is unknown"
    return None


def exact_gradient(view: ServerView, *, batches: bool = False) -> Tensors | NotApplicable:
    """The gradient of a view's one step where it is known up to one factor for all tensors, or why it is not.

    Of one image, unless the caller takes `batches`.
    """
    if (reason := obstacle(view, batches=batches)) is not None:
        return NotApplicable(reason)
    if not view.client.defense.keeps_ratios():
        return NotApplicable(f"the defence {view.defense.name} leaves no ratio of a weight's to a bias's update")
    return one_gradient(view)


def one_gradient(view: ServerView) -> Tensors | NotApplicable:
    """The gradient the update is a step along, up to the clip factor."""
    phases, schedule = training(view)
    assert schedule is not None
    (phase,) = [phase for phase, steps in zip(phases, schedule, strict=True) if steps]
    if (reason := rescaled([phase])) is not None:
        return NotApplicable(reason)
    groups = {n: g for n, g in phase.assign(view.shared).items() if g.lr != 0 and n in view.update}
    if signs_only(view):
        return NotApplicable(SIGNS)
    shares = decay_shares(phases, schedule, groups)
    passed = partial(view.client.defense.passed, observed=view.update)
    change = without_decay(view.update, view.shared, shares, passed)
    moved = {n: _heard(value, view.shared[n]) if view.rounded else value for n, value in change.items() if n in groups}
    return {n: value * (1 / phase.first_step(groups[n])) for n, value in moved.items()}


def undefended(view: ServerView, name: str, delta: Tensor) -> Tensor:
    """`delta` at the scale it had before a known defence: a prediction passes through the defence once more."""
    again = dense(view.client.defense.rescaled().passed({name: delta}, {name: view.update[name]})[name])
    sizes = {n: dense(v).norm() for n, v in in_unit({"sent": delta, "again": again})[0].items()}
    return delta * (sizes["sent"] / sizes["again"]) if bool(again.any()) else delta


def _heard(moved: Value, start: Value) -> Value:
    """`moved`, or zero where it is no more than the rounding of `start`."""
    if isinstance(moved, Tensor) and moved.norm() <= 4 * torch.finfo(moved.dtype).eps * dense(start).norm():
        return torch.zeros_like(moved)
    return moved


def let_through(view: ServerView, name: str) -> Tensor:
    """Where a known defence lets an entry of the update's tensor `name` through (bool): a zero may not be one."""
    seen = dense(view.update[name])
    probe: Tensors = {name: torch.where(seen != 0, seen, seen.abs().max())}
    return dense(view.client.defense.passed(probe, view.update)[name]) != 0
