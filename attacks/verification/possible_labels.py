"""Labels and targets that pictures may have, with which it is asked whether they make the update."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attacks.labels.assignment import assign_labels
from attacks.labels.known_targets import KnownTargets
from attacks.labels.targets import FAR_TARGET, fitted_signal, output_signal, outputs_of
from attacks.result import Reconstruction
from attacks.update.label_gradients import MAX_TRIED_LABELS
from attacks.update.training_phases import training_phases
from fl.losses.function import OwnLoss
from fl.view import ServerView


def leaves_labels_untried(view: ServerView, result: Reconstruction) -> bool:
    """Return whether labels matter, are neither known to the server nor found, and are too many to be all tried."""
    used = result.labels if result.inputs is not None or view.batch_size == 1 else None  # see `_feature_comparison`
    known = view.private or used is not None or view.labels is not None or not view.method.uses_labels
    return not known and view.task.loss.takes_classes and view.task.num_classes > MAX_TRIED_LABELS


def taken_labels(
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
    for labels in candidate_labels(view, result):
        if view.method.uses_labels and isinstance(loss, OwnLoss):
            outputs = outputs_of(above or view, inputs.to(view.device, view.dtype)) if outputs is None else outputs
            if not loss.takes(outputs, labels):
                continue
        yield labels


def candidate_labels(view: ServerView, result: Reconstruction) -> Iterator[Tensor]:
    """Return labels that the images may have (N,), the likeliest first."""
    if not view.task.loss.is_cross_entropy and not view.task.loss.has_exact_targets and view.labels is None:
        yield from _far_targets(view, result)
        return
    if result.inputs is not None and len(result.inputs) > 1:
        yield from _labels_of_several(view, result, result.inputs)
        return
    known = result.labels if view.labels is None else view.labels
    if known is None and not view.method.uses_labels:
        known = torch.zeros(view.batch_size or 1, dtype=torch.int64)
    if known is not None:
        yield known
    elif view.batch_size == 1:
        every = view.task.loss.every_target(view.task.output_shape, MAX_TRIED_LABELS)
        yield from () if every is None else every[:, None]


def _labels_of_several(view: ServerView, result: Reconstruction, images: Tensor) -> Iterator[Tensor]:
    """Return labels that several images may have (N,), the likeliest first.

    The server knows them in no order: those found stand in the order of the images.
    """
    assigned = assign_labels(view, view.update, images)
    found = [labels for labels in (result.labels, assigned) if labels is not None]
    if not view.method.uses_labels:
        labels = [*found, view.labels]
        yield next((one for one in labels if one is not None), torch.zeros(view.batch_size or 1, dtype=torch.int64))
        return
    yield from found
    if view.labels is not None:
        yield from KnownTargets.of(view, images).orders


def leaves_order_open(view: ServerView, result: Reconstruction) -> bool:
    """Return whether the server knows the targets of several images, and nothing tells which image has which."""
    images = result.inputs
    if images is None or len(images) < 2 or view.labels is None or view.private or not view.method.uses_labels:
        return False
    if result.labels is not None or assign_labels(view, view.update, images) is not None:
        return False
    return not KnownTargets.of(view, images).complete


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
