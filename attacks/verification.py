"""Checks whether the whole update bears a picture out, which a result has to pass to count as verified.

An attack that solves one layer's equations takes for granted that the update is a multiple of a gradient. Rules that
treat single numbers or single tensors (signs, Adam, clipping by tensor, step sizes by layer) leave one layer's update
an outer product, so that its equations hold for a wrong picture. Other layers say otherwise: the picture, put through
the network again with its label, sends an update back, and that must be the observed one in all tensors, up to one
common factor. What can't be told apart so (a picture as dark as another rule would make it) is not borne out either.

Where an attack has no picture but what a linear layer is given, the same is asked of all layers from that one up: with
these inputs put in the layer's place, they must send back the observed update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.labels.assignment import assign_labels, fits_no_label
from attacks.labels.output_gradient import (
    Smoothing,
    read_smoothing,
    view_of_any_loss,
    view_of_several_under_any_loss,
)
from attacks.labels.recovery import single_label
from attacks.labels.targets import FAR_TARGET, fitted_signal, output_signal, outputs_of
from attacks.network.network_parts import network_above
from attacks.network.pixel_map import PixelMap, doubles, read_pixel_map
from attacks.result import NotApplicable, Reconstruction, Remark, Result
from attacks.update.earlier_rounds import rounds_on_same_images
from attacks.update.first_linear_layer import first_linear
from attacks.update.float_rounding import half_precision
from attacks.update.observed_update import ObservedUpdate
from attacks.update.returned_buffers import predict_buffers
from attacks.update.training_phases import training_phases
from attacks.update.unmoved_tensors import without_unmoved
from attacks.update.update_comparison import (
    BLUR_DRAWS,
    COMPUTED_SPACINGS,
    ERROR_FACTOR,
    MAX_PIXEL_ERROR,
    MAX_TRIED_LABELS,
    PAIR_DISTANCE,
    UNLIKE_DISTANCE,
    UpdateComparison,
    are_between_levels,
    at_levels,
    is_on_coarse_grid,
)
from attacks.update.update_rule import guess_update_rule
from attacks.update.view_below_classifier import LayerSignal, view_below_classifier
from fl.defense import Defense
from fl.losses.function import FunctionError, OwnLoss, function_errors_named
from fl.method import Method
from fl.parametrization import Parametrization
from fl.runtime.double_precision import PrecisionError
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense
from fl.view import ServerView

MAX_BORNE_OUT_LABELS = 10
"""Labels with which it is asked, at most, whether the update bears out what its attack does not verify."""
MOST_NAMED = 3
"""Tensors that a note names, at most."""


def confirm(view: ServerView, result: Result) -> Result:
    """Return the result, `verified` only where the update, or its stated rule, bears it out.

    Where the network does not run in double precision, or the user's loss raises an error, nothing is confirmed.

    Args:
        view: that was attacked.
        result: of an attack on it.
    """
    if isinstance(result, Reconstruction):
        result = result.without_remarks({Remark.LABELS_CONFIRMED, Remark.MAY_BE_MIXTURE})
    try:
        with function_errors_named():
            return _confirm(view, result)
    except (PrecisionError, FunctionError) as error:
        assert isinstance(result, Reconstruction)
        note = "; ".join(filter(None, (result.note, f"not confirmed: {error}")))
        return replace(result, verified=None, fixed=None, note=note)


def _confirm(view: ServerView, result: Result) -> Result:
    """Return the result, `verified` only where the update bears it out, and no picture that a network does not see."""
    held = _hold_to_update(view, result)
    if isinstance(held, Reconstruction) and Remark.PARTLY_TOLD in held.remarks:
        return replace(held, verified=False, fixed=None, approximate=False)
    if not isinstance(held, Reconstruction) or held.inputs is None or not view.task.inputs.is_image:
        return held
    asked = held.verified or held.approximate
    pixels = read_pixel_map(without_unmoved(view)) if asked else PixelMap("told")  # what did not move tells nothing
    if pixels.kind == "folded" or (pixels.kind == "unknown" and held.verified and _has_double(view, held)):
        reason, seen = FOLDED, 0
    elif pixels.kind == "fewer":
        reason, seen = FEWER_GIVEN, len(held.inputs) * pixels.numbers
    elif (pixels.kind == "unknown" or (held.approximate and held.fixed is None)) and (
        unseen := _count_unseen(view, held)
    ):
        reason, seen = UNSEEN, held.inputs.numel() - unseen
    else:
        return held
    count, partly = held.inputs.numel(), () if reason == FOLDED else (Remark.PARTLY_SEEN,)
    held = held.with_note(reason.format(seen=seen, unseen=count - seen, count=count), *partly)
    held = replace(held, verified=None, fixed=None, approximate=seen >= LEAST_SEEN * count)
    return _without_unseen_pixels(held, pixels.pixels)


def _without_unseen_pixels(result: Reconstruction, told: Tensor | None) -> Reconstruction:
    """Return pictures with gray at the pixels that a network is not given; as they are where none is told by itself."""
    if told is None or result.inputs is None:
        return result
    seen = told.to(result.inputs.device).expand_as(result.inputs)
    return replace(result, inputs=torch.where(seen, result.inputs, UNSEEN_GRAY), seen=seen)


def _has_double(view: ServerView, result: Reconstruction) -> bool:
    """Return whether pictures that networks often take for another make the update as well."""
    asked = _first_guess(view, result)
    return asked is not None and any(asked[0].is_explained_to_rounding(other, asked[2]) for other in doubles(asked[1]))


def _count_unseen(view: ServerView, result: Reconstruction) -> int:
    """Return how many numbers of pictures that an update bears out may be any for all that it says."""
    asked = _first_guess(view, result)
    return 0 if asked is None else asked[0].count_unseen(*asked[1:])


def _first_guess(view: ServerView, result: Reconstruction) -> tuple[UpdateComparison, Tensor, Tensor] | None:
    """Return the comparison with an update, and the pictures with the likeliest labels; None where none can be made."""
    asked = _comparison(view, replace(result, verified=True))
    guess = None if asked is None else next(iter(asked.guesses), None)
    return None if asked is None or guess is None else (asked.check, *guess)


def _hold_to_update(view: ServerView, result: Result) -> Result:
    """Return the result, `verified` only where the update, or its stated rule, bears it out."""
    if isinstance(result, Reconstruction) and result.verified is False and (kind := half_precision(view)):
        return _hold_to_coarse_rounding(view, result, kind)
    unstated = not view.threat.knows_optimizer
    if not isinstance(result, Reconstruction):
        return result
    if not (result.verified or (unstated and result.fixed is not None)):
        return _note_if_borne_out(view, result)
    answer = explains_update(view, result)
    if answer is False and (earlier := rounds_on_same_images(view)):  # the picture may be that of one of these
        said = {past.round: explains_update(past, result) for past in earlier}
        view = next((past for past in earlier if said[past.round]), view)
        answer = _most_favorable(said.values())
    moved = without_unmoved(view)
    if answer is False and moved is not view and (explains_update(moved, result) or _tells_brightness(moved, result)):
        still = STILL.format(", ".join([name for name in view.update if name not in moved.update][:MOST_NAMED]))
        return _hold_to_update(moved, replace(result, note="; ".join(filter(None, (result.note, still)))))
    if answer or (answer is None and _tells_brightness(view, result)):
        return _hold_to_rounding(view, result)
    if answer is False or _leaves_targets_unasked(view, result):
        found = _confirm_under_any_loss(view, result)
        if found is not None:
            return found
    looks = guess_update_rule(view)
    kind = half_precision(view) if answer is False else ""
    if kind:
        return _hold_to_coarse_rounding(view, result, kind)
    other = False
    untried = answer is False and _leaves_labels_untried(view, result)
    if untried:
        reason = LABELS_UNTRIED
    elif answer is False:
        other = _fits_under_another_loss(view, result)
        reason = f"{CONTRADICTED} ({UNDER_ANOTHER_LOSS if other else looks or POSSIBLE_RULES})"
    elif answer is None and _leaves_targets_unasked(view, result):
        known = next(_candidate_labels(view, result), None) is not None
        refused = known and isinstance(view.task.loss, OwnLoss)
        other = not refused and _fits_no_label(view, result) and _fits_under_another_loss(view, result)
        reason = f"not confirmed: {UNDER_ANOTHER_LOSS}" if other else TARGETS_REFUSED if refused else TARGETS_UNKNOWN
    elif answer is None and explains_statistics(view, result) is False:
        reason = STATISTICS_CONTRADICTED
    elif unstated:
        reason = RULE_UNKNOWN
    elif (sized := explains_size(view, result)) is False:
        reason = SIZE_UNSTATED if view.scale_unknown else SIZE_CONTRADICTED
    elif looks and not sized:  # a uniform image's gradient looks like signs, too, but another rule's has another size
        reason = f"{RULE_DOUBTED} {looks}"
    else:
        return _hold_to_rounding(view, result)
    contradicted = answer is False and not untried
    unasked = (other and not contradicted) or reason in {TARGETS_UNKNOWN, TARGETS_REFUSED}
    remarks = {
        Remark.CONTRADICTED: contradicted,
        Remark.RULE_UNKNOWN: reason == RULE_UNKNOWN,
        Remark.SIZE_CONTRADICTED: reason == SIZE_CONTRADICTED,
        Remark.UNASKED: unasked,
        Remark.OTHER_LOSS: other,
    }
    result = result.with_note(reason, *(remark for remark, said in remarks.items() if said))
    return replace(result, verified=False if contradicted else None, fixed=None)


STILL = "tensors that did not move count as not trained: {}"
CONTRADICTED = (
    "not confirmed: the picture explains what it was read from, but one step of SGD on it does not make the rest of "
    "the update"
)
POSSIBLE_RULES = (
    "another loss or optimizer, weight decay in a part of the weights, clipping by tensor, step sizes by layer, other "
    "weights before, or a turned sign?"
)
"""What may be the reason where sizes alone do not tell."""
UNDER_ANOTHER_LOSS = (
    "with gradients of the outputs that the loss as stated has for none of the labels tried, one step makes all of the "
    "update, as another loss, soft targets or weights of examples make them: state the loss that was trained with"
)
LABELS_UNTRIED = (
    f"not confirmed: the label is unknown, and with none of the first {MAX_TRIED_LABELS} does one step of SGD make the "
    "update; state the labels to rely on that"
)
TARGETS_UNKNOWN = (
    "not confirmed: the targets are unknown and can't be told from the update, so nobody can ask whether one step on "
    "the picture makes all of it; state them (threat: knows_labels) to rely on that"
)
TARGETS_REFUSED = (
    "not confirmed: the loss function takes none of the targets that the examples may have, by themselves, so nobody "
    "can ask whether one step on the picture makes all of it"
)
RULE_UNKNOWN = (
    "not confirmed: the optimizer was not stated, and nothing in the update tells whether it was plain SGD; "
    "state it (method, --method) to rely on that"
)
ROUNDED_FURTHER = "not confirmed, nor ruled out: a miss may be no more than the rounding of what was sent in"
BORNE_OUT_AS_ROUNDED = (
    "borne out, but not confirmed to a quarter of a level: one step of SGD on it makes the update to the rounding of "
    "{}, and on others, brighter ones or ones that differ at random by {}{}, does not"
)
MORE_THAN_ROUNDING = (
    "borne out, but not confirmed to a quarter of a level: one step of SGD on it makes the update but for more "
    "than rounding, as of pictures nearly alike stated as one (then it is their mean), or of noise"
)
MEAN_OF_PICTURES = (
    "borne out, but not confirmed to a quarter of a level: its pixels lie between levels of 8 bits as those of a mean "
    "of two to four pictures do, which were stated as one"
)
PAIRS_HIDDEN = (
    "borne out, but not confirmed to a quarter of a level: it is not at levels of 8 bits, and two pictures 35 dB "
    "apart, stated as one, could make this update to its rounding, so that it may lie between them"
)
INPUTS_HIDDEN = (
    "borne out, but not confirmed: two examples that differ by a tenth of their range, stated as one, could make this "
    "update to its rounding, so that it may lie between them"
)
OTHER_LABELS = "another label makes all of the update as well, so that labels are not told"
SOME_UNTOLD = (
    "not confirmed: with another in place of one of them the update is the same to its rounding, as next to nothing "
    "flows back of that one"
)
UNLIKE_HIDDEN = (
    "borne out if it is of one example: two that are unlike each other, stated as one, could make this update to its "
    "rounding, as where all that flows back has one direction, so that it may lie anywhere between them"
)
UNLIKE_HIDDEN_BY = (
    "borne out if it is of one example: two that are unlike each other, stated as one, could make this update to the "
    "rounding of {}, so that it may lie between them"
)
UNLIKE_NEARLY_HIDDEN = (
    "borne out if it is of one example: two that are unlike each other, stated as one, could make this update as "
    "nearly as it does, so that it may lie anywhere between them"
)
MEAN_OF_UNLIKE = (
    f"{MEAN_OF_PICTURES}, and for all that the update tells they may be unlike each other, so that it is like none"
)
FAR_APART = 5.0
"""How many times the distance at which pairs must be noticed, at which those that are not count as unlike."""
FOLDED = (
    "one of several pictures that make the update: what the network does to pixels below its first trained parameters "
    "comes out the same for others"
)
FEWER_GIVEN = "one of several pictures that make the update: of {count} numbers the network is given {seen}"
UNSEEN = (
    "borne out as far as the network sees it: {unseen} of the {count} numbers of the picture change nothing in the "
    "update"
)
UNSEEN_GRAY = 0.5
"""Pixels of which nothing is known."""
LEAST_SEEN = 0.5
"""Share of a picture's numbers that a network must be given for a picture that the update bears out."""
RULE_DOUBTED = "not confirmed: nothing in the update tells whether it was a step as stated, and it looks like"
ANY_LOSS = (
    "the gradient of the outputs was taken from the update, since no target of the loss as stated makes it, or none is "
    "known: the label is not told"
)
SMOOTHED = "its targets are those of cross entropy with label smoothing"
STATISTICS_CONTRADICTED = (
    "not confirmed: the update does not tell how bright the picture is, and the statistics of batch normalization that "
    "came back are not those of the picture"
)
SIZE_CONTRADICTED = (
    "not confirmed: one step as stated makes an update of another size from it, and nothing else in the update tells "
    "how bright it is; check the step size and the optimizer"
)
SIZE_UNSTATED = (
    "not confirmed: nothing in the update tells how bright the picture is but its size, which nobody knows without the "
    "step size; state that (method, --method)"
)


def _confirm_under_any_loss(view: ServerView, result: Reconstruction) -> Reconstruction | None:
    """Return a result that the update bears out under another loss than stated, or with other targets; None of others.

    What flows back into the outputs is then taken from the update itself. The label is kept where that is what label
    smoothing makes of one.
    """
    easier = view_of_any_loss(view) if result.verified else None
    asked = None if easier is None else _comparison(easier, result)
    if easier is None or asked is None:
        return None
    smoothed = None if result.inputs is None else read_smoothing(view, result.inputs)
    if any(_is_explained_to_rounding(asked.check, *guess) for guess in asked.guesses):
        held = _hold_to_rounding(easier, result)
    elif smoothed is not None and result.inputs is not None and _is_explained_smoothed(view, result.inputs, smoothed):
        held = _hold_to_rounding(view, result, smoothed.targets().to(view.device))
    else:
        return None
    reason = ANY_LOSS if smoothed is None else f"{SMOOTHED} {smoothed.share:.2g}, which was not stated"
    if smoothed is None:
        return replace(held.with_note(reason), labels=None)
    confirmed = (Remark.LABELS_CONFIRMED,) if _tells_labels(view) else ()
    return replace(held.with_note(reason, *confirmed), labels=torch.tensor([smoothed.label], device=view.device))


def _is_explained_to_rounding(check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    """Return whether inputs leave no more of an update than its rounding, and darker and brighter ones do."""
    return check.is_explained_to_rounding(images, labels) and check.tells_brightness_to_rounding(images, labels)


def _is_explained_smoothed(view: ServerView, images: Tensor, smoothed: Smoothing) -> bool:
    """Return whether an image does so with a label smoothing, and darker and brighter ones with none."""
    check, targets = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True), smoothed.targets()

    def read(others: Tensor) -> Tensor | None:
        found = read_smoothing(view, others)
        return None if found is None else found.targets()

    return check.is_explained_to_rounding(images, targets) and check.tells_brightness_to_rounding(images, targets, read)


def _fits_no_label(view: ServerView, result: Reconstruction) -> bool:
    """Return whether of a picture of a batch no class says what flows back, though all were asked."""
    return result.inputs is not None and fits_no_label(view, ObservedUpdate(view).change, result.inputs)


def explains_under_any_loss(view: ServerView, images: Tensor) -> bool:
    """Return whether a batch makes the update with what flows back into its outputs taken from the update.

    Args:
        view: the server's.
        images: (N, C, H, W), at least two.
    """
    easier = view_of_several_under_any_loss(view, images) if can_replay(view) else None
    if easier is None:
        return False
    check = UpdateComparison(easier, ObservedUpdate(easier).relative_rounding, True)
    return check.is_explained(images, torch.zeros(len(images), dtype=torch.int64)) is not False


def _fits_under_another_loss(view: ServerView, result: Reconstruction) -> bool:
    """Return whether a batch makes the update with what flows back into its outputs taken from the update.

    That confirms nothing: mixtures of the pictures may do so as well.
    """
    return result.inputs is not None and explains_under_any_loss(view, result.inputs)


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


def explains_update(view: ServerView, result: Reconstruction) -> bool | None:
    """Return whether the update is one step on the result's images, and on no darker or brighter ones.

    It is None if nothing tells. Of classes whose number is beyond `MAX_TRIED_LABELS` only the first are tried where the
    labels are unknown: it is False for images of the others, too.

    Where the classifier is private, the layers below the last one that is shared are asked. Where the result holds no
    images but what a linear layer is given, the layers from that one up are.
    """
    if view.private:
        return _explains_lower_layers(view, result)
    asked = _comparison(view, result)
    return None if asked is None else _most_favorable(asked.check.is_explained(*guess) for guess in asked.guesses)


def contradicts_features(view: ServerView, result: Reconstruction, layer: str) -> bool:
    """Return whether the rest of the update speaks against what is said to be the input of a linear layer.

    Rules that treat single numbers or tensors alike leave a layer's update an outer product, of which a wrong input
    follows. The layers above send back another update for it. Of another layer than the first one with a bias it is
    asked whether the update looks like that of such a rule.

    Args:
        view: that was attacked.
        result: holds the input under `features/layer`.
        layer: its name.
    """
    first = first_linear(view)
    if isinstance(first, NotApplicable) or first.name != layer:
        return bool(guess_update_rule(view))
    alone = {"features": result.private[f"features/{layer}"]}
    return explains_update(view, replace(result, inputs=None, private=alone, verified=None, fixed=None)) is False


def explains_clipped(view: ServerView, features: Tensor, bound: float) -> bool:
    """Return whether inputs of the first linear layer make the update, to its rounding, of a gradient clipped by value.

    All layers from that one up are asked. Two unlike inputs, stated as one, must leave more.

    Args:
        view: of one picture.
        features: of the first linear layer with a bias (n,).
        bound: the largest size in the update.
    """
    labels = single_label(view)[0]
    private: Tensors = {"features": features}
    result = Reconstruction(inputs=None, labels=labels, objective=0.0, private=private, verified=True)
    asked = _comparison(view, result)
    guesses = () if asked is None else itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS)
    return asked is not None and any(asked.check.is_explained_clipped(*guess, bound) for guess in guesses)


def explains_size(view: ServerView, result: Reconstruction) -> bool | None:
    """Return whether the update is as large as the stated step makes it of the result's images.

    It is None if that is not known.

    It is asked where no direction tells how bright images are (one layer and two classes, say). Where nobody knows the
    step size no size is the stated one.
    """
    asked = None if view.private else _comparison(view, result)
    if asked is None:
        return None
    if view.scale_unknown:
        return False
    guesses, images, target = asked.guesses, result.inputs, result.labels
    if view.task.loss.is_linear_in_targets and view.labels is None:  # what tells a direction alone has no size
        guesses = [] if images is None or target is None else [(images, target)]
    return _most_favorable(asked.check.has_stated_size(*guess) for guess in guesses)


def explains_statistics(view: ServerView, result: Reconstruction) -> bool | None:
    """Return whether the buffers that came back are those after a step on the result's images.

    It is None if none came back, or one step on the images can't be taken.

    It is asked where the update does not tell how bright images are: batch normalization in training mode takes that
    off, but its running statistics have it.
    """
    images = result.inputs
    kept = {name: dense(value).double() for name, value in (view.buffers_after or {}).items()}
    if not kept or images is None or len(images) != view.batch_size or view.private or not can_replay(view):
        return None
    made = predict_buffers(view, images.double())
    squares = dict.fromkeys(made, 0.0)
    for number in range(BLUR_DRAWS):
        noise = torch.randn(images.shape, generator=stream(number, "borne out"), dtype=torch.float64).to(images.device)
        for name, value in predict_buffers(view, images.double() + MAX_PIXEL_ERROR * noise).items():
            squares[name] += float((value - made[name]).square().sum()) / BLUR_DRAWS
    eps = COMPUTED_SPACINGS * torch.finfo(view.dtype).eps
    return all(
        float((kept[name] - value).norm()) <= eps * float(value.norm()) + ERROR_FACTOR * math.sqrt(squares[name])
        for name, value in made.items()
    )


def _tells_brightness(view: ServerView, result: Reconstruction) -> bool:
    """Return whether a picture makes the update to its rounding, and none brighter or darker by a quarter of a level.

    `explains_update` allows what a picture a quarter of a level off leaves, beside which a change of brightness may not
    show.
    """
    asked = None if view.private or view.batch_size != 1 else _comparison(view, result)
    if asked is None or result.inputs is None:
        return False
    return any(asked.check.tells_brightness_to_a_level(*guess) for guess in asked.guesses)


def _hold_to_rounding(view: ServerView, result: Reconstruction, targets: Tensor | None = None) -> Reconstruction:
    """Return a result that the update bears out, not verified where several pictures may have been stated as one.

    Pictures at levels of 8 bits count as no means of others: only those of pictures are that differ by even numbers of
    levels in every pixel, which small steps may hide. But those of few levels, far apart, do not: so the mean of three
    black and white ones is.

    Args:
        view: that was attacked.
        result: of an attack on it.
        targets: under which the update bears it out; None takes the labels that it may have.
    """
    asked = None if view.private or not result.verified else _comparison(view, result)
    if asked is None:
        return result
    pictured = result.inputs is not None and view.task.inputs.is_image
    reason, missed = "", []
    known = None if targets is None or result.inputs is None else [(result.inputs, targets)]
    for inputs, labels in known or asked.guesses:
        whole = at_levels(inputs) if pictured else None
        near = [inputs] if whole is None else [inputs, whole]
        if not any(asked.check.is_explained_to_rounding(one, labels) for one in near):
            missed.append((inputs, labels))
            continue
        if len(inputs) > 1 and targets is None and not asked.check.tells_every_picture(inputs, labels):
            return replace(result.with_note(SOME_UNTOLD), verified=None, fixed=None)
        averaged = pictured and are_between_levels(inputs)
        result = _with_labels(asked.check, view, result, inputs, labels)
        if whole is not None and not is_on_coarse_grid(whole):
            return result
        distance = PAIR_DISTANCE if pictured else UNLIKE_DISTANCE
        if not averaged and asked.check.tells_pairs_apart(inputs, labels, distance):
            return result
        reason = MEAN_OF_PICTURES if averaged else PAIRS_HIDDEN if pictured else INPUTS_HIDDEN
        if not asked.check.tells_pairs_apart(inputs, labels, FAR_APART * distance):
            return _as_mixture(result, MEAN_OF_UNLIKE if averaged else UNLIKE_HIDDEN)
    if not reason:
        reason = MORE_THAN_ROUNDING
        guess = next((one for one in missed if asked.check.is_explained(*one) is not False), None)
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
    levels = whole is not None and not is_on_coarse_grid(whole)
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
    if loss.takes_classes and not check.tells_other_labels(inputs, labels):
        return result if view.labels is not None else replace(result.with_note(OTHER_LABELS), labels=None)
    if not _tells_labels(view):
        return result
    return replace(result, remarks=result.remarks | {Remark.LABELS_CONFIRMED})


def _tells_labels(view: ServerView) -> bool:
    """Return whether what flows back has more directions than one, so that labels of another loss may show."""
    return not view.task.loss.sends_back_one_direction(view.task.output_shape)


def _hold_to_coarse_rounding(view: ServerView, result: Reconstruction, kind: str) -> Reconstruction:
    """Return a result on an update that was sent in two bytes a number, which is never verified.

    It is borne out where one step on it leaves no more than that rounding, and other pictures leave more.
    """
    asked = None if view.private else _comparison(view, replace(result, verified=True))
    guesses = () if asked is None else itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS)
    explained = [guess for guess in guesses if asked is not None and asked.check.is_explained_to_rounding(*guess)]
    told = asked.check.told_distance(*explained[0]) if asked is not None and explained else None
    pictured = result.inputs is not None and view.task.inputs.is_image
    if asked is not None and told is not None and _may_be_mixture(asked.check, *explained[0], pictured=pictured):
        return _as_mixture(result, UNLIKE_HIDDEN_BY.format(kind))
    unit = " (root mean square)" if result.inputs is not None else " of twice their root mean square"
    reason = f"{ROUNDED_FURTHER} {kind}" if told is None else BORNE_OUT_AS_ROUNDED.format(kind, told, unit)
    note = "; ".join(filter(None, (result.note, reason)))
    return replace(result, verified=None, fixed=None, note=note, approximate=told is not None)


def _note_if_borne_out(view: ServerView, result: Reconstruction) -> Reconstruction:
    """Return a result that its attack does not verify, with whether the update bears it out."""
    if result.inputs is None or view.private or not view.threat.knows_optimizer:
        return result
    moved = without_unmoved(view)
    for each in (view,) if moved is view else (view, moved):
        asked = _comparison(each, replace(result, verified=True))
        guesses = () if asked is None else itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS)
        guess = None if asked is None else next((one for one in guesses if asked.check.is_explained(*one)), None)
        if asked is not None and guess is not None:
            mixed = _may_be_mixture(asked.check, *guess, pictured=view.task.inputs.is_image)
            told = result.with_note(UNLIKE_NEARLY_HIDDEN, Remark.MAY_BE_MIXTURE) if mixed else result
            return replace(told, approximate=True)
    return result if asked is None else replace(result, approximate=False)


def _explains_lower_layers(view: ServerView, result: Reconstruction) -> bool | None:
    """Return what the layers below a private classifier say of images."""
    images = result.inputs
    if images is None or len(images) != view.batch_size or not can_replay(view):
        return None
    below = view_below_classifier(view)
    if not isinstance(below, ServerView) or below.private or not isinstance(below.method, LayerSignal):
        return None
    errors = ObservedUpdate(view).relative_rounding
    signal = errors.get(below.method.bias or f"{below.method.layer}.bias", 0.0)  # it flows back into every tensor below
    errors = {name: errors.get(name, 0.0) + signal for name in below.update}
    check = UpdateComparison(below, errors, result.verified is True)
    return check.is_explained(images, torch.zeros(1, dtype=torch.int64))


@dataclass(frozen=True)
class _Question:
    """What is asked of an update.

    Attributes:
        check: the comparison.
        guesses: the inputs of what is compared, with labels that they may have.
    """

    check: UpdateComparison
    guesses: Iterable[tuple[Tensor, Tensor]]


def _comparison(view: ServerView, result: Reconstruction) -> _Question | None:
    """Return what the update is compared with, or None where a step on what was found can't be taken."""
    if not can_replay(view):
        return None
    images, whole = result.inputs, result.verified is True
    if images is None:
        return _feature_comparison(view, result)
    if len(images) != view.batch_size:
        return None
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, whole)
    return _Question(check, ((images, labels) for labels in _taken_labels(view, result, images)))


def _feature_comparison(view: ServerView, result: Reconstruction) -> _Question | None:
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
        return _Question(check, ((inputs, labels) for labels in _taken_labels(*given, inputs, above)))
    if not view.task.loss.takes_classes:
        return None
    return _Question(check, [(inputs, check.labels_of(inputs, layer.parameter_names[0]))])


def _leaves_labels_untried(view: ServerView, result: Reconstruction) -> bool:
    """Return whether labels matter, are neither known to the server nor found, and are too many to be all tried."""
    used = result.labels if result.inputs is not None or view.batch_size == 1 else None  # see `_feature_comparison`
    known = view.private or used is not None or view.labels is not None or not view.method.uses_labels
    return not known and view.task.loss.takes_classes and view.task.num_classes > MAX_TRIED_LABELS


def _leaves_targets_unasked(view: ServerView, result: Reconstruction) -> bool:
    """Return whether targets matter, and there are none to ask the update with."""
    task = view.task
    if not view.method.uses_labels or view.private:
        return False
    asked = _comparison(view, result)
    if asked is not None and next(iter(asked.guesses), None) is None:
        return True
    if view.labels is not None:
        return False
    if (result.inputs is not None and len(result.inputs) > 1) or task.loss.is_linear_in_targets:
        return False
    unread = result.labels is None and task.loss.every_target(task.output_shape, MAX_TRIED_LABELS) is None
    return unread or not task.loss.has_exact_targets


def _most_favorable(answers: Iterable[bool | None]) -> bool | None:
    """Return what the one of several guesses that fits best comes to, asking until one fits; None of none."""
    others: list[bool | None] = []
    for answer in answers:
        if answer:
            return True
        others.append(answer)
    return None if None in others or not others else False


def _taken_labels(
    view: ServerView, result: Reconstruction, inputs: Tensor, above: ServerView | None = None
) -> Iterator[Tensor]:
    """Return labels that the images may have, the likeliest first, but those with which the loss takes no step.

    Args:
        view: of the images.
        result: that holds them.
        inputs: the images (N, C, H, W), or what the rest of the network is given for them.
        above: the view of that rest, if it is asked.
    """
    loss, outputs = view.task.loss, None
    for labels in _candidate_labels(view, result):
        if view.method.uses_labels and isinstance(loss, OwnLoss):
            outputs = outputs_of(above or view, inputs.to(view.device, view.dtype)) if outputs is None else outputs
            if not loss.takes(outputs, labels):
                continue
        yield labels


def _candidate_labels(view: ServerView, result: Reconstruction) -> Iterator[Tensor]:
    """Return labels that the images may have (N,), the likeliest first."""
    if not view.task.loss.is_cross_entropy and not view.task.loss.has_exact_targets and view.labels is None:
        yield from _far_targets(view, result)
        return
    several = result.inputs is not None and len(result.inputs) > 1
    # the server knows the labels of several images in no order: those found stand in the order of the images
    known = [result.labels, assign_labels(view, view.update, result.inputs), view.labels] if several else [view.labels]  # type: ignore[arg-type]
    known = known if several or view.labels is not None else [result.labels]
    found = [labels for labels in known if labels is not None]
    if not view.method.uses_labels:
        found = found[:1] or [torch.zeros(view.batch_size or 1, dtype=torch.int64)]
    if found:
        yield from found
    elif view.batch_size == 1:
        every = view.task.loss.every_target(view.task.output_shape, MAX_TRIED_LABELS)
        yield from () if every is None else every[:, None]


def _far_targets(view: ServerView, result: Reconstruction) -> Iterator[Tensor]:
    """Yield a target (1, ...) in the direction that the update tells, where targets are unknown numbers.

    It is far away, so that what flows back has that direction whatever the picture is: a near one, fitted to this
    picture, would speak against any other. One step is the same up to a factor, further ones are not.

    For the same reason the size of the update tells nothing of whether a picture is a mixture of several: the target
    that fits the picture was worked out by the size. Nor do pairs count that share this target, though what flows back
    of them has several directions. There are targets, and losses that nobody stated, of which it has one.
    """
    steps = [step for steps in training_phases(view)[1] or () for step in steps]
    if not view.task.loss.is_linear_in_targets:
        return
    if result.inputs is None or len(steps) != 1 or view.batch_size != 1:
        return
    inputs = result.inputs.to(view.device, view.dtype)
    signal = output_signal(view)
    signal = fitted_signal(view, inputs) if signal is None else signal
    if signal is None:
        return
    outputs = outputs_of(view, inputs)
    yield outputs - FAR_TARGET * (1 + float(outputs.abs().max())) * signal[None] / signal.abs().max()
