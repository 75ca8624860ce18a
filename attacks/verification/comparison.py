"""One step on what an attack found, beside the update: what is compared, and where that can be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from torch import Tensor

from attacks.network.network_parts import network_above
from attacks.result import NotApplicable, Reconstruction
from attacks.search_control import check_time_limit
from attacks.update.first_linear_layer import first_linear
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import training_phases
from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from attacks.verification.label_comparison import labels_of_inputs
from attacks.verification.possible_labels import taken_labels
from attacks.verification.update_comparison import UpdateComparison
from fl.defense import Defense
from fl.method import Method
from fl.parametrization import Parametrization
from fl.tensors import LowRank, dense
from fl.view import ServerView

MAX_BORNE_OUT_LABELS = 10
"""Labels with which it is asked, at most, whether the update bears out what its attack does not verify."""


@dataclass(frozen=True)
class Question:
    """What is asked of an update.

    Attributes:
        check: the comparison.
        guesses: the inputs of what is compared, with labels that they may have.
    """

    check: UpdateComparison
    guesses: Iterable[tuple[Tensor, Tensor]]


_SHARED: ContextVar[list[UpdateComparison] | None] = ContextVar("shared", default=None)
"""The comparison that was made last, while a result is held to its update."""


@contextmanager
def comparisons_shared() -> Iterator[None]:
    """While the block runs, questions of one view in turn ask one comparison, which keeps what it has worked out."""
    token = _SHARED.set([])
    try:
        yield
    finally:
        _SHARED.reset(token)


def _compared(view: ServerView, *, whole: bool) -> UpdateComparison:
    """Return the comparison of a view, with all pixels or those fixed alone."""
    last = _SHARED.get()
    if last and last[0].view is view and last[0].whole == whole:
        return last[0]
    made = UpdateComparison(view, ObservedUpdate(view).relative_rounding, whole)
    if last is not None:
        last[:] = [made]
    return made


def can_replay(view: ServerView) -> bool:
    """Return whether one step on a picture can be taken in this view.

    Then all that it depends on but the images is known.
    """
    steps = [step for steps in training_phases(view)[1] or () for step in steps]
    whole = len(steps) == 1 and sum(steps[0]) == view.batch_size
    return (
        (whole or (view.batch_size == 1 and bool(steps)))
        and type(view.method.parametrization) is Parametrization
        and type(view.client.defense) is Defense
        and not view.parts
        and not view.client.draws
        and not any(isinstance(value, LowRank) for value in view.update.values())
    )


def comparison(view: ServerView, result: Reconstruction) -> Question | None:
    """Return what the update is compared with, or None where a step on what was found can't be taken."""
    check_time_limit()
    if not can_replay(view):
        return None
    images, whole = result.inputs, result.verified is True
    if images is None:
        return _feature_comparison(view, result)
    if len(images) != view.batch_size:
        return None
    check = _compared(view, whole=whole)
    return Question(check, ((images, labels) for labels in taken_labels(view, result, images)))


def _feature_comparison(view: ServerView, result: Reconstruction) -> Question | None:
    """Return the comparison of all layers from the first linear one up, which is given what the result holds."""
    features, count = result.private.get("features"), view.batch_size
    if features is None or not count or type(view.method).client_model is not Method.client_model:
        return None
    layer = first_linear(view)
    if isinstance(layer, NotApplicable) or features.numel() % layer.weight.shape[1]:  # or of a layer above it
        return None
    inputs = dense(features).reshape(-1, layer.weight.shape[1], 1, 1)
    upper = network_above(view, layer.parameter_names[0], len(inputs)) if len(inputs) == count else None
    if upper is None or not set(layer.parameter_names) <= upper.names & view.update.keys():
        return None
    task = replace(view.task, model=upper.model, input_shape=(inputs.shape[1], 1, 1), mean=(), std=())
    update = {name: value for name, value in view.update.items() if name in upper.names}
    above = replace(view, task=task, update=update, history=())
    spread = 2 * MAX_PIXEL_ERROR * float(inputs.square().mean().sqrt())  # as of pixels of half brightness
    check = UpdateComparison(above, ObservedUpdate(view).relative_rounding, result.verified is True, spread)
    if count == 1:
        given = (above, replace(result, inputs=inputs)) if view.task.loss.is_linear_in_targets else (view, result)
        return Question(check, ((inputs, labels) for labels in taken_labels(*given, inputs, above)))
    if not view.task.loss.takes_classes:
        return None
    return Question(check, [(inputs, labels_of_inputs(check, inputs, layer.parameter_names[0]))])


def most_favorable(answers: Iterable[bool | None]) -> bool | None:
    """Return what the one of several guesses that fits best comes to, asking until one fits; None if there is none."""
    others: list[bool | None] = []
    for answer in answers:
        check_time_limit()
        if answer:
            return True
        others.append(answer)
    return None if None in others or not others else False
