"""Checks what is most often wrong in a view made by hand, before an attack runs on it."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.simulation.nonfinite_updates import form_mismatch
from fl.types import Task
from fl.view import ServerView


def check_view(view: ServerView) -> None:
    """Refuse what is no view, or a view whose parts do not fit; `fl.capture.from_update` checks more.

    Args:
        view: that is to be attacked.

    Raises:
        TypeError: it is no view.
        ValueError: a tensor of the update has another shape or type than what the server sent, or is sparse or
            complex (says which), the number of images is below 1 although some were fed, or labels are not theirs.
    """
    if not isinstance(view, ServerView):
        hint = ": fl.capture.from_batch returns the view and the truth" if isinstance(view, tuple) else ""
        raise TypeError(f"expected a ServerView, got {type(view).__name__}{hint}")
    fed = any(size for steps in view.schedule or () for step in steps for size in step)
    if view.batch_size is not None and view.batch_size < (1 if fed else 0):  # a hidden schedule may have fed none
        raise ValueError(f"expected batch_size >= 1, or None where it is unknown, got {view.batch_size}")
    for name, moved in view.update.items():
        if reason := form_mismatch(moved):
            raise ValueError(f"expected the update of {name!r} {reason}")
        sent = view.shared.get(name)
        if not isinstance(sent, Tensor) or not isinstance(moved, Tensor):
            continue
        shapes, types = (tuple(sent.shape), tuple(moved.shape)), (sent.dtype, moved.dtype)
        for what, (expected, got) in (("shape", shapes), ("type", types)):
            if got != expected:
                raise ValueError(
                    f"expected the update of {name!r} in the {what} of what the server sent, {expected}, got {got}: "
                    "fl.capture.from_update makes a view of a captured update"
                )
    if view.labels is not None:
        _check_labels(view.labels, view.batch_size, view.task)


def _check_labels(labels: object, count: int | None, task: Task) -> None:
    """Check that each image has a label: a class, or probabilities of all classes (N, K), as of mixed images.

    Under another loss than cross entropy it is a target in that loss's form.
    """
    classes = task.num_classes
    if not isinstance(labels, Tensor):
        raise ValueError(f"expected labels as a tensor int64, got {type(labels).__name__}")
    if not task.loss.is_cross_entropy:
        if count is not None and len(labels) != count:
            raise ValueError(f"expected a target for each of {count} examples, got {len(labels)}")
        task.loss.prepare(labels, task.output_shape)
        return
    mixed = labels.ndim == 2 and labels.shape[1] == classes and labels.is_floating_point()
    if not mixed and (labels.ndim != 1 or labels.dtype != torch.int64):
        raise ValueError(
            f"expected labels int64 (N,), or probabilities (N, {classes}), got {labels.dtype} {tuple(labels.shape)}"
        )
    if count is not None and len(labels) != count:
        raise ValueError(f"expected a label for each of {count} images, got {len(labels)}")
    if not mixed and not bool(((labels >= 0) & (labels < classes)).all()):
        raise ValueError(f"expected labels in [0, {classes}), got {labels.tolist()}")
