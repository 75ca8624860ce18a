"""Other pictures that a network takes for one since it knows no order of its parts.

A network that sums over points, tokens or patches without a place of their own, or compares two inputs of one encoder,
makes the same update of the same parts in another order, to the last digit. What is found is then right but for that
order. Where a whole network does so shows in what it returns: numbers are exchanged along each axis of an input, single
ones and blocks of them, mirrored and moved around, pictures are turned, and inputs of one shape exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attacks.verification.same_outputs import WholeNetwork, are_others, makes_update
from attacks.verification.update_comparison import UpdateComparison
from fl.inputs.form import InputForm
from fl.view import ServerView

MOST_PLACES = 12
"""Places along an axis up to which every two are exchanged; of more, neighbors and the ends."""

MOST_NUMBERS_TOGETHER = 2**15
"""Numbers of the pictures that go through a network together, at most, unless one has more."""


def has_rearranged(
    view: ServerView,
    check: UpdateComparison,
    images: Tensor,
    labels: Tensor,
    fixed: Tensor | None = None,
    *,
    network: WholeNetwork | None,
) -> bool:
    """Return whether images make an update in another order of their parts as well.

    Where the server does not know the whole network, what the rest of it returns has to do.

    Args:
        view: the view that was attacked.
        check: the comparison with the update, which the images explain.
        images: (N, C, H, W).
        labels: with which they do.
        fixed: the numbers that are told, where an attack says so: another order of the rest is no news.
        network: and what it returns of the images; None where it does not run on them. Then the update alone can tell,
            and behind a private classifier nothing can.
    """
    if network is None and view.private:
        return False
    for other in _undecided(network, rearranged(view.task.inputs, images.double())):
        changed = other if fixed is None else torch.where(fixed, other, images.to(other))
        another = are_others(changed, images)
        if network is None:
            makes = bool(another.any()) and makes_update(check, other, labels)
        else:
            another = another & network.same(other) if bool(another.any()) else another
            makes = bool(another.any()) and network.makes_update(view, check, network.put(other, another), labels)
        if makes:
            return True
    return False


def _undecided(network: WholeNetwork | None, others: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield other pictures without those that the network is known to return something else of, asked many at once."""
    while together := list(itertools.islice(others, 1)):
        together += itertools.islice(others, max(0, MOST_NUMBERS_TOGETHER // together[0].numel() - 1))
        yield from together if network is None else network.undecided(together)


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
        yield from (places.roll(1), places.roll(-1))
    for size in range(2, count // 2 + 1):
        if count % size == 0:
            yield torch.cat([places[size : 2 * size], places[:size], places[2 * size :]])
            yield from (places.roll(size), places.roll(-size))
