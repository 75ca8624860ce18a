"""Results that make the update under another loss than stated, or with targets that nobody knows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.labels.output_gradient import Smoothing, read_rounded_label, read_smoothing, view_of_any_loss
from attacks.result import Reconstruction, Remark
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.comparison import comparison
from attacks.verification.rounding import require_exact_reproduction, tells_labels
from attacks.verification.update_comparison import UpdateComparison
from attacks.verification.words import ANY_LOSS, AS_ROUNDED, SMOOTHED
from fl.view import ServerView


def confirm_under_any_loss(view: ServerView, result: Reconstruction) -> Reconstruction | None:
    """Return a result that the update bears out under another loss than stated, or with other targets; None for others.

    What flows back into the outputs is then taken from the update itself. The label is kept where that is what label
    smoothing makes of one, or rounding of one that the network is certain of.
    """
    easier = view_of_any_loss(view) if result.verified else None
    asked = None if easier is None else comparison(easier, result)
    if easier is None or asked is None:
        return None
    smoothed = None if result.inputs is None else read_smoothing(view, result.inputs)
    rounded = None if smoothed is not None or result.inputs is None else read_rounded_label(view, result.inputs)
    guesses = list(asked.guesses)
    if any(_is_explained_to_rounding(asked.check, *guess) for guess in guesses):
        held = require_exact_reproduction(easier, result)
    elif smoothed is not None and result.inputs is not None and _is_explained_smoothed(view, result.inputs, smoothed):
        held = require_exact_reproduction(view, result, smoothed.targets().to(view.device))
    elif any(_is_explained_as_rounded(asked.check, view, rounded, *guess) for guess in guesses):
        held = require_exact_reproduction(easier, result)
    else:
        return None
    label = rounded if smoothed is None else smoothed.label
    if label is None:
        return replace(held.with_note(ANY_LOSS), labels=None)
    reason = AS_ROUNDED if smoothed is None else f"{SMOOTHED} {smoothed.share:.2g}, which was not stated"
    confirmed = (Remark.LABELS_CONFIRMED,) if tells_labels(view) else ()
    return replace(held.with_note(reason, *confirmed), labels=torch.tensor([label], device=view.device))


def _is_explained_to_rounding(check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    """Return whether inputs leave no more of an update than its rounding, and darker and brighter ones do."""
    return check.is_explained_to_rounding(images, labels) and check.tells_brightness_to_rounding(images, labels)


def _is_explained_as_rounded(
    check: UpdateComparison, view: ServerView, label: int | None, images: Tensor, labels: Tensor
) -> bool:
    """Return whether an image does so with the outputs' gradient as it was rounded, which is no other image's."""

    def read(others: Tensor) -> Tensor | None:
        return None if read_rounded_label(view, others) is None else labels

    explained = label is not None and check.is_explained_to_rounding(images, labels)
    return explained and check.tells_brightness_to_rounding(images, labels, read)


def _is_explained_smoothed(view: ServerView, images: Tensor, smoothed: Smoothing) -> bool:
    """Return whether an image does so with a label smoothing, and darker and brighter ones with none."""
    check, targets = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True), smoothed.targets()

    def read(others: Tensor) -> Tensor | None:
        found = read_smoothing(view, others)
        return None if found is None else found.targets()

    return check.is_explained_to_rounding(images, targets) and check.tells_brightness_to_rounding(images, targets, read)
