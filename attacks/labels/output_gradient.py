"""One step on one example under whatever loss: what flows back into a model's outputs stands in the last layer's bias.

So a picture can be held against an update also where the loss or its targets are not as stated (label smoothing, soft
targets, a temperature, a loss of the client's own): all tensors but that bias have to follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.labels.assignment import read_classifier
from attacks.labels.targets import is_one_direction, outputs_of
from attacks.update.classifier_update import classifier_names, classifier_tensors
from attacks.update.label_gradients import MAX_TRIED_LABELS
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import (
    adaptive_optimizer_obstacle,
    deviation_from_loss_gradient,
    training_phases,
)
from fl.defense import Defense, UnknownDefense
from fl.losses.cross_entropy import CrossEntropy
from fl.method import Method, Step
from fl.network import Network
from fl.parametrization import Parametrization
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch, Candidate, Group, Phase, Scope, Task
from fl.view import ServerView

OUTPUTS = "outputs"
"""The payload of a rewritten view that holds `gradient`: read off the update, not sent by the server."""
MIN_OTHER_CLASSES = 4
"""Classes beside the label that tell a smoothing: two of them fix it and the step size."""
MAX_SHARE = 0.5
"""The largest smoothing that is told from another step size."""
MAX_MISFIT = 0.02
"""Deviation of the other classes' targets, which smoothing makes equal, relative to them."""

MAX_DOUBT = 0.05
"""Share of softmax that the other classes may have of what a network is certain of."""
MAX_ROUNDED, ROUNDED_SPACINGS = 3e-5, 4.0
"""By how much the other classes' gradients are off softmax, relative to it, and the own class's in spacings after 1."""


@dataclass(frozen=True, kw_only=True)
class OutputGradient(Method):
    """One step along the gradient that a given gradient of the outputs makes, whatever loss that is of."""

    name = "output-gradient"
    uses_labels = False

    def scope(self, name: str, task: Task) -> Scope:
        """Return SHARED for every parameter."""
        return Scope.SHARED

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one step of size 1."""
        return (Phase(groups=(Group(lr=1.0),), steps=1),)

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the outputs (N, ...) weighted by their gradient."""
        return (network(batch.inputs) * dense(step.received[OUTPUTS]["gradient"])).sum()


def view_of_any_loss(view: ServerView) -> ServerView | None:
    """Return the view of the same step under whatever loss made it; None where the update hides what flowed back.

    Its method is `OutputGradient`, and weight decay is taken off its update. Whether the last layer's bias has the
    outputs' gradient is asked of what the model would send of an input of its own.

    Args:
        view: what the server saw.
    """
    easier = _without_loss(view) if view.batch_size == 1 else None
    bias = None if easier is None else classifier_tensors(view, easier.update)[1]
    if easier is None or bias is None or bias.shape != view.task.output_shape or not bool(bias.any()):
        return None
    return _with_gradient(easier, bias) if _shows_gradient(easier) else None


def view_of_several_under_any_loss(view: ServerView, images: Tensor) -> ServerView | None:
    """Return the view of the same step on several images under whatever loss made it; None where that is not told.

    The weight of a linear classifier says of each image what flowed back into its outputs, if the images are right. It
    would say so of mixtures, too: what they make of the other tensors may speak for them, but proves none.

    Args:
        view: what the server saw.
        images: in [0, 1] (N, C, H, W).
    """
    easier = _without_loss(view) if view.batch_size == len(images) > 1 else None
    read = None if easier is None else read_classifier(view, easier.update, images)
    if easier is None or read is None or read[0].shape[1:] != view.task.output_shape:
        return None
    return _with_gradient(easier, read[0].to(view.device, view.dtype))


def _without_loss(view: ServerView) -> ServerView | None:
    """Return the view of a method that takes the gradient of the outputs as given; None where no single step is."""
    phases, schedule = training_phases(view)
    steps = [step for phase in schedule or () for step in phase]
    hidden = view.private or view.parts or type(view.client.defense) not in {Defense, UnknownDefense}
    count = view.batch_size
    if hidden or not count or [*map(sum, steps)] != [count] or len(steps[0]) != 1:
        return None
    if type(view.method.parametrization) is not Parametrization or not view.method.uses_labels:
        return None
    if deviation_from_loss_gradient(view) is not None or adaptive_optimizer_obstacle(phases) is not None:
        return None
    return replace(
        view,
        method=OutputGradient(train_mode=view.method.train_mode),
        task=replace(view.task, loss=CrossEntropy()),
        update=ObservedUpdate(view).change,
        schedule=(((count,),),),
        labels=None,
        order=None,
        draws=None,
        history=(),
    )


def _with_gradient(view: ServerView, gradient: Tensor) -> ServerView:
    return replace(view, received={**view.received, OUTPUTS: {"gradient": gradient}})


def _shows_gradient(view: ServerView) -> bool:
    """Return whether the last layer's bias moves by the gradient of the outputs."""
    draw = stream(0, "output gradient")
    expected = torch.randn(view.task.output_shape, generator=draw, dtype=torch.float64).to(view.device, view.dtype)
    probe = torch.rand(1, *view.task.input_shape, generator=draw, dtype=torch.float64).to(view.device, view.dtype)
    guess = Candidate(probe, torch.zeros(1, dtype=torch.int64, device=view.device))
    with torch.no_grad():
        sent = classifier_tensors(view, predict(_with_gradient(view, expected), guess))[1]
    return sent is not None and is_one_direction(sent, expected)


@dataclass(frozen=True)
class Smoothing:
    """Cross entropy with label smoothing, as an example and the gradient of its outputs tell it.

    Attributes:
        label: of the example.
        share: of the target that all classes have in equal parts, in (0, 0.5].
        classes: how many there are.
    """

    label: int
    share: float
    classes: int

    def targets(self) -> Tensor:
        """Return the target (1, K), in double precision."""
        even = torch.full((1, self.classes), self.share / self.classes, dtype=torch.float64)
        even[0, self.label] += 1 - self.share
        return even


def read_smoothing(view: ServerView, images: Tensor) -> Smoothing | None:
    """Return the label smoothing of cross entropy under which an image makes the outputs' gradient.

    That gradient is softmax - target (Szegedy et al., CVPR 2016, Section 7), and all other classes have one target, a
    share of the smoothing.

    Args:
        view: what the server saw, of one step on one image.
        images: the image (1, C, H, W).

    Returns:
        The smoothing; None where targets are others, classes too few to tell, or several labels fit.
    """
    told = _gradient_and_softmax(view, images)
    if told is None:
        return None
    gradient, shares = told
    likely = gradient.argsort()[:MAX_TRIED_LABELS].tolist()  # an overconfident network's own label comes last
    labels = dict.fromkeys([*likely, int(gradient.argmax())])
    found = [one for label in labels if (one := _smoothing_of_label(gradient, shares, label)) is not None]
    return found[0] if len(found) == 1 else None


def read_rounded_label(view: ServerView, images: Tensor) -> int | None:
    """Return the class of cross entropy whose own gradient, softmax - 1, is a multiple of the outputs' type's spacing.

    Of an image that a network is certain of it is rounded to few digits or to zero, and all other classes are told.

    Args:
        view: what the server saw, of one step on one image.
        images: the image (1, C, H, W).

    Returns:
        The class; None where the other classes' gradients are not their softmax, or are too few to tell.
    """
    told = _gradient_and_softmax(view, images)
    if told is None:
        return None
    gradient, shares = told
    label = int(gradient.argmin())
    others = torch.arange(len(gradient), device=gradient.device) != label
    made, seen = shares[others], gradient[others]
    size = float(made @ seen) / float(made @ made) if bool(made.any()) else 0.0
    if not size > 0 or bool(((seen - size * made).abs() > MAX_ROUNDED * size * made).any()):
        return None
    left = float(made.sum())
    own = abs(float(gradient[label]) / size + left)
    return label if left <= MAX_DOUBT and own <= ROUNDED_SPACINGS * torch.finfo(view.dtype).eps else None


def _gradient_and_softmax(view: ServerView, images: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return cross entropy's gradient of the outputs (K,), up to a factor, and their softmax (K,) at an image.

    None under another loss, without a bias that tells the gradient, or of classes too few to tell a label.
    """
    name = classifier_names(view, view.update)[1]
    if not view.task.loss.is_cross_entropy or name is None:
        return None
    gradient = dense(ObservedUpdate(view).change[name]).double()
    shares = outputs_of(view, images.to(view.device, view.dtype))[0].double().softmax(0)
    return None if len(gradient) - 1 < MIN_OTHER_CLASSES or gradient.shape != shares.shape else (gradient, shares)


def _smoothing_of_label(gradient: Tensor, shares: Tensor, label: int) -> Smoothing | None:
    """Return the smoothing under which a label makes the outputs' gradient (K,), up to a factor, of softmax (K,)."""
    classes = len(gradient)
    own = torch.zeros_like(gradient)
    own[label] = 1.0
    # softmax = factor * gradient + target, which is the same number for all classes but the label
    columns = torch.stack([gradient, 1 - classes * own], 1)
    factor, target = torch.linalg.lstsq(columns, (shares - own)[:, None]).solution.flatten().tolist()
    off = float((columns @ columns.new_tensor([factor, target]) + own - shares).abs().max())
    if not (factor > 0 and 0 < classes * target <= MAX_SHARE and off <= MAX_MISFIT * target):
        return None
    return Smoothing(label, classes * target, classes)
