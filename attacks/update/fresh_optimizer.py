"""Whether an update contradicts that its optimizer started from rest, as the one that was stated does.

Momentum that a client kept from earlier rounds moves weights by gradients of other examples as well. Of one step two
signs show it. A classifier's update has the rank of the number of examples, where each has one output vector. And the
first step of an adaptive optimizer is as long for every number whose gradient is not tiny
(`attacks.update.adaptive_first_step`), while a row that no example of this round reaches moves by a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from attacks.update.adaptive_first_step import AdaptiveFirstStep, StepSizeDoubt
from attacks.update.classifier_update import classifier_tensors
from attacks.update.observed_update import ObservedUpdate
from attacks.update.quantization_grids import grid_steps
from attacks.update.training_phases import adaptive_optimizer_obstacle, training_phases
from fl.defense import overrides
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import Tensors
from fl.types import Candidate, Phase
from fl.view import ServerView

MIN_RANK_SHARE = 1e-2
"""Singular values of a classifier's update, relative to the largest, that no rounding leaves."""
MAX_SHORTFALL = 0.02
"""Share of an adaptive optimizer's first step that half of a row's numbers are short of it by, at most."""
OTHER_RANK = (
    "not confirmed: the classifier's update is not that of {} example(s) in one step: momentum kept from earlier "
    "rounds, or more examples than stated, would move rows of other ids as well"
)
SHORT_STEPS = (
    "not confirmed: row {} of {} moved by {:.2g} times what the first step of {} at lr {:g} makes: momentum kept from "
    "earlier rounds, or another optimizer than stated, would move rows of other ids as well"
)


def contradicts_fresh_state(
    view: ServerView, observed: ObservedUpdate, rows: Mapping[str, Tensor], columns: Collection[str] = ()
) -> str:
    """Return what contradicts that the optimizer of one step started from rest; "" where nothing does, or can.

    Args:
        view: what the server saw.
        observed: the update.
        rows: those that moved (M,), by the name of an embedding's weight.
        columns: the weights that these are columns of.
    """
    phases, schedule = training_phases(view)
    steps = [step for phase in schedule or () for step in phase]
    if view.batch_size is None or view.parts or [sum(step) for step in steps] != [view.batch_size]:
        return ""
    if any(overrides(view.client.defense, hook) for hook in ("transform_update", "gradient")):
        return ""  # which may leave another rank, and other sizes
    if adaptive_optimizer_obstacle(phases) is None:
        return _other_rank(view, observed.change, view.batch_size)
    taken = next(phase for phase, sizes in zip(phases, schedule or (), strict=True) if sizes)
    return _short_steps(view, rows, columns, taken)


def _other_rank(view: ServerView, change: Tensors, count: int) -> str:
    """Return that a classifier's update is of more examples than stated, which a step of the network's own is not."""
    if len(view.task.output_shape) != 1 or not _has_larger_rank(view, change, count):
        return ""
    draw = stream(0, "rank")
    inputs = torch.rand(count, *view.task.input_shape, generator=draw).to(view.device, view.dtype)
    shape = view.task.loss.variable_shape(view.task.output_shape)
    if view.labels is not None:
        targets = view.labels
    elif shape is None:
        return ""
    else:
        targets = view.task.loss.relax(torch.randn(count, *shape, generator=draw)).to(view.device, view.dtype)
    with torch.no_grad():
        made = ObservedUpdate(view).without_decay(predict(view, Candidate(inputs, targets)))
    return "" if _has_larger_rank(view, made, count) else OTHER_RANK.format(count)


def _has_larger_rank(view: ServerView, change: Tensors, count: int) -> bool:
    """Return whether a classifier's update has a larger rank than a number, beyond what rounding to few bits leaves."""
    weight, bias = classifier_tensors(view, change)
    if weight is None or weight.ndim != 2:
        return False
    grid = grid_steps(weight)
    whole = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    sizes = torch.linalg.svdvals(whole.double())
    rounding = 0.0 if grid is None else float(grid.max()) * math.sqrt(whole.numel())
    return bool((sizes > max(MIN_RANK_SHARE * float(sizes[0]), rounding))[count:].any())


def _short_steps(view: ServerView, rows: Mapping[str, Tensor], columns: Collection[str], phase: Phase) -> str:
    """Return that rows moved by less, or more, than an adaptive optimizer's first step makes of any gradient."""
    if not isinstance(AdaptiveFirstStep.of(view), AdaptiveFirstStep | StepSizeDoubt):
        return ""
    first = AdaptiveFirstStep(view, phase)  # also of an update that is doubted for the sizes of its steps
    for name in rows.keys() & first.steps.keys():
        sizes, errors = first.steps[name].abs(), first.errors[name]
        sizes, errors = (sizes.mT, errors.mT) if name in columns else (sizes, errors)
        for row in rows[name].tolist():
            moved = sizes[row] > 0
            middle = float(sizes[row][moved].median()) if bool(moved.any()) else 1.0
            if abs(1 - middle) > MAX_SHORTFALL + float(errors[row].max()):
                lr = first.phase.assign({name: None})[name].lr
                return SHORT_STEPS.format(row, name, middle, phase.optimizer, lr)
    return ""
