"""The signal at the top of a chain: what flows back into its highest usable linear layer, image by image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attacks.analytic.recursive.bias_free_classifier import logit_gradients_without_bias
from attacks.analytic.recursive.relu_batch_separation import first_layer_with_signal, separate_images
from attacks.analytic.recursive.softmax_separation import (
    ClassifierGradient,
    is_underdetermined,
    label_candidates,
    separate_by_softmax,
)
from attacks.labels.recovery import recover_labels
from attacks.network.layer_chain import Stage
from attacks.result import NotApplicable
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from fl.defense import ask_surrogate, overrides
from fl.tensors import dense, scale_tensors
from fl.types import frozen
from fl.view import ServerView

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class StartSignal:
    """What flows back into the layer where a descent begins.

    Attributes:
        top: number of a linear layer's stage.
        signal: what flows back into that layer (N, out).
        relative_error: how far that may be off, relative to its root mean square.
        labels: of the images of a batch (N,), where they were found with the signals; as they are known, if they are.
    """

    top: int
    signal: Tensor
    relative_error: float = 0.0
    labels: Tensor | None = None


def start_signals(
    view: ServerView, stages: Sequence[Stage], observed: Gradients, unit: float, count: int
) -> list[StartSignal] | NotApplicable:
    """Return where to begin, or why nothing tells; several where the loss of one image has several solutions.

    Args:
        view: what the server saw.
        stages: of its network, bottom first.
        observed: the gradient, as large as it was sent.
        unit: by which the signals are divided.
        count: number of images.
    """
    if count < 1:
        return NotApplicable("no image was fed")
    return (
        _single_image_signals(view, stages, observed, unit)
        if count == 1
        else _batch_signals(view, stages, observed, unit, count)
    )


def _single_image_signals(
    view: ServerView, stages: Sequence[Stage], observed: Gradients, unit: float
) -> list[StartSignal] | NotApplicable:
    """Return the highest stage whose signal the update of one image gives away."""
    for top in reversed(range(len(stages))):
        bias = observed.get(f"{stages[top].name}.bias")
        if isinstance(stages[top].layer, nn.Linear) and bias is not None and bool(bias.any()):
            return [StartSignal(top, bias[None] / unit)]
    last = stages[-1]
    name = f"{last.name}.weight"
    if not view.task.loss.is_cross_entropy:
        return NotApplicable(
            f"no linear layer whose bias moved: without one only cross entropy tells what flows back, and the loss is "
            f"{view.task.loss.name}; a search can be tried: ig",
            limit=True,
        )
    bare = isinstance(last.layer, nn.Linear) and last.layer.bias is None and not len(last.after)
    if not bare or name not in observed or not isinstance(last.activation, nn.Identity):
        why = f" ({last.end_reason})" if last.end_reason else ""
        reason = "no linear layer whose bias moved, and no classifier without bias: nothing to begin with"
        return NotApplicable(f"{reason}{why}", limit=bool(why))
    if not _size_is_known(view, last.parameter_name("weight")):
        return NotApplicable(
            "the classifier has no bias, and the size of its gradient is unknown (clipping, a defense)"
        )
    weight = last.layer.get_parameter("weight").detach()
    undone = _gradient_before_defense(view, last, observed)
    ratio = observed[name].norm() / undone.norm()
    found = [
        StartSignal(len(stages) - 1, signal * ratio / unit) for signal in logit_gradients_without_bias(weight, undone)
    ]
    return found or NotApplicable("no logits explain the gradient of the classifier, which has no bias")


def _batch_signals(
    view: ServerView, stages: Sequence[Stage], observed: Gradients, unit: float, count: int
) -> list[StartSignal] | NotApplicable:
    """Return what flows back of each image of a batch, or why that can't be told.

    At the classifier, by the loss, where the server knows both (`attacks.analytic.recursive.softmax_separation`); else
    at the first linear layer, by the bend of the (leaky) ReLU below it
    (`attacks.analytic.recursive.relu_batch_separation`).
    """
    start = _separate_at_classifier(view, stages, observed, unit, count)
    if isinstance(start, str):
        other = _separate_at_relu(stages, observed, count)
        if isinstance(other, NotApplicable):
            return NotApplicable(f"{start}; {other.reason}", other.limit)
        start = other
    return [start]


def _separate_at_classifier(
    view: ServerView, stages: Sequence[Stage], observed: Gradients, unit: float, count: int
) -> StartSignal | str:
    """Return the classifier's signals of each image, as the loss explains them, or why they can't be told."""
    last = stages[-1]
    weight, bias = (f"{last.name}.{kind}" for kind in ("weight", "bias"))
    layer, own = last.layer, not len(last.after) and isinstance(last.activation, nn.Identity)
    if not isinstance(layer, nn.Linear) or not own or weight not in observed:
        return "no gradient of a linear classifier was sent"
    mine = [last.parameter_name(kind) for kind in ("weight", "bias") if kind == "weight" or layer.bias is not None]
    known = view.shared.keys() | frozen(view.client.task.model).keys()
    plain = view.method.uses_labels and view.method.uses_plain_cross_entropy(view.client.task, view.round)
    if not plain or not mine[0].startswith(view.task.head) or any(n not in known for n in mine):
        return "the classifier or its loss is unknown"
    if not _size_is_known(view, mine[0]):
        return "the size of the classifier's gradient is unknown (clipping, a defense)"
    if is_underdetermined(len(layer.weight), count, bias=bias in observed):
        return f"{len(layer.weight)} classes are too few to tell {count} images apart by the loss"
    undone = _gradient_before_defense(view, last, observed)
    ratio = observed[weight].norm() / undone.norm()
    told = separate_by_softmax(
        ClassifierGradient(
            weight=layer.weight.detach(),
            bias=layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach(),
            gradient=undone,
            bias_gradient=observed[bias] / ratio if bias in observed else None,
        ),
        label_candidates(len(layer.weight), count, _guess_labels(view, count))
        if view.labels is None
        else [view.labels.cpu()],
    )
    if told is None:
        given = "" if view.labels is None else " of the labels known"
        whole = ObservedUpdate(view).is_complete(*mine)
        gaps = "" if whole else f", of which the defense {view.client.defense.name} left out numbers"
        return f"the loss explains the classifier's gradient by no {count} images{given}{gaps}"
    found, labels = told
    return StartSignal(len(stages) - 1, found.signals * ratio / unit, found.relative_error, labels)


def _gradient_before_defense(view: ServerView, last: Stage, observed: Gradients) -> Tensor:
    """Return the gradient of a classifier's weight at the scale that it had before a known defense."""
    name = last.parameter_name("weight")
    return last.arrange("weight", ObservedUpdate(view).before_defense(name, observed[name]))


def _guess_labels(view: ServerView, count: int) -> Tensor | None:
    """Return the likeliest labels of all images, in ascending order."""
    guess = recover_labels(ObservedUpdate(replace(view, batch_size=count)))
    return None if guess is None or len(guess) != count else guess.cpu()


def _separate_at_relu(stages: Sequence[Stage], observed: Gradients, count: int) -> StartSignal | NotApplicable:
    """Return the signals of the first linear layer with a bias, told apart by the activation below."""
    gradients = {n: dense(g) for n, g in rescale_to_unit({**observed})[0].items()}
    top = first_layer_with_signal(stages, gradients)
    if top is None:
        return NotApplicable("no linear layer whose bias moved: nothing tells the images of the batch apart")
    above = stages[top]
    if not above.pointwise:
        return NotApplicable(f"pooling below {above.name} hides the bends by which images are told apart", limit=True)
    if not bool(gradients.get(f"{above.name}.weight", torch.zeros(1)).any()):
        return NotApplicable(f"no signal flows back into {above.name}: its weight did not move")
    found = separate_images(stages, gradients, top, count)
    return found if isinstance(found, NotApplicable) else StartSignal(top, found.signals, found.relative_error)


def _size_is_known(view: ServerView, name: str) -> bool:
    """Return whether the size of the gradient of `name` is known, not only its direction."""
    phases = view.method.phases(view.client.task, view.round)
    clipped = any(group.max_norm is not None for phase in phases for group in phase.groups)
    sizes = (scale_tensors(view.update, size) for size in (1.0, 2.0))
    once, twice = (ask_surrogate(view.defense, update, view.update)[name] for update in sizes)
    hidden = dense(twice).norm() < 1.5 * dense(once).norm()  # a longer update would have been shortened to the same
    changed = not view.threat.knows_defense or overrides(view.defense, "gradient")
    return not (view.scale_unknown or clipped or hidden or changed)
