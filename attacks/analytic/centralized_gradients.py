"""The picture behind centralized gradients (Yong et al., ECCV 2020, Eq. 1): their rows have their mean taken off.

With x what the first linear layer is given, the rows of its weight's gradient are multiples of x less the mean of its
numbers, and the bias's gradient says how large they are. So x is known but for one number that is added to all of it.
One step on each x that has pixels in [0, 1], its gradients centralized likewise, is held against the whole update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.result import Reconstruction, Remark
from attacks.update.first_linear_layer import LinearLayer
from attacks.update.observed_update import ObservedUpdate
from fl.predict import predict
from fl.tensors import dense
from fl.types import Candidate
from fl.view import ServerView

TRIED, ROUNDS = 33, 4
"""Brightnesses that are tried between the darkest and the brightest, and how often again around the best."""
LEVELS_ASIDE = 4.0
"""Levels of 8 bits by which a brighter and a darker picture must make another update, for a brightness to be told."""
FAR_OUTSIDE = 1e-3
"""How far outside of [0, 1] pixels may come by rounding."""
UNTOLD = (
    "gradients are centralized, and tell what the first linear layer takes but for its mean: the picture is known up "
    "to its brightness, and shown halfway between the darkest and the brightest that there is"
)
TOLD = (
    "gradients are centralized, and tell what the first linear layer takes but for its mean: this brightness is the "
    "one at which a step with centralized gradients makes the whole update"
)


def picture_behind(layer: LinearLayer, centered: Tensor, labels: Tensor | None, fits: float) -> Reconstruction | None:
    """Return the picture of what a layer is given, less its mean; None where no brightness has pixels in [0, 1].

    Args:
        layer: that is given the picture.
        centered: its input, less the mean of its numbers (n,).
        labels: of the picture (1,); None where it is not known.
        fits: share of the update that the right brightness may leave.
    """
    view = layer.view
    zero, one = (layer.to_pixels(centered[None] + shift) for shift in (0.0, 1.0))
    slope = one - zero
    ends = torch.stack([-zero / slope, (1 - zero) / slope])
    low, high = float(ends.amin(0).amax()), float(ends.amax(0).amin())
    if high < low - FAR_OUTSIDE / float(slope.abs().amin()):
        return None

    def shown(shift: float) -> Tensor:
        return (zero + shift * slope).clamp(0, 1).to(view.dtype)

    at, known = (low + high) / 2, () if view.labels is None else ("labels",)
    if labels is not None and not view.private:
        width = high - low
        for _ in range(ROUNDS):
            shifts = [at + width * (i / (TRIED - 1) - 0.5) for i in range(TRIED)]
            at = min(shifts, key=lambda shift: _residual_share(view, shown(shift), labels))
            width *= 4 / (TRIED - 1)
        aside = LEVELS_ASIDE / 255 / float(slope.abs().amin())
        others = [shift for shift in (at - aside, at + aside) if low <= shift <= high]
        told = all(_residual_share(view, shown(shift), labels) > fits for shift in others)
        if told and _residual_share(view, shown(at), labels) <= fits:
            found = Reconstruction(inputs=shown(at), labels=labels, knowledge=known, approximate=True)
            return found.with_note(TOLD, Remark.CENTRALIZED)
        at = (low + high) / 2
    found = Reconstruction(inputs=shown(at), labels=labels, knowledge=known)
    return found.with_note(UNTOLD, Remark.CENTRALIZED, Remark.SCALE_TAKEN_OFF)


def centralized(update: Tensor) -> Tensor:
    """Return the update of a parameter, of a weight less the mean of each row."""
    return update if update.ndim < 2 else update - update.mean(tuple(range(1, update.ndim)), keepdim=True)


def _residual_share(view: ServerView, image: Tensor, labels: Tensor) -> float:
    """Return the share of an update that one step on an image, with centralized gradients, leaves at the best size."""
    observed = ObservedUpdate(view)
    with torch.no_grad():
        sent = observed.in_double(predict(view, Candidate(image.to(view.device), labels.to(view.device))))
    seen = observed.in_double(view.update)
    made = torch.cat([centralized(dense(sent[name])).flatten() for name in seen])
    wanted = torch.cat([dense(value).flatten() for value in seen.values()])
    size = float(made @ made)
    if not size > 0:
        return math.inf
    return float((wanted - (made @ wanted) / size * made).norm() / wanted.norm())
