"""Whether given images make an update under another loss than stated, so that the loss is what is wrong."""

from __future__ import annotations

from attacks.result import Reconstruction
from attacks.verification.any_loss import confirm_under_any_loss
from attacks.verification.replay_checks import reproduces_update_under_any_loss
from fl.runtime.double_precision import PrecisionError
from fl.types import Truth
from fl.view import ServerView

OTHER_LOSS = (
    "one step on these images makes all of it if other gradients flow back into the outputs than the loss as stated "
    "has: state the loss that was trained with, its label smoothing, weights of classes or soft targets (--loss)"
)


def describe_other_loss(view: ServerView, truth: Truth) -> str:
    """Return that images make an update under another loss than stated; empty where they do not, or nothing tells.

    Args:
        view: of the update.
        truth: the images that are said to be behind it, which do not make it as stated.
    """
    images = truth.inputs.to(view.device, view.dtype)
    if view.private or view.parts or view.batch_size != len(images):
        return ""
    try:
        if len(images) > 1:
            return OTHER_LOSS if reproduces_update_under_any_loss(view, images) else ""
        found = confirm_under_any_loss(view, Reconstruction(inputs=images, verified=True))
    except PrecisionError:
        return ""
    return OTHER_LOSS if found is not None and (found.verified or found.approximate) else ""
