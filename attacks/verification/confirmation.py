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

import math
from dataclasses import replace

import torch

from attacks.network.normalization_modes import normalization_mode, other_mode
from attacks.result import Reconstruction, Remark, Result
from attacks.update.earlier_rounds import rounds_on_same_images
from attacks.update.float_rounding import coarse_form, is_below_rounding
from attacks.update.unmoved_tensors import without_unmoved
from attacks.update.update_rule import guess_update_rule, is_sign_compressed
from attacks.verification.any_loss import confirm_under_any_loss
from attacks.verification.comparison import comparisons_shared, most_favorable
from attacks.verification.left_out import require_transmitted_entries
from attacks.verification.nearly_told import say_nearly_told
from attacks.verification.other_pictures import doubt_other_pictures, first_guess
from attacks.verification.possible_labels import candidate_labels, leaves_labels_untried, leaves_order_open
from attacks.verification.replay_checks import (
    fits_no_class,
    fits_under_another_loss,
    leaves_targets_unasked,
    reproduces_returned_buffers,
    reproduces_size,
    reproduces_update,
    tells_brightness,
)
from attacks.verification.rounding import (
    judge_coarse_update,
    note_if_borne_out,
    require_exact_reproduction,
)
from attacks.verification.unverified import say_why_unverified
from attacks.verification.words import (
    BELOW_ROUNDING,
    CONTRADICTED,
    COPIES_UNCOUNTED,
    LABELS_UNTRIED,
    ORDER_UNTOLD,
    OTHER_MODE,
    POSSIBLE_RULES,
    RULE_DOUBTED,
    RULE_UNKNOWN,
    SIZE_CONTRADICTED,
    SIZE_UNSTATED,
    STATISTICS_CONTRADICTED,
    STILL,
    TARGETS_REFUSED,
    TARGETS_UNKNOWN,
    UNDER_ANOTHER_LOSS,
)
from fl.losses.function import FunctionError, OwnLoss, function_errors_named
from fl.runtime.double_precision import PrecisionError
from fl.view import ServerView

MOST_NAMED = 3
"""Tensors that a note names, at most."""
LEAST_OF_COPY, COPY_ROUNDINGS = 1e-4, 10.0
"""Share of what flows back that each copy of a picture has to leave, and in units of the rounding of any tensor."""


def confirm(view: ServerView, result: Result) -> Result:
    """Return the result, `verified` only where the update, or its stated rule, bears it out.

    Where the network does not run in double precision, or the user's loss raises an error, nothing is confirmed. What
    an attack itself does not verify says in its note why not, and how much is open.

    Args:
        view: the view that was attacked.
        result: of the attack on the view.
    """
    if isinstance(result, Reconstruction):
        said_before = {Remark.LABELS_CONFIRMED, Remark.MAY_BE_MIXTURE, Remark.ONE_OF_SEVERAL, Remark.UNCOMPARED}
        result = result.without_remarks(said_before)
    try:
        with function_errors_named(), comparisons_shared():
            held = _confirm(view, result)
            return say_why_unverified(view, say_nearly_told(held)) if isinstance(held, Reconstruction) else held
    except (PrecisionError, FunctionError) as error:
        assert isinstance(result, Reconstruction)
        note = "; ".join(filter(None, (result.note, f"not confirmed: {error}")))
        return replace(result, verified=None, fixed=None, note=note)


def _confirm(view: ServerView, result: Result) -> Result:
    """Return the result, `verified` only where the update bears it out, and no picture that a network does not see."""
    held = _require_reproduction(view, result)
    if isinstance(held, Reconstruction) and Remark.PARTLY_TOLD in held.remarks:
        ruled_out = None if coarse_form(view) else False  # a miss may be no more than rounding
        return replace(held, verified=ruled_out, fixed=None, approximate=False)
    if not isinstance(held, Reconstruction) or view.task.inputs.has_ids:
        return held
    return doubt_other_pictures(view, held)


def _require_reproduction(view: ServerView, result: Result) -> Result:
    """Return the result, `verified` only where the update, or its stated rule, bears it out."""
    if isinstance(result, Reconstruction) and result.verified is False and (kind := coarse_form(view)):
        return judge_coarse_update(view, result, kind)
    unstated = not view.threat.knows_optimizer
    if not isinstance(result, Reconstruction):
        return result
    if is_below_rounding(view):
        verified = None if result.verified else result.verified
        return replace(result.with_note(BELOW_ROUNDING), verified=verified, fixed=None, approximate=False)
    result = require_transmitted_entries(view, result)
    if not (result.verified or (unstated and result.fixed is not None)):
        return note_if_borne_out(view, result)
    answer = reproduces_update(view, result)
    if answer is False and (earlier := rounds_on_same_images(view)):  # the picture may be that of one of these
        said = {past.round: reproduces_update(past, result) for past in earlier}
        view = next((past for past in earlier if said[past.round]), view)
        answer = most_favorable(said.values())
    moved = without_unmoved(view)
    if answer is False and moved is not view and (reproduces_update(moved, result) or tells_brightness(moved, result)):
        still = STILL.format(", ".join([name for name in view.update if name not in moved.update][:MOST_NAMED]))
        return _require_reproduction(moved, replace(result, note="; ".join(filter(None, (result.note, still)))))
    sized = not is_sign_compressed(view) or reproduces_size(view, result) is not False  # signs have a direction, too
    if sized and (answer or (answer is None and tells_brightness(view, result))):
        held = require_exact_reproduction(view, result)
        if _may_be_fewer_copies(held) and not (reproduces_size(view, result) and _all_copies_speak(view, result)):
            held = held.with_note(COPIES_UNCOUNTED).without_remarks({Remark.LABELS_CONFIRMED})
            return replace(held, verified=None, fixed=None, approximate=bool(held.verified or held.approximate))
        return held
    if (answer is False or leaves_targets_unasked(view, result)) and not _may_be_fewer_copies(result):
        found = confirm_under_any_loss(view, result)
        if found is not None:
            return found
    kind = coarse_form(view) if answer is False else ""
    return judge_coarse_update(view, result, kind) if kind else _withdraw_with_reason(view, result, answer)


def _may_be_fewer_copies(result: Reconstruction) -> bool:
    """Return whether fewer copies of each picture may make the same update up to a factor.

    Others of the batch may then be pictures of which the network is certain: they leave nothing in the update. Labels
    do not tell: where all that flows back has one direction, two copies with different ones leave what one does.
    """
    if result.inputs is None or len(result.inputs) < 2:
        return False
    times = torch.unique(result.inputs.flatten(1), dim=0, return_counts=True)[1]
    return math.gcd(*times.tolist()) > 1


def _all_copies_speak(view: ServerView, result: Reconstruction) -> bool:
    """Return whether each copy leaves something in the update: one with a label that is certain leaves nothing."""
    guess = first_guess(view, result)
    if guess is None:
        return False
    check, images, labels = guess
    flowing = check.label_gradients(images).by_outputs(labels).flatten(1).double().norm(dim=1)
    least = max([LEAST_OF_COPY, *(COPY_ROUNDINGS * error for error in check.errors.values())])
    return bool((flowing > least * flowing.sum()).all())


def _withdraw_with_reason(view: ServerView, result: Reconstruction, answer: bool | None) -> Reconstruction:
    """Return a result that the update does not bear out, with the reason; without one it is checked to rounding.

    Args:
        view: the view that was attacked.
        result: of the attack on the view.
        answer: whether the update is one step on it, False or not known.
    """
    reason, other = _find_doubt(view, result, answer)
    if not reason:
        return require_exact_reproduction(view, result)
    contradicted = answer is False and reason not in {LABELS_UNTRIED, ORDER_UNTOLD}
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


def _find_doubt(view: ServerView, result: Reconstruction, answer: bool | None) -> tuple[str, bool]:
    """Return why a result is not confirmed, or nothing; and whether it makes the update under another loss."""
    looks = guess_update_rule(view)
    if answer is False and leaves_labels_untried(view, result):
        return LABELS_UNTRIED, False
    if answer is False and leaves_order_open(view, result):
        return ORDER_UNTOLD, False
    if answer is False:
        other = fits_under_another_loss(view, result)
        why = UNDER_ANOTHER_LOSS if other else looks or f"{_other_mode(view)}{POSSIBLE_RULES}"
        return f"{CONTRADICTED} ({why})", other
    if leaves_targets_unasked(view, result):
        known = next(candidate_labels(view, result), None) is not None
        refused = known and isinstance(view.task.loss, OwnLoss)
        if not refused and fits_no_class(view, result) and fits_under_another_loss(view, result):
            return f"not confirmed: {UNDER_ANOTHER_LOSS}", True
        return TARGETS_REFUSED if refused else TARGETS_UNKNOWN, False
    if reproduces_returned_buffers(view, result) is False:
        return STATISTICS_CONTRADICTED, False
    if not view.threat.knows_optimizer:
        return RULE_UNKNOWN, False
    if (sized := reproduces_size(view, result)) is False:
        return SIZE_UNSTATED if view.scale_unknown else SIZE_CONTRADICTED, False
    # a uniform image's gradient looks like signs, too, but another rule's has another size
    return f"{RULE_DOUBTED} {looks}" if looks and not sized else "", False


def _other_mode(view: ServerView) -> str:
    """Return that batch normalization may have been in the other mode than it counts as in; "" where there is none."""
    mode = normalization_mode(view)
    return OTHER_MODE.format(other_mode(mode), mode) if mode else ""
