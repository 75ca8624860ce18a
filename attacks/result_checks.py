"""What an attack hands back, checked before anything is made of it: attacks of one's own may return what they like."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attacks.result import NotApplicable, Reconstruction, Result
from fl.losses.cross_entropy import CrossEntropy
from fl.view import ServerView

TOO_MANY = "not confirmed: {found} images for an update of {count}; which of them are meant is not said"
NOT_FINITE = "not confirmed: the images have numbers that are not finite"


def check_result(name: str, result: object, view: ServerView) -> None:
    """Refuse what is no result, or no result of this view.

    Args:
        name: of the attack.
        result: that it returned.
        view: the view that was attacked.

    Raises:
        TypeError: it is of another type.
        ValueError: its images or labels are of another shape, type or range than those of the view; says which.
    """
    if isinstance(result, NotApplicable):
        return
    if not isinstance(result, Reconstruction):
        found = type(result).__name__
        raise TypeError(f"expected attack {name!r} to return a Reconstruction or NotApplicable, got {found}")
    for what, value in (("inputs", result.inputs), ("labels", result.labels)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"expected {what} of attack {name!r} as a tensor, got {type(value).__name__}")
    if result.inputs is not None:
        _check_inputs(name, result.inputs, view)
    if result.labels is not None and isinstance(view.task.loss, CrossEntropy) and result.labels.ndim <= 1:
        _check_classes(name, result.labels, view.task.num_classes)


def _check_inputs(name: str, inputs: Tensor, view: ServerView) -> None:
    shape = tuple(view.task.input_shape)
    if tuple(inputs.shape[1:]) != shape or inputs.ndim != len(shape) + 1:
        wanted = f"(N, {', '.join(map(str, shape))})"
        raise ValueError(f"expected inputs of attack {name!r} in the shape {wanted}, got {tuple(inputs.shape)}")
    if not inputs.is_floating_point() and not view.task.inputs.has_ids:
        raise ValueError(
            f"expected inputs of attack {name!r} as floating-point numbers in [0, 1], got {inputs.dtype}: divide by 255"
        )


def _check_classes(name: str, labels: Tensor, classes: int) -> None:
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"expected labels of attack {name!r} as int64 (N,), or shares (N, {classes}), got {labels.dtype}"
        )
    if labels.ndim != 1:
        raise ValueError(f"expected labels of attack {name!r} as int64 (N,), got {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"expected labels of attack {name!r} in [0, {classes}), got {int(labels.min())} to {int(labels.max())}"
        )


def doubt_unaskable(view: ServerView, result: Result) -> Result:
    """Return a result, not verified where nobody can ask whether the update is of its images: too many, or no numbers.

    Args:
        view: the view that was attacked.
        result: of the attack on the view.
    """
    if not isinstance(result, Reconstruction) or result.inputs is None or not (result.verified or result.approximate):
        return result
    if not bool(result.inputs.isfinite().all()):
        return replace(result.with_note(NOT_FINITE), verified=False, fixed=None, approximate=False)
    if view.batch_size is not None and len(result.inputs) > view.batch_size:
        said = TOO_MANY.format(found=len(result.inputs), count=view.batch_size)
        return replace(result.with_note(said), verified=None, fixed=None, approximate=False)
    return result
