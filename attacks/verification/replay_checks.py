"""Whether an update is one step on what an attack found: in direction, in size, in the statistics that came back."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from attacks.labels.assignment import fits_no_label
from attacks.labels.output_gradient import view_of_several_under_any_loss
from attacks.labels.recovery import single_label
from attacks.result import NotApplicable, Reconstruction
from attacks.update.first_linear_layer import first_linear
from attacks.update.label_gradients import MAX_TRIED_LABELS
from attacks.update.observed_update import ObservedUpdate
from attacks.update.returned_buffers import predict_buffers
from attacks.update.update_rule import guess_update_rule, is_sign_compressed
from attacks.update.view_below_classifier import LayerSignal, view_below_classifier
from attacks.verification.clipped_comparison import is_explained_clipped
from attacks.verification.comparison import MAX_BORNE_OUT_LABELS, Question, can_replay, comparison, most_favorable
from attacks.verification.error_bounds import BLUR_DRAWS, COMPUTED_SPACINGS, ERROR_FACTOR, MAX_PIXEL_ERROR
from attacks.verification.update_comparison import UpdateComparison
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.view import ServerView


def reproduces_update(view: ServerView, result: Reconstruction) -> bool | None:
    """Return whether the update is one step on the result's images, and on no darker or brighter ones.

    It is None if nothing tells. Of classes whose number is beyond `MAX_TRIED_LABELS` only the first are tried where the
    labels are unknown: it is False for images of the others, too.

    Where the classifier is private, the layers below the last one that is shared are asked. Where the result holds no
    images but what a linear layer is given, the layers from that one up are.
    """
    if view.private:
        return _reproduces_lower_layers(view, result)
    asked = comparison(view, result)
    return None if asked is None else most_favorable(asked.check.is_explained(*guess) for guess in asked.guesses)


def _reproduces_lower_layers(view: ServerView, result: Reconstruction) -> bool | None:
    """Return what the layers below a private classifier say of images."""
    asked = None if result.inputs is None else compare_lower_layers(view, result.inputs, whole=result.verified is True)
    return None if asked is None else asked.check.is_explained(*next(iter(asked.guesses)))


def compare_lower_layers(view: ServerView, images: Tensor, *, whole: bool = True) -> Question | None:
    """Return what the update of the layers below a private classifier is compared with; None where nobody can.

    Args:
        view: the view that was attacked.
        images: (N, C, H, W).
        whole: whether all pixels count as right, rather than those fixed alone.
    """
    if len(images) != view.batch_size or not can_replay(view):
        return None
    below = view_below_classifier(view)
    if not isinstance(below, ServerView) or below.private or not isinstance(below.method, LayerSignal):
        return None
    errors = ObservedUpdate(view).relative_rounding
    signal = errors.get(below.method.bias or f"{below.method.layer}.bias", 0.0)  # it flows back into every tensor below
    errors = {name: errors.get(name, 0.0) + signal for name in below.update}
    return Question(UpdateComparison(below, errors, whole), [(images, torch.zeros(1, dtype=torch.int64))])


def contradicts_features(view: ServerView, result: Reconstruction, layer: str) -> bool:
    """Return whether the rest of the update speaks against what is said to be the input of a linear layer.

    Rules that treat single numbers or tensors alike leave a layer's update an outer product, of which a wrong input
    follows. The layers above send back another update for it. Of another layer than the first one with a bias it is
    asked whether the update looks like that of such a rule.

    Args:
        view: the view that was attacked.
        result: holds the input under `features/layer`.
        layer: its name.
    """
    first = first_linear(view)
    if isinstance(first, NotApplicable) or first.name != layer:
        return bool(guess_update_rule(view))
    alone = {"features": result.private[f"features/{layer}"]}
    return reproduces_update(view, replace(result, inputs=None, private=alone, verified=None, fixed=None)) is False


def reproduces_clipped_update(view: ServerView, features: Tensor, bound: float) -> bool:
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
    asked = comparison(view, result)
    guesses = () if asked is None else itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS)
    return asked is not None and any(is_explained_clipped(asked.check, *guess, bound) for guess in guesses)


def reproduces_size(view: ServerView, result: Reconstruction) -> bool | None:
    """Return whether the update is as large as the stated step makes it of the result's images.

    It is None if that is not known.

    It is asked where no direction tells how bright images are (one layer and two classes, say). Where nobody knows the
    step size no size is the stated one.
    """
    asked = None if view.private else comparison(view, result)
    if asked is None:
        return None
    if view.scale_unknown:
        return False
    guesses, images, target = asked.guesses, result.inputs, result.labels
    if view.task.loss.is_linear_in_targets and view.labels is None:  # what tells a direction alone has no size
        guesses = [] if images is None or target is None else [(images, target)]
    exact = is_sign_compressed(view)  # signs have the size of some picture's step, and nothing else tells them apart
    sized = asked.check.has_stated_size_to_rounding if exact else asked.check.has_stated_size
    return most_favorable(sized(*guess) for guess in guesses)


def reproduces_returned_buffers(view: ServerView, result: Reconstruction) -> bool | None:
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


def tells_brightness(view: ServerView, result: Reconstruction) -> bool:
    """Return whether a picture makes the update to its rounding, and none brighter or darker by a quarter of a level.

    `reproduces_update` allows what a picture a quarter of a level off leaves, beside which a change of brightness may
    not show.
    """
    asked = None if view.private or view.batch_size != 1 else comparison(view, result)
    if asked is None or result.inputs is None:
        return False
    return any(asked.check.tells_brightness_to_a_level(*guess) for guess in asked.guesses)


def reproduces_update_under_any_loss(view: ServerView, images: Tensor) -> bool:
    """Return whether a batch makes the update with what flows back into its outputs taken from the update.

    Args:
        view: what the server saw.
        images: (N, C, H, W), at least two.
    """
    easier = view_of_several_under_any_loss(view, images) if can_replay(view) else None
    if easier is None:
        return False
    check = UpdateComparison(easier, ObservedUpdate(easier).relative_rounding, True)
    return check.is_explained(images, torch.zeros(len(images), dtype=torch.int64)) is not False


def fits_under_another_loss(view: ServerView, result: Reconstruction) -> bool:
    """Return whether a batch makes the update with what flows back into its outputs taken from the update.

    That confirms nothing: mixtures of the pictures may do so as well.
    """
    return result.inputs is not None and reproduces_update_under_any_loss(view, result.inputs)


def fits_no_class(view: ServerView, result: Reconstruction) -> bool:
    """Return whether of a picture of a batch no class says what flows back, though all were asked."""
    return result.inputs is not None and fits_no_label(view, ObservedUpdate(view).change, result.inputs)


def leaves_targets_unasked(view: ServerView, result: Reconstruction) -> bool:
    """Return whether targets matter, and there are none to ask the update with."""
    task = view.task
    if not view.method.uses_labels or view.private:
        return False
    asked = comparison(view, result)
    if asked is not None and next(iter(asked.guesses), None) is None:
        return True
    if view.labels is not None:
        return False
    if (result.inputs is not None and len(result.inputs) > 1) or task.loss.is_linear_in_targets:
        return False
    unread = result.labels is None and task.loss.every_target(task.output_shape, MAX_TRIED_LABELS) is None
    return unread or not task.loss.has_exact_targets
