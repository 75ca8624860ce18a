"""Whether given images make an update under another loss than stated, or with other labels, which are then wrong."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks.labels.assignment import assign_labels
from attacks.result import Reconstruction
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.any_loss import confirm_under_any_loss
from attacks.verification.replay_checks import reproduces_update, reproduces_update_under_any_loss
from fl.runtime.double_precision import PrecisionError
from fl.types import Truth
from fl.view import ServerView

OTHER_LOSS = (
    "one step on these images makes all of it if other gradients flow back into the outputs than the loss as stated "
    "has: state the loss that was trained with, its label smoothing, weights of classes or soft targets (--loss)"
)
OTHER_LABELS = (
    "one step on these images makes it with other labels, {} in place of {}: check the labels, or their order"
)
MOST_NAMED = 8
"""Labels that are named, at most."""


def describe_other_loss(view: ServerView, truth: Truth) -> str:
    """Return that images make an update with other labels, or under another loss than stated; empty where of neither.

    Args:
        view: of the update.
        truth: the images that are said to be behind it, which do not make it as stated.
    """
    images = truth.inputs.to(view.device, view.dtype)
    if view.private or view.parts or view.batch_size != len(images):
        return ""
    try:
        if said := _describe_labels(view, truth, images):
            return said
        if len(images) > 1:
            return OTHER_LOSS if reproduces_update_under_any_loss(view, images) else ""
        found = confirm_under_any_loss(view, Reconstruction(inputs=images, verified=True))
    except PrecisionError:
        return ""
    return OTHER_LOSS if found is not None and (found.verified or found.approximate) else ""


def _describe_labels(view: ServerView, truth: Truth, images: Tensor) -> str:
    """Return with which other labels images make an update; empty where with none."""
    given = truth.labels
    found = assign_labels(view, ObservedUpdate(view).change, images)
    if given is None or found is None or torch.equal(found.cpu(), given.cpu()):
        return ""
    asked = Reconstruction(inputs=images, labels=found, verified=True)
    if reproduces_update(replace(view, labels=None), asked) is not True:
        return ""
    return OTHER_LABELS.format(*map(_name_labels, (found, given)))


def _name_labels(labels: Tensor) -> str:
    named = ", ".join(map(str, labels[:MOST_NAMED].tolist()))
    return f"{named}, ..." if len(labels) > MOST_NAMED else named
