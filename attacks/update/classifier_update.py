"""The classifier's part of an update: which tensors it is, and whether its sign is that of before - after."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.tensors import Tensors, dense
from fl.view import ServerView

SIGN_WARNING_NO_LABELS = "the sign of the update seems turned (after - before), so that no label is read off it"
"""What a result notes where the sign keeps labels from being read."""


def classifier_names(view: ServerView, tensors: Tensors) -> tuple[str | None, str | None]:
    """Return the names of the classifier's weight and bias, each None where it is not among `tensors`."""
    shapes = {n: v.shape for n, v in tensors.items() if n.startswith(view.task.head)}
    weights = [n for n, s in shapes.items() if len(s) == 2 and s[0] == view.task.num_classes]
    biases = [n for n, s in shapes.items() if len(s) == 1 and s[0] == view.task.num_classes]
    return (weights[-1] if weights else None), (biases[-1] if biases else None)


def classifier_tensors(view: ServerView, tensors: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Return the classifier's weight (K, d) and bias (K,) of `tensors`, each None where it is not among them."""
    weight, bias = (None if name is None else dense(tensors[name]) for name in classifier_names(view, tensors))
    return weight, bias


def is_sign_flipped(signal: Tensor, images: int = 1, rounding: float = 0.0) -> bool:
    """Return whether the gradient of a classifier's bias (K,) is that of images with its sign flipped: after - before.

    Under cross entropy it sums to zero and is negative for the images' own classes alone: for one class of one image.

    Args:
        signal: a gradient without noise, in any unit.
        images: how many there are.
        rounding: size up to which an entry has no sign, in the gradient's unit.
    """
    small = 1e-3 * float(signal.abs().sum())
    positive, negative = int((signal > rounding).sum()), int((signal < -rounding).sum())
    return 1 <= positive <= images < negative and float(signal.sum().abs()) <= small


def is_update_sign_flipped(view: ServerView, update: Tensors, images: int = 1) -> bool:
    """Return whether the classifier's bias in an update is that of `images` images with its sign flipped.

    Args:
        view: what the server saw; a difference of weights is rounded as these are, and rounding has no sign.
        update: observed or predicted, without weight decay.
        images: how many there are.
    """
    bias, sent = classifier_tensors(view, update)[1], classifier_tensors(view, view.shared)[1]
    if bias is None or not view.task.loss.is_cross_entropy:
        return False
    grid = 4 * torch.finfo(view.dtype).eps if view.rounded else 0.0
    rounding = 0.0 if sent is None else grid * float(sent.abs().max())
    return is_sign_flipped(bias, images, rounding)
