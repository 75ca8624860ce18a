"""Other pictures that a network takes for one since it knows no order of its parts.

A network that sums over points, tokens or patches without a place of their own, or compares two inputs of one encoder,
makes the same update of the same parts in another order, to the last digit. What is found is then right but for that
order. Where a whole network does so shows in what it returns: numbers are exchanged along each axis of an input, single
ones and blocks of them, mirrored and moved around, pictures are turned, and inputs of one shape exchanged.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from attacks.network.layer_chain import trace_view
from attacks.result import NotApplicable
from attacks.verification.update_comparison import UpdateComparison
from fl.inputs.form import InputForm
from fl.seeds import stream
from fl.view import ServerView

MOST_PLACES = 12
"""Places along an axis up to which every two are exchanged; of more, neighbors and the ends."""
SAME_OUTPUT = 1e-9
"""Relative to the largest output: what the order of sums may change."""
DIFFERENT = 1 / 510
"""Half a level of 8 bits: what a rearranged picture has to differ by somewhere to be another."""
MARGIN = 1e-6
"""By how much numbers may lie beyond their range."""


def has_rearranged(view: ServerView, check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    """Return whether images make an update in another order of their parts as well.

    Where the server does not know the whole network, what the rest of it returns has to do.

    Args:
        view: that was attacked.
        check: the comparison with the update, which the images explain.
        images: (N, C, H, W).
        labels: with which they do.
    """
    others = (other for other in rearranged(view.task.inputs, images.double()) if _is_another(other, images))
    return any(
        bool(view.private) or check.is_explained_to_rounding(other, labels) or check.is_explained(other, labels)
        for other in _returned_alike(view, images.double(), others)
    )


def rearranged(form: InputForm, images: Tensor) -> Iterator[Tensor]:
    """Yield images with their parts in other orders.

    Args:
        form: of the inputs that the images are.
        images: (N, C, H, W).
    """
    parts = form.unpack(images)
    for i, part in enumerate(parts):
        for order in _orders(tuple(part.shape[1:])):
            yield _pack(form, images, [*parts[:i], order(part), *parts[i + 1 :]])
    for i, j in itertools.combinations(range(len(parts)), 2):
        if parts[i].shape == parts[j].shape:
            swapped = list(parts)
            swapped[i], swapped[j] = parts[j], parts[i]
            yield _pack(form, images, swapped)


def _pack(form: InputForm, images: Tensor, parts: list[Tensor]) -> Tensor:
    flat = [own.pack(part).reshape(len(part), -1) for own, part in zip(form.parts, parts, strict=True)]
    return torch.cat(flat, 1).reshape(images.shape).to(images)


def _orders(shape: tuple[int, ...]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield rearrangements of inputs (N, *shape)."""
    for axis, count in enumerate(shape, start=1):
        for index in _indices(count):
            yield lambda part, axis=axis, index=index: part.index_select(axis, index.to(part.device))  # type: ignore[misc]
    if len(shape) > 1 and shape[-1] == shape[-2]:
        yield lambda part: part.transpose(-1, -2)
        yield lambda part: part.rot90(1, (-2, -1))
    if len(shape) > 1:
        yield lambda part: part.flip((-2, -1))


def _indices(count: int) -> Iterator[Tensor]:
    """Yield other orders of so many places."""
    places = torch.arange(count)
    if count <= MOST_PLACES:
        pairs = list(itertools.combinations(range(count), 2))
    else:
        pairs = [(0, 1), (count // 2 - 1, count // 2), (0, count - 1)]
    for i, j in pairs:
        index = places.clone()
        index[i], index[j] = j, i
        yield index
    if count > 2:
        yield places.flip(0)
        yield places.roll(1)
    for size in range(2, count // 2 + 1):
        if count % size == 0:
            yield torch.cat([places[size : 2 * size], places[:size], places[2 * size :]])
            yield places.roll(size)


def _is_another(other: Tensor, images: Tensor) -> bool:
    """Return whether a rearranged picture can be one, and another one."""
    inside = bool((other >= -MARGIN).all()) and bool((other <= 1 + MARGIN).all())
    return inside and float((other - images.to(other)).abs().max()) > DIFFERENT


def _returned_alike(view: ServerView, images: Tensor, others: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield those of which the network returns the same; all where that can't be asked."""
    found = trace_view(view, view.device)
    if isinstance(found, NotApplicable):
        yield from () if view.private else others
        return
    model = copy.deepcopy(found[0])  # in training mode it counts statistics
    draw = stream(0, "rearrangements")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in view.private:  # of which the server has zeros
                value.copy_(torch.randn(value.shape, generator=draw, dtype=torch.float64))
    before = _returned(model, images)
    for other in others:
        if bool((_returned(model, other) - before).abs().max() <= SAME_OUTPUT * before.abs().max()):
            yield other


def _returned(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = model(images)
    return outputs
