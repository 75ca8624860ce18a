"""Results that make the update under another loss than stated, or with targets that nobody knows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.labels.output_gradient import Smoothing, read_smoothing, view_of_any_loss
from attacks.result import Reconstruction, Remark
from attacks.update.observed_update import ObservedUpdate
from attacks.update.update_comparison import UpdateComparison
from attacks.verification.comparison import comparison
from attacks.verification.rounding import hold_to_rounding, tells_labels
from attacks.verification.words import ANY_LOSS, SMOOTHED
from fl.view import ServerView


def confirm_under_any_loss(view: ServerView, result: Reconstruction) -> Reconstruction | None:
    """Return a result that the update bears out under another loss than stated, or with other targets; None of others.

    What flows back into the outputs is then taken from the update itself. The label is kept where that is what label
    smoothing makes of one.
    """
    easier = view_of_any_loss(view) if result.verified else None
    asked = None if easier is None else comparison(easier, result)
    if easier is None or asked is None:
        return None
    smoothed = None if result.inputs is None else read_smoothing(view, result.inputs)
    if any(_is_explained_to_rounding(asked.check, *guess) for guess in asked.guesses):
        held = hold_to_rounding(easier, result)
    elif smoothed is not None and result.inputs is not None and _is_explained_smoothed(view, result.inputs, smoothed):
        held = hold_to_rounding(view, result, smoothed.targets().to(view.device))
    else:
        return None
    reason = ANY_LOSS if smoothed is None else f"{SMOOTHED} {smoothed.share:.2g}, which was not stated"
    if smoothed is None:
        return replace(held.with_note(reason), labels=None)
    confirmed = (Remark.LABELS_CONFIRMED,) if tells_labels(view) else ()
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
