"""Results that make the update to its rounding, or as nearly as coarse numbers tell: whether others would as well."""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch import Tensor

from attacks.result import Reconstruction, Remark
from attacks.update.unmoved_tensors import without_unmoved
from attacks.verification.comparison import MAX_BORNE_OUT_LABELS, comparison
from attacks.verification.eight_bit_pixels import are_between_levels, are_levels_of_no_mixture, at_levels
from attacks.verification.label_comparison import tells_every_picture, tells_other_labels
from attacks.verification.update_comparison import PAIR_DISTANCE, UNLIKE_DISTANCE, UpdateComparison
from attacks.verification.words import (
    BEYOND_ROUNDING,
    BORNE_OUT_AS_ROUNDED,
    INPUTS_HIDDEN,
    MEAN_OF_PICTURES,
    MEAN_OF_UNLIKE,
    MORE_THAN_ROUNDING,
    OTHER_LABELS,
    PAIRS_HIDDEN,
    ROUNDED_FURTHER,
    SOME_UNTOLD,
    UNLIKE_HIDDEN,
    UNLIKE_HIDDEN_BY,
    UNLIKE_NEARLY_HIDDEN,
)
from fl.view import ServerView

FAR_APART = 5.0
"""How many times the distance at which pairs must be noticed, at which those that are not count as unlike."""


def require_exact_reproduction(
    view: ServerView, result: Reconstruction, targets: Tensor | None = None
) -> Reconstruction:
    """Return a result that the update bears out, not verified where several pictures may have been stated as one.

    Pictures at levels of 8 bits count as no means of others: only those of pictures are that differ by even numbers of
    levels in every pixel, which small steps may hide. Those of few levels count as means: so the mean of three black
    and white ones is.

    Args:
        view: the view that was attacked.
        result: of the attack on the view.
        targets: under which the update bears it out; None takes the labels that it may have.
    """
    asked = None if view.private or not result.verified else comparison(view, result)
    if asked is None:
        return result
    pictured = result.inputs is not None and view.task.inputs.is_image
    levels = pictured and not getattr(view.task.model, "moves_levels", False)
    reason, missed = "", []
    known = None if targets is None or result.inputs is None else [(result.inputs, targets)]
    for inputs, labels in known or asked.guesses:
        whole = at_levels(inputs) if levels else None
        near = [inputs] if whole is None else [inputs, whole]
        if not any(asked.check.is_explained_to_rounding(one, labels) for one in near):
            missed.append((inputs, labels))
            continue
        if len(inputs) > 1 and targets is None and not tells_every_picture(asked.check, inputs, labels):
            return replace(result.with_note(SOME_UNTOLD), verified=None, fixed=None)
        averaged = levels and are_between_levels(inputs)
        result = _with_labels(asked.check, view, result, inputs, labels)
        if whole is not None and are_levels_of_no_mixture(whole):
            return result
        distance = PAIR_DISTANCE if pictured else UNLIKE_DISTANCE
        if not averaged and asked.check.tells_pairs_apart(inputs, labels, distance):
            return result
        reason = MEAN_OF_PICTURES if averaged else PAIRS_HIDDEN if pictured else INPUTS_HIDDEN
        if not asked.check.tells_pairs_apart(inputs, labels, FAR_APART * distance):
            return _as_mixture(result, MEAN_OF_UNLIKE if averaged else UNLIKE_HIDDEN)
    if not reason:
        reason = MORE_THAN_ROUNDING
        answers = [(one, asked.check.is_explained(*one)) for one in missed]
        guess = next((one for one, answer in answers if answer is not False), None)
        if not any(answer for _, answer in answers):  # brighter ones leave no more, either
            return replace(result.with_note(BEYOND_ROUNDING), verified=None, fixed=None)
        if guess is not None and _may_be_mixture(asked.check, *guess, pictured=pictured):
            return _as_mixture(result, UNLIKE_NEARLY_HIDDEN)
    note = "; ".join(filter(None, (result.note, reason)))
    return replace(result, verified=None, fixed=None, note=note, approximate=True)


def _may_be_mixture(check: UpdateComparison, inputs: Tensor, labels: Tensor, *, pictured: bool) -> bool:
    """Return whether unlike examples, stated as one, could make an update as nearly as these inputs do.

    Args:
        check: the comparison, which these inputs explain.
        inputs: (N, C, H, W).
        labels: with which they do.
        pictured: whether they are pictures, which at levels of 8 bits are no mixtures if they leave rounding alone.
    """
    whole = at_levels(inputs) if pictured else None
    levels = whole is not None and are_levels_of_no_mixture(whole)
    if levels and any(check.is_explained_to_rounding(one, labels) for one in (inputs, whole) if one is not None):
        return False
    return not check.tells_pairs_apart(inputs, labels, FAR_APART * (PAIR_DISTANCE if pictured else UNLIKE_DISTANCE))


def _as_mixture(result: Reconstruction, reason: str) -> Reconstruction:
    """Return a result that is borne out if it is of as many examples as stated, for the reason that is noted."""
    mixed = result.without_remarks({Remark.LABELS_CONFIRMED}).with_note(reason, Remark.MAY_BE_MIXTURE)
    return replace(mixed, verified=None, fixed=None, approximate=True)


def _with_labels(
    check: UpdateComparison, view: ServerView, result: Reconstruction, inputs: Tensor, labels: Tensor
) -> Reconstruction:
    """Return a result with labels by which one step on it makes the update, where that tells right ones from others.

    They are confirmed where no others make it up to a factor; where others do, and the server knows none, none are
    handed out. Where all that flows back has one direction, others may under another loss.
    """
    loss = view.task.loss
    if not view.method.uses_labels or not loss.has_exact_targets or (loss.takes_classes and labels.ndim != 1):
        return result
    result = replace(result, labels=labels.to(view.device))
    if loss.takes_classes and not tells_other_labels(check, inputs, labels):
        return result if view.labels is not None else replace(result.with_note(OTHER_LABELS), labels=None)
    if not tells_labels(view):
        return result
    return replace(result, remarks=result.remarks | {Remark.LABELS_CONFIRMED})


def tells_labels(view: ServerView) -> bool:
    """Return whether what flows back has more directions than one, so that labels of another loss may show."""
    return not view.task.loss.sends_back_one_direction(view.task.output_shape)


def judge_coarse_update(view: ServerView, result: Reconstruction, kind: str) -> Reconstruction:
    """Return a result on an update that was sent in two bytes a number or less, which is never verified.

    It is borne out where one step on it leaves no more than that rounding, and other pictures leave more. Where the
    model computes in two bytes itself, that tells too little: darker pictures leave no more either.
    """
    asked = None if view.private or view.dtype.itemsize < 4 else comparison(view, replace(result, verified=True))
    guesses = () if asked is None else itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS)
    explained = [guess for guess in guesses if asked is not None and asked.check.is_explained_to_rounding(*guess)]
    told = asked.check.distinguishable_distance(*explained[0]) if asked is not None and explained else None
    pictured = result.inputs is not None and view.task.inputs.is_image
    if asked is not None and told is not None and _may_be_mixture(asked.check, *explained[0], pictured=pictured):
        return _as_mixture(result, UNLIKE_HIDDEN_BY.format(kind))
    unit = " (root mean square)" if result.inputs is not None else " of twice their root mean square"
    reason = f"{ROUNDED_FURTHER} {kind}" if told is None else BORNE_OUT_AS_ROUNDED.format(kind, told, unit)
    note = "; ".join(filter(None, (result.note, reason)))
    return replace(result, verified=None, fixed=None, note=note, approximate=told is not None)


def note_if_borne_out(view: ServerView, result: Reconstruction) -> Reconstruction:
    """Return a result that its attack does not verify, with whether the update bears it out."""
    if result.inputs is None or view.private or not view.threat.knows_optimizer:
        return result
    moved = without_unmoved(view)
    for each in (view,) if moved is view else (view, moved):
        asked = comparison(each, replace(result, verified=True))
        guesses = () if asked is None else itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS)
        guess = None if asked is None else next((one for one in guesses if asked.check.is_explained(*one)), None)
        if asked is not None and guess is not None:
            mixed = _may_be_mixture(asked.check, *guess, pictured=view.task.inputs.is_image)
            told = result.with_note(UNLIKE_NEARLY_HIDDEN, Remark.MAY_BE_MIXTURE) if mixed else result
            return replace(told, approximate=True)
    return result if asked is None else replace(result, approximate=False)
