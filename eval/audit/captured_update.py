"""An update that a user captured as the view of a server, joined with the true images behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from attacks.update.decay_reading import with_decay_read_off
from eval.audit import true_images, update_sanity
from eval.audit.captured_files import CapturedUpdate
from eval.audit.coarse_numbers import coarse_in_part, rounding_bounds
from eval.audit.examples import Examples
from eval.audit.input_shape import check_images_fit, with_command_hints
from eval.audit.other_loss import describe_other_loss
from eval.audit.tensor_mismatches import describe_mismatches
from eval.audit.tensor_names import freeze_unsent
from eval.audit.update_scale import describe_scale
from eval.audit.user_model import Subject
from eval.metrics.update_prediction_error import MISMATCH, prediction_error, prediction_shift
from fl.aggregated_view import as_mean_of_clients
from fl.capture import CapturedUpdateSettings, ClientSettings, from_update, task_of_update
from fl.client import Client
from fl.inputs.description import check_values
from fl.inputs.form import Inputs, tensors_of
from fl.parametrization import Parametrization
from fl.runtime.module_copies import copy_model
from fl.simulation.capture_checks import floating_weight
from fl.simulation.dropout_masks import drawing_modules, draws_in_training, with_masks_of
from fl.tensors import dense
from fl.types import Batch, Scope
from fl.view import ServerView

START_MARGIN = 2.0
"""How many times what one draw of finer weights before moves an update by, it may be off for that."""
UNKNOWN_ORDER_TOLERANCE = 0.5
"""The tolerance where the order of the images in local training is not known."""


def of_update(
    model: nn.Module,
    captured: CapturedUpdate,
    client: ClientSettings | CapturedUpdateSettings,
    *,
    input_shape: Sequence[int] | Inputs,
    batch_size: int,
    given: Examples | Batch | None,
    source: str = "",
) -> Subject:
    """Return the one captured update, with the images it was made of if they are known.

    Args:
        model: as it was before the update.
        captured: the update in the model's own names (`eval.audit.tensor_names.with_model_names`).
        client: how the client trained, as far as known; `CapturedUpdateSettings` with `labels` alone, which the
            attacker knows.
        input_shape: (C, H, W) of the images, or of other inputs what `fl.capture.from_update` takes.
        batch_size: how many images the update was made of; of a mean, those of each client.
        given: images and labels; the first ones made the update; None where nobody knows them. The attacker
            knows these labels where the client's `threat` says so.
        source: what says the images' shape, for errors about it; that is the option where nothing else does.

    Raises:
        ValueError: model, update and images do not fit each other; says which tensor.
    """
    _check_sides(model, input_shape, source)
    knows_labels = client.threat is not None and client.threat.knows_labels
    stated = client.labels if isinstance(client, CapturedUpdateSettings) else None
    if client.threat is not None:  # a part of several clients' labels belongs to each
        client = replace(client, threat=replace(client.threat, knows_labels=False))
    count = batch_size * captured.clients
    with with_command_hints(model, client.method):
        task = task_of_update(model, input_shape, _known(client, batch_size=count), update=captured.update)
        made = client.client(task)
    model, masks = with_masks_of(task.model, model)
    model, unsent = freeze_unsent(model, captured.update, _shared_names(made, model))
    view_of = partial(_view_of, model, captured, client, input_shape)
    view, decay = with_decay_read_off(_as_sent(view_of(count), captured))
    true = None if given is None else _true_batch(Examples.of(given), view, count, captured.clients)
    if knows_labels:
        stated = _known_labels(stated if true is None else true.labels[:count])
    view = view if stated is None else _with_labels(view, stated)
    doubts = (
        _train_mode_contradiction(view, captured.buffers),
        update_sanity.find_mistaken_weights(view),
        update_sanity.find_inconsistency(view),
    )
    notes = (*captured.notes, *filter(None, (masks, unsent, decay)))
    subject = Subject(view, None, inconsistency="; ".join(filter(None, doubts)), captured=True, notes=notes)
    if true is None:
        return subject
    scaled = client.method is None or captured.scale_unknown  # without a method the step size is a guess
    told = _with_truth(subject, true, view_of, scaled=scaled, rounding=_rounding(captured, view))
    return _allow_finer_start(told, rounding_bounds(captured.before, captured.before))


def _check_sides(model: nn.Module, input_shape: Sequence[int] | Inputs, source: str) -> None:
    """Refuse a shape of pictures that the model does not take; of other inputs nothing is said here.

    Args:
        model: of the user.
        input_shape: as `of_update` takes it.
        source: what says the shape; that is the option where nothing else does.

    Raises:
        ValueError: the model does not take such pictures.
    """
    sides = [side for side in input_shape if isinstance(side, int)] if isinstance(input_shape, Sequence) else []
    if len(sides) == len(input_shape) == 3:
        what = "inputs" if source else "--input-shape of images"
        check_images_fit(model, (sides[0], sides[1], sides[2]), what, source)


def _view_of(
    model: nn.Module,
    captured: CapturedUpdate,
    client: ClientSettings | CapturedUpdateSettings,
    input_shape: Sequence[int] | Inputs,
    size: int,
) -> ServerView:
    """Return the view of a captured update as if it were of so many images, those of all clients together."""
    known = _known(
        client,
        batch_size=max(1, size // captured.clients),
        shared=_parameters(captured, model),
        buffers=_known_buffers(captured, model),
        kind=captured.kind,
    )
    with with_command_hints(model, client.method):
        alone = from_update(model, captured.update, input_shape=input_shape, options=known)
    return as_mean_of_clients(alone, captured.clients)


def _as_sent(view: ServerView, captured: CapturedUpdate) -> ServerView:
    """Return a view with what the file says beside the update: buffers, whether its size is told, coarse numbers."""
    view = replace(_with_buffers(view, captured.buffers), scale_unknown=captured.scale_unknown)
    halves = {name: captured.before.get(name, captured.update[name]) for name in view.update if name in captured.update}
    return replace(view, sent_as=captured.sent_as or coarse_in_part(halves))


def _known_labels(labels: Tensor | None) -> Tensor:
    """Return the labels that the attacker knows.

    Raises:
        ValueError: nobody gives them.
    """
    if labels is None:
        raise ValueError(
            "expected the labels, which the attacker knows under this threat model, got none: give them alone "
            "(--labels 3,0), or with their images (--images, or your function returns them)"
        )
    return labels


def _with_labels(view: ServerView, labels: Tensor) -> ServerView:
    """Return a view whose server knows the labels of all examples.

    Raises:
        ValueError: they are not as many as examples, or no targets of the loss.
    """
    if view.batch_size is not None and len(labels) != view.batch_size:
        raise ValueError(
            f"expected as many labels as examples, {view.batch_size} (--batch-size, times --clients), got {len(labels)}"
        )
    known = view.task.loss.prepare(labels, view.task.output_shape).to(next(iter(view.task.parameters.values())).device)
    return replace(view, labels=known, threat=replace(view.threat, knows_labels=True))


def _allow_finer_start(subject: Subject, rounding: Mapping[str, Tensor]) -> Subject:
    """Return an update that finer weights before may explain as no contradiction, with a note that says so.

    Args:
        subject: the update with its images.
        rounding: how far the weights before may be off for having been rounded, by name.
    """
    if not rounding or not subject.mismatched or subject.truth is None or subject.error is None:
        return subject
    shift = START_MARGIN * prediction_shift(subject.view, subject.truth, rounding)
    if not subject.error <= shift:
        return subject
    note = (
        f"whether the images fit can't be told: what the model makes of them is off by {subject.error:.2g}, and where "
        f"the client began at finer weights than the coarse ones in the file it may be by {shift:.2g}"
    )
    return replace(subject, tolerance=shift, inconsistency="", notes=(*subject.notes, note))


def _rounding(captured: CapturedUpdate, view: ServerView) -> Mapping[str, Tensor]:
    """Return how far numbers of a view's update may be off for having been rounded; of a gradient by its step size."""
    if captured.kind != "gradient":
        return captured.rounding
    sizes = {name: float(captured.update[name].double().norm()) for name in captured.rounding if name in view.update}
    made = {name: float(dense(view.update[name]).double().norm()) for name in sizes}
    return {name: captured.rounding[name] * (made[name] / size) for name, size in sizes.items() if size > 0}


def _known(client: ClientSettings, **settings: Any) -> CapturedUpdateSettings:
    """Return what is known of a client, and of its update by further settings."""
    return CapturedUpdateSettings(
        **{field.name: getattr(client, field.name) for field in fields(ClientSettings)}, **settings
    )


def _shared_names(made: Client, model: nn.Module) -> list[str]:
    """Return the trained parameters that the method has its clients send; none where weights are generated."""
    if type(made.method.parametrization) is not Parametrization:
        return []
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    return [name for name, scope in made.scopes(dict.fromkeys(trained)).items() if scope is Scope.SHARED]


def _with_truth(
    subject: Subject,
    given: Batch,
    view_of: Callable[[int], ServerView],
    *,
    scaled: bool,
    rounding: Mapping[str, Tensor],
) -> Subject:
    """Return the update with its true images, and whether it is what the model makes of them.

    Args:
        subject: the update by itself.
        given: images and labels; the first are the true ones.
        view_of: the view of an update of so many images.
        scaled: whether the step size is unknown.
        rounding: how far numbers of the update may be off for having been rounded, by name.
    """
    view, error_of = subject.view, partial(prediction_error, scaled=scaled, rounding=rounding)
    batch_size = view.batch_size or 1
    truth = true_images.take_truth(given, batch_size)
    error, tolerance = error_of(view, truth), _tolerance(view, batch_size)
    known = replace(subject, truth=truth, error=error, tolerance=tolerance, n_given=len(given))
    if not known.mismatched:  # nor are zeros off by any share of their size
        nothing = subject.inconsistency if subject.inconsistency == update_sanity.ALL_ZERO else ""
        return replace(known, inconsistency=nothing)
    fits = true_images.describe_matching_images(view, given, view_of, error_of=error_of, tolerance=MISMATCH)
    what = fits or describe_scale(view, truth, MISMATCH, rounding)
    what = what or describe_mismatches(view, truth, MISMATCH, rounding, scaled=scaled)
    what = what or describe_other_loss(view, truth)
    off = _dropout_off(view)
    return replace(known, inconsistency=fits or "; ".join(filter(None, (subject.inconsistency, what, off))))


def _dropout_off(view: ServerView) -> str:
    """Say that dropout counts as off, of whose masks the one example's update may tell, or what else draws numbers.

    It is "" where nothing does.
    """
    if view.method.train_mode:
        return ""
    trained = copy_model(view.task.model).train()
    names = list(drawing_modules(trained))
    if not all(isinstance(trained.get_submodule(name), _DropoutNd) for name in names) or not names:
        gray = torch.full((1, *view.task.input_shape), 0.5).to(floating_weight(trained))
        if places := draws_in_training(trained, gray):
            return (
                f"in training mode the model draws random numbers in {places}, which count as off: an update that was "
                "made with them can't be computed again; have the client train without them to tell whether the "
                "images fit"
            )
        return ""
    if view.batch_size != 1:
        return ""
    return (
        f"dropout ({', '.join(names)}) counts as off; if it was on, give --method '{{name: fedavg, train_mode: true, "
        "...}', or no --method and let your function return model.train()"
    )


def _parameters(captured: CapturedUpdate, model: nn.Module) -> dict[str, Tensor] | None:
    """Return the weights before that the file has, for all that the client trained; None where it has none."""
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    return {name: captured.before[name] for name in names if name in captured.before} or None


def _known_buffers(captured: CapturedUpdate, model: nn.Module) -> dict[str, Tensor] | None:
    """Return the buffers before that the file has; None where it has none, or not all."""
    sent = model.state_dict().keys()  # without what no state has, such as the constants of a loader put in front
    names = [name for name, _ in model.named_buffers() if name in sent]
    found = {name: captured.before[name] for name in names if name in captured.before}
    return found if found and len(found) == len(names) else None


def _train_mode_contradiction(view: ServerView, change: dict[str, Tensor]) -> str:
    """Return why running statistics contradict the mode that the client is said to have trained in, or nothing."""
    statistics = {name: value for name, value in change.items() if value.is_floating_point() and name in view.buffers}
    norms = {
        f"{name}.running_mean": module.training
        for name, module in view.client.task.model.named_modules()
        if isinstance(module, _NormBase) and f"{name}.running_mean" in statistics
    }
    if not norms:
        return ""
    moved = any(bool(statistics[name].any()) for name in norms)
    if moved and not view.method.train_mode:
        return (
            "the running statistics of batch norm in the file have moved, which they do in training mode alone, and "
            "the client counts as in evaluation mode: give --method '{name: fedavg, train_mode: true, ...}', or no "
            "--method and let your function return model.train()"
        )
    if not moved and any(norms.values()):  # those that their user froze do not move
        return (
            "the running statistics of batch norm in the file have not moved, as in evaluation mode, and the client "
            "counts as in training mode: give --method '{name: fedavg, train_mode: false, ...}', or no --method and "
            "let your function return model.eval()"
        )
    return ""


def _with_buffers(view: ServerView, change: dict[str, Tensor]) -> ServerView:
    """Return the view with the buffers after training, where the file says how all that the server sent changed."""
    if not view.buffers or not set(view.buffers) <= set(change):
        return view
    after = {}
    for name, before in view.buffers.items():
        if change[name].shape != before.shape:
            shapes = f"{tuple(before.shape)}, got {tuple(change[name].shape)}"
            raise ValueError(f"expected the buffer {name!r} of shape {shapes}")
        if not bool(change[name].isfinite().all()):
            raise ValueError(f"expected finite numbers in the buffer {name!r}; leave the buffers out")
        after[name] = before - change[name].to(before)
    return replace(view, buffers_after=after)


def _true_batch(given: Examples, view: ServerView, count: int, clients: int) -> Batch:
    """Return the true inputs as the view has them, and their targets, as many for each client.

    Raises:
        ValueError: there are fewer than the update is made of, or they do not fit the view.
    """
    if len(given) < count:
        raise ValueError(
            f"expected {count} true image(s), as many as --batch-size (times --clients) says, got {len(given)}"
        )
    task, tensors = view.task, tensors_of(given.inputs)
    shapes, wanted = [tuple(value.shape[1:]) for value in tensors], [part.shape for part in task.inputs.parts]
    if shapes != wanted:
        expected, got = (str(all_[0]) if len(all_) == 1 else str(all_) for all_ in (wanted, shapes))
        raise ValueError(f"expected true images of --input-shape {expected}, got {got}")
    packed = task.inputs.pack(given.inputs, view.dtype)
    check_values(task.inputs, packed)
    whole = Batch(packed, task.loss.prepare(given.labels, task.output_shape))
    return whole.take(torch.arange(len(given) // clients * clients))


def _tolerance(view: ServerView, batch_size: int) -> float:
    """Return the error up to which images explain an update.

    Small steps on parts of the batch come close to each other in any order, but not within `MISMATCH`.
    """
    sizes = [size for steps in view.schedule or () for step in steps for size in step]
    return MISMATCH if all(size == batch_size for size in sizes) else UNKNOWN_ORDER_TOLERANCE
