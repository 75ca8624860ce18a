"""What is audited when it is not one of our own methods: a user's model with images (for updates see `captured`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from eval.audit.examples import Examples, check_examples
from eval.audit.input_shape import check_images_fit, with_command_hints
from eval.metrics.update_prediction_error import prediction_error
from fl.capture import ClientSettings, from_batch
from fl.losses.cross_entropy import FROM_ONE, count_from_one
from fl.models.function import require_weights
from fl.runtime.user_code import call_user_function, find_callable
from fl.types import Batch, Truth
from fl.view import ServerView


@dataclass(frozen=True)
class UserModel:
    """What a user's function returned.

    Attributes:
        model: theirs.
        data: inputs and targets, if it gave any.
    """

    model: nn.Module
    data: Examples | None


@dataclass(frozen=True)
class Subject:
    """One update under attack.

    Attributes:
        view: what the server has.
        truth: what the client fed, if known.
        error: relative error of what the view predicts of the truth; None if it can't be told.
        tolerance: from which on such an error says that view, truth and update do not belong together.
        given: how many images the truth is the first of.
        doubt: what else says that the update is not of this model and these settings, in words.
        captured: whether the update was captured, and not computed from the truth.
        notes: what a reader has to know of how it was read.
    """

    view: ServerView
    truth: Truth | None
    error: float | None = None
    tolerance: float = 1e-4
    n_given: int = 0
    inconsistency: str = ""
    captured: bool = False
    notes: tuple[str, ...] = ()

    @property
    def mismatched(self) -> bool:
        """Whether the update is not what the model makes of the truth (NaN: it is not)."""
        return self.error is not None and not self.error <= self.tolerance


def load_user_model(target: str) -> UserModel:
    """Return the result of a user's function `module:function`, or their model `module:model` itself.

    Looked for in the current folder first.

    Raises:
        ValueError: no such module or function (says what is close), one that raises (says what and where), or that
            returns something else than a model or (model, images, labels), a model without weights, no images, or not
            one label per image.
    """
    found = find_callable(target)
    made = found if isinstance(found, nn.Module) else call_user_function(found, target)
    if isinstance(made, nn.Module):
        return UserModel(require_weights(made, target), None)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        model, inputs, labels = made
        return UserModel(require_weights(model, target), check_examples(target, inputs, labels))
    called = f"; the class is to be called: return {made.__name__}(...)" if isinstance(made, type) else ""
    raise ValueError(
        f"expected {target} to return a model or (model, images, labels), got {type(made).__name__}{called}"
    )


def take_first(data: Examples | Batch, count: int, source: str, option: str = "--count") -> Examples:
    """Return the first images of `data`.

    Raises:
        ValueError: there are fewer.
    """
    if len(data) < count:
        raise ValueError(f"expected at least {count} images in {source}, got {len(data)}; give a smaller {option}")
    return Examples.of(data).part(slice(count))


def of_batches(
    model: nn.Module, data: Examples | Batch, batch_size: int, client: ClientSettings, *, source: str, seed: int = 0
) -> list[Subject]:
    """Return the updates that the model sends: one for every batch of images.

    Args:
        model: of the user's.
        data: inputs and targets.
        batch_size: images in one update; divides N.
        client: how the client trains.
        source: where the images come from, for errors.
        seed: of the first update's randomness; that of each further is one more.

    Raises:
        ValueError: model and images do not fit each other, or the last batch would be smaller.
    """
    if len(data) % batch_size:
        raise ValueError(f"expected a number of images that {batch_size} (--batch-size) divides, got {len(data)}")
    data = Examples.of(data)
    if isinstance(data.inputs, Tensor) and data.inputs.ndim == 4:
        channels, height, width = data.inputs.shape[1:]
        check_images_fit(model, (channels, height, width), source=source)
    found = []
    for number, start in enumerate(range(0, len(data), batch_size)):
        part = slice(start, start + batch_size)
        with with_command_hints(model, client.method):
            own = data.part(part)
            view, truth = from_batch(model, own.inputs, own.labels, options=client, seed=seed + number)
        _check_all_labels(view, own, source)
        found.append(Subject(view, truth, prediction_error(view, truth)))
    return found


def _check_all_labels(view: ServerView, part: Examples, source: str) -> None:
    """Refuse examples of a source whose labels count from 1: those of a part may fit the model all the same.

    Raises:
        ValueError: says so, and what to do.
    """
    task, labels = view.client.task, part.source_labels
    if labels is not None and task.loss.is_cross_entropy and count_from_one(labels, task.output_shape):
        raise ValueError(
            f"{source}: expected labels in [0, {task.num_classes}), got 1 to {task.num_classes}; {FROM_ONE}"
        )
