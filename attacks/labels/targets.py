"""Targets of other losses than cross entropy, of a single example: by what flows back into the model's outputs.

The bias of a layer that returns the model's outputs has their gradient as its own. Of a yes or no its sign is the
label, number by number. Of a squared error it is the difference of output and target, so that with the input the target
is known, too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attacks.labels.assignment import assign_labels
from attacks.result import Reconstruction
from attacks.update.classifier_update import classifier_names, classifier_tensors
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Candidate
from fl.view import ServerView

MAX_SINE, MAX_SINE_SPACINGS = 3e-3, 16.0
"""Between the gradient of the outputs and the bias's update, up to which one is taken for the other: at least, and in
spacings after 1 of the type. A bias below a sigmoid that is hardly bent gets nearly the same gradient."""
AS_STATED = "the target follows from loss {} and the step size as stated, and nothing in the update tells these"
"""What a result notes of a target that is a number."""
FAR_TARGET = 1e6
"""Distance at which a target is put if only its direction is known, in units of the outputs."""
MOST_NUMBERS = 2**24
"""Size of the matrix of steps (outputs times numbers of the update) up to which the outputs' gradient is computed."""


def output_signal(view: ServerView) -> Tensor | None:
    """Return the gradient of a single example's outputs, up to a positive factor; None where the update hides it.

    Whether the last layer's bias has it is asked of what the model would send of an input of its own.

    Args:
        view: what the server saw.
    """
    hidden = view.private or view.parts or not view.method.uses_labels or deviation_from_loss_gradient(view) is not None
    if view.batch_size != 1 or hidden or view.schedule is None:
        return None
    bias = classifier_tensors(view, ObservedUpdate(view).change)[1]
    if bias is None or bias.shape != view.task.output_shape or not bool(bias.any()):
        return None
    loss, draw = view.task.loss, stream(0, "targets")
    probe = torch.rand(1, *view.task.input_shape, generator=draw, dtype=torch.float64)
    shape = loss.variable_shape(view.task.output_shape)
    if shape is None:
        return None
    target = loss.relax(torch.randn(1, *shape, generator=draw, dtype=torch.float64))
    probe, target = (value.to(view.device, view.dtype) for value in (probe, target))
    with torch.enable_grad():
        outputs = outputs_of(view, probe).requires_grad_()
        (expected,) = torch.autograd.grad(loss(outputs, target), outputs)
    with torch.no_grad():
        sent = classifier_tensors(view, predict(view, Candidate(probe, target)))[1]
    if sent is None:
        return None
    return bias if is_one_direction(sent, expected) else None


def is_one_direction(sent: Tensor, expected: Tensor) -> bool:
    """Return whether a bias's update has the direction of the gradient of the outputs, to rounding."""
    one, other = (nn.functional.normalize(value.double().flatten(), dim=0) for value in (sent, expected))
    allowed = max(MAX_SINE, MAX_SINE_SPACINGS * torch.finfo(sent.dtype).eps)
    return float((one - other).norm()) <= allowed


def fitted_signal(view: ServerView, inputs: Tensor) -> Tensor | None:
    """Return the gradient of a single example's outputs by which a step on an input comes nearest to the update.

    It is known up to a positive factor. What a step makes of it is the sum of what it makes of each of its numbers. So
    it is told without a bias of the last layer, if the input is right.

    Args:
        view: what the server saw, of one step on one example under a loss that is linear in its targets.
        inputs: the example (1, ...).

    Returns:
        Of the shape of one example's outputs; None where these are many.
    """
    outputs = outputs_of(view, inputs.to(view.device, view.dtype))
    observed = ObservedUpdate(view)
    seen = torch.cat([dense(value).flatten() for value in observed.in_double(view.update).values()])
    if outputs.numel() * len(seen) > MOST_NUMBERS:
        return None
    size = FAR_TARGET * (1 + float(outputs.abs().max()))
    made = []
    for each in torch.eye(outputs.numel()).to(outputs):
        with torch.no_grad():
            sent = observed.in_double(predict(view, Candidate(inputs, outputs - size * each.view_as(outputs))))
        made.append(torch.cat([dense(sent[name]).flatten() for name in view.update]))
    found = torch.linalg.lstsq(torch.stack(made, 1), seen[:, None]).solution
    return found.view_as(outputs)[0] if bool(found.isfinite().all() and found.any()) else None


def read_targets(view: ServerView) -> Tensor | None:
    """Return the target (1, ...) of a single example that the update tells without the input, or None."""
    signal = output_signal(view)
    return None if signal is None else view.task.loss.target_of_signal(signal)


def with_target(view: ServerView, result: Reconstruction) -> Reconstruction:
    """Return a result with the target of its one input, where the loss's target follows from both.

    So does the class that a function of the user's own takes, by the direction of what flows back. Of numbers, a search
    by direction alone leaves the size of such a target open; then it has none. So it has where the step size
    is not known.

    Args:
        view: the view that was attacked.
        result: of the attack on the view.
    """
    loss, found = view.task.loss, result.inputs
    if loss.is_cross_entropy or view.labels is not None or not view.method.uses_labels:
        return result
    if view.batch_size != 1 or found is None or len(found) != 1:
        return result
    if loss.takes_classes:
        label = _label_of(view, found) if result.labels is None else result.labels
        return replace(result, labels=label)
    if loss.has_exact_targets:
        return result
    signal, name = output_signal(view), classifier_names(view, view.update)[1]
    observed, target = ObservedUpdate(view), None
    if signal is not None and name is not None and view.threat.knows_optimizer and observed.steps(name) == 1:
        scale = observed.scale(name)
        if scale:
            outputs = outputs_of(view, found.to(view.device, view.dtype))
            target = loss.target_of_outputs(outputs, signal[None] / scale)
    told = replace(result, labels=target)
    return told if target is None else told.with_note(AS_STATED.format(loss.name))


def _label_of(view: ServerView, image: Tensor) -> Tensor | None:
    """Return the label (1,) of the one image (1, C, H, W) that one step was taken on; None where nothing tells."""
    observed = ObservedUpdate(view)
    weight = classifier_names(view, observed.change)[0]
    stepped = weight is not None and observed.steps(weight) == 1 and deviation_from_loss_gradient(view) is None
    return assign_labels(view, observed.change, image) if stepped else None


def outputs_of(view: ServerView, inputs: Tensor) -> Tensor:
    """Return what the network as it was sent makes of inputs (N, C, H, W), without a gradient."""
    weights = {name: dense(value) for name, value in view.shared.items()}
    network = view.client.network(weights, {**view.client.task.buffers, **view.buffers})  # type: ignore[arg-type]
    with torch.no_grad():
        return network(inputs).detach()
