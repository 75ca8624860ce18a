"""Batches that hold one picture several times: what they leave is what that picture leaves by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attacks.analytic.single_image_rows import largest_noise
from attacks.labels.assignment import count_targets
from attacks.labels.recovery import single_label
from attacks.result import NotApplicable, Reconstruction, Result
from attacks.update.first_linear_layer import LinearLayer, first_linear
from attacks.update.float_rounding import coarse_form
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import training_phases
from fl.losses.function import OwnLoss
from fl.view import ServerView


def attack_repeated_image(
    view: ServerView, attack: Callable[[ServerView, int], Result], seed: int
) -> Reconstruction | None:
    """Return what an attack on one picture finds of a batch that may be that picture alone, as often as it was fed.

    It may as well be the picture beside others that the network is certain of, or a mixture where all that flows back
    has one direction: that is for the whole update to tell, which the result is held to.

    Args:
        view: of one step on several images.
        attack: on a view of one.
        seed: of the attack.
    """
    if not may_be_copies(view):
        return None
    one = replace(view, batch_size=1, schedule=(((1,),),), labels=None, order=None, history=())
    found = attack(one, seed)
    if isinstance(found, NotApplicable) or found.inputs is None:
        return None
    images, note = found.inputs[:1], single_label(one)[1]
    found = replace(found, note="; ".join(said for said in found.note.split("; ") if said and said != note))
    repeated = repeat_images(view, images)
    if repeated is None:  # that they are so many would be said of nothing
        return replace(found, inputs=images, labels=None, private={}, verified=None, fixed=None, approximate=False)
    return replace(found, inputs=repeated[0], labels=repeated[1], private={}, fixed=None, approximate=False)


def may_be_copies(view: ServerView) -> bool:
    """Return whether one step on several images left in the first linear layer what a single one leaves."""
    if coarse_form(view):  # of unlike images the mean would do as well
        return False
    count, fed = view.batch_size, [step for steps in training_phases(view)[1] or () for step in steps if any(step)]
    if not count or count < 2 or view.parts or len(fed) != 1 or isinstance(view.task.loss, OwnLoss):
        return False
    layer = first_linear(view)
    if isinstance(layer, NotApplicable) or layer.steps != 1 or layer.masked:
        return False
    return _has_rank_one(layer)


def _has_rank_one(layer: LinearLayer) -> bool:
    """Return whether a layer's gradient is one image's as far as rounding tells, and need not be so of others."""
    if not ObservedUpdate(layer.view).is_complete(*layer.parameter_names):
        return False
    whole = torch.cat([layer.update, layer.bias_update[:, None]], 1)
    task = layer.view.task
    if not layer.is_given_images and task.loss.sends_back_one_direction(task.output_shape):
        return False
    singular = torch.linalg.svdvals(whole)
    if len(singular) < 2 or not bool(singular[0] > 0):
        return False
    return float(singular[1]) <= max(1e-12 * float(singular[0]), largest_noise(layer))


def repeat_images(view: ServerView, images: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return distinct images as often as the batch has them (N, C, H, W), with their labels (N, ...); None if untold.

    Args:
        view: of one step.
        images: (U, C, H, W).
    """
    if view.labels is not None and len(images) == 1 and len(view.labels) == view.batch_size:
        return images.expand(len(view.labels), *images.shape[1:]).clone(), view.labels
    found = count_targets(view, ObservedUpdate(view).change, images, view.batch_size or 0)
    return None if found is None else (images[found[0]], found[1])
