"""Which of the images that a user gave a captured update was made of, where it is not the first ones in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, permutations

import torch

from fl.types import Batch, Trace, Truth
from fl.view import ServerView

MAX_TRIES = 32
"""So many of each kind are tried: an answer is worth seconds, not minutes."""


def take_truth(given: Batch, size: int) -> Truth:
    """Return the first images as what a client fed."""
    return _truth(given, torch.arange(size))


def describe_matching_images(
    view: ServerView,
    given: Batch,
    view_of: Callable[[int], ServerView],
    *,
    error_of: Callable[[ServerView, Truth], float | None],
    tolerance: float,
) -> str:
    """Say in words which of the images given explain the update; empty where none were found that do.

    Args:
        view: of the update.
        given: all images, at least as many as the view's.
        view_of: the same update as one of another number of images.
        error_of: returns the relative error of what a view predicts of images.
        tolerance: up to which they explain it.
    """

    def explain(view: ServerView, index: torch.Tensor) -> bool:
        error = error_of(view, _truth(given, index))
        return error is not None and error <= tolerance

    size = view.batch_size or 1
    for words, index in (*_others(len(given), size), *_orders(view, size)):
        if explain(view, index):
            return f"it is what the model makes of {words}, counted from 0: give these first, in this order"
    if size < len(given) <= MAX_TRIES and explain(view_of(len(given)), torch.arange(len(given))):
        return f"it is what the model makes of all {len(given)} images given: give --batch-size {len(given)}"
    return ""


def _others(count: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield index ranges of `size` images in a row, from the second image on, each with its name in words."""
    for start in range(1, min(count - size, MAX_TRIES) + 1):
        name = f"images[{start}]" if size == 1 else f"images[{start}:{start + size}]"
        yield f"{name} of those given", torch.arange(start, start + size)


def _orders(view: ServerView, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield other orders of the first images, where local steps feed parts of them."""
    if all(fed == size for steps in view.schedule or () for step in steps for fed in step):
        return
    for order in islice(permutations(range(size)), 1, MAX_TRIES):
        yield f"images{list(order)} of those given", torch.tensor(order)


def _truth(given: Batch, index: torch.Tensor) -> Truth:
    chosen = given.take(index)
    trace = Trace(indices=index, inputs=chosen.inputs, labels=chosen.labels, order=(), draws=())
    return Truth(trace=trace, private={})
