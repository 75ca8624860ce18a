"""Tests whether torch can differentiate a network's gradient and evaluate it in batches, as attacks need."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.func import vmap

from fl.network import call_with
from fl.runtime.user_code import RUN_ERRORS
from fl.seeds import stream
from fl.view import ServerView

AUTOGRAD_ERRORS = (RuntimeError, NotImplementedError, IndexError)
"""What torch raises of operations that it can't differentiate or evaluate in batches, or not at all guesses."""
ATTACKS = Path(__file__).resolve().parents[1]
"""Where the attacks' own code lies."""
BESIDE = 0.1
"""Standard deviation of what is added to weights, where a network may be flat for these alone."""


def pull_back_or_zeros(outputs: Sequence[Tensor], at: Tensor, signals: Sequence[Tensor]) -> Tensor:
    """Return what flows back into `at` from several outputs: zeros where no gradient leads there.

    None leads through comparisons, whole numbers, new tensors (`zeros_like`) or what a network detaches.

    Args:
        outputs: made of `at`, or not.
        at: a tensor that requires a gradient.
        signals: at the outputs.
    """
    ways = [(out, signal) for out, signal in zip(outputs, signals, strict=True) if out.requires_grad]
    if not ways:
        return torch.zeros_like(at)
    reached, flows = zip(*ways, strict=True)
    (found,) = torch.autograd.grad(reached, at, flows, retain_graph=True, allow_unused=True, materialize_grads=True)
    return found


def autograd_obstacle(view: ServerView, error: Exception) -> str | None:
    """Say what torch can't do with the view's network that attacks need, or return None where that is not the error.

    Args:
        view: whose network is tried, on noise and as its client trains it.
        error: with which the attack ended. One that the attack's own code raised, or a lack of memory, is no fault of
            the network, whatever else torch can't do with it.
    """
    if isinstance(error, torch.OutOfMemoryError) or _arose_in_attacks(error):
        return None
    return flat_obstacle(view) or _double_backward_obstacle(view) or _loss_obstacle(view) or _vmap_obstacle(view)


def _arose_in_attacks(error: Exception) -> bool:
    """Return whether the code that raised an error is an attack's, and not torch's or the network's."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and ATTACKS in Path(frames[-1].filename).resolve().parents


def flat_obstacle(view: ServerView) -> str | None:
    """Return why steps towards a picture lead nowhere: what the network returns does not change with small ones.

    A network may be flat for its weights alone, as with a head at zero. So it is asked with others beside them, too.
    """
    count = max((size for steps in view.schedule or () for step in steps for size in step), default=1)
    draw = stream(0, "flat")
    images = torch.rand(max(count, 1), *view.task.input_shape, generator=draw)
    images = images.to(device=view.device, dtype=view.dtype).requires_grad_()
    model = copy.deepcopy(view.task.model).to(device=view.device, dtype=view.dtype).train(view.method.train_mode)
    for spread in (0.0, BESIDE):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for parameter in model.parameters():
                parameter.data += (spread * torch.randn(parameter.shape, generator=draw)).to(parameter)
            try:
                returned: Tensor = model(images)
                weights = torch.randn(returned.shape, generator=draw).to(returned)
                (slope,) = torch.autograd.grad((weights * returned).sum(), [images], allow_unused=True)
            except (*AUTOGRAD_ERRORS, *RUN_ERRORS):  # why it does not run is said where it has to
                return None
        if slope is not None and bool(slope.any()):
            return None
    return (
        "steps towards the picture go by how what the network returns changes with it, and no gradient gets there: "
        "rounding, thresholds or whole numbers (indices, say) lie between"
    )


def _vmap_obstacle(view: ServerView) -> str | None:
    """Return why the network can't be evaluated for many guesses at once."""
    model = copy.deepcopy(view.task.model).to(device=view.device, dtype=view.dtype).train(view.method.train_mode)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    images = torch.rand(2, 2, *view.task.input_shape, generator=stream(0, "stacked")).to(view.device, view.dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            call_with(model, state, images[0])
        except RUN_ERRORS as error:
            said = " ".join(str(error).split())
            return (
                f"it computes with all of a network's numbers in one type ({view.dtype}), in which this one does not "
                f"run: {said}; have forward take the type of its weights (x.to(self.layer.weight.dtype))"
            )
        try:
            vmap(lambda batch: call_with(model, state, batch))(images)
        except AUTOGRAD_ERRORS as error:
            said = " ".join(str(error).split())
            return f"it evaluates the network for many guesses at once, and torch.func.vmap can't: {said}"
    return None


def _double_backward_obstacle(view: ServerView) -> str | None:
    """Return why the network's gradient can't be differentiated by the images.

    Some of torch's layers have no second derivative (Hardsigmoid), nor have functions whose gradient was written by
    hand for one alone.
    """
    model = copy.deepcopy(view.task.model).to(device=view.device, dtype=view.dtype).train(view.method.train_mode)
    weights = [value for value in model.parameters() if value.requires_grad]
    count = max((size for steps in view.schedule or () for step in steps for size in step), default=1)
    draw = stream(0, "twice")
    images = torch.rand(max(count, 1), *view.task.input_shape, generator=draw)
    images = images.to(device=view.device, dtype=view.dtype).requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            logits: Tensor = model(images)
            grads = torch.autograd.grad(logits.square().sum(), weights, create_graph=True, allow_unused=True)
        except AUTOGRAD_ERRORS:
            return None  # the first derivative is what a client takes itself: it is no fault of the search
        try:
            size = sum(grad.square().sum() for grad in grads if grad is not None)
            torch.autograd.grad(size, [images], allow_unused=True)  # type: ignore[arg-type]
        except AUTOGRAD_ERRORS as error:
            said = " ".join(str(error).split())
            return f"a search differentiates the network's gradient, and torch can't: {said}"
    return None


def _loss_obstacle(view: ServerView) -> str | None:
    """Return why the gradient of the loss can't be differentiated by the outputs.

    Some of torch's functions have no second derivative (ctc_loss).
    """
    loss, draw, count = view.task.loss, stream(0, "loss"), max(view.batch_size or 1, 1)
    shape = loss.variable_shape(view.task.output_shape)
    if view.labels is not None:
        targets = view.labels.to(view.device)
    elif shape is not None:
        targets = loss.relax(torch.randn(count, *shape, generator=draw)).to(view.device, view.dtype)
    else:
        return None
    outputs = torch.randn(len(targets), *view.task.output_shape, generator=draw).to(view.device, view.dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        outputs.requires_grad_()
        try:
            (gradient,) = torch.autograd.grad(loss(outputs, targets), [outputs], create_graph=True)
        except (*AUTOGRAD_ERRORS, *RUN_ERRORS):  # what it does not take is said where it has to
            return None
        try:
            torch.autograd.grad(gradient.square().sum(), [outputs], allow_unused=True)
        except AUTOGRAD_ERRORS as error:
            said = " ".join(str(error).split())
            if "does not require grad" in said:
                return None  # of a loss that is linear in the outputs
            return f"a search differentiates the gradient of the loss, and torch can't: {said}"
    return None
