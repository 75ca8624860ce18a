"""Negatives of pictures, which networks may take for these.

A network that takes a gray off pixels, adds no bias and then takes absolute values, squares or cosines returns the same
of a picture and its negative. What flows back changes its sign with the picture, so that the update is the same to the
last digit. One of two classes whose functions are all odd returns the opposite: that of the other class makes the same
update. The negative of a picture x is 2 c - x, with c what such a network takes for gray.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attacks.network.pixel_map import gray_picture
from attacks.result import Reconstruction
from attacks.verification.comparison import MAX_BORNE_OUT_LABELS, comparison
from attacks.verification.same_outputs import WholeNetwork, are_others, makes_update
from attacks.verification.update_comparison import UpdateComparison
from fl.view import ServerView

GRAY = 0.5
"""What networks take for gray at most times."""


def has_negative(
    view: ServerView, result: Reconstruction, check: UpdateComparison, labels: Tensor, network: WholeNetwork | None
) -> bool:
    """Return whether the negative of one of a result's pictures makes the update as well.

    Where the server does not know the whole network, what the rest of it returns has to be the same.

    Args:
        view: the view that was attacked.
        result: with pictures that the update bears out.
        check: the comparison with it.
        labels: with which these do.
        network: and what it returns of them; None where it does not run on them. Then the update alone can tell, and
            behind a private classifier nothing can.
    """
    if network is None:
        return not view.private and _has_negative_by_update(view, result, check, labels)
    for others in negatives(view, network.images):
        another = are_others(others, network.images)
        if not bool(another.any()):
            continue
        others = network.put(others, another)
        same, opposite = (another & network.same(others, sign=sign) for sign in (1, -1))
        if bool(same.any()) and network.makes_update(view, check, network.put(others, same), labels):
            return True
        if bool(opposite.any()) and _makes_with_others(view, result, network.put(others, opposite)):
            return True
    return False


def _has_negative_by_update(view: ServerView, result: Reconstruction, check: UpdateComparison, labels: Tensor) -> bool:
    """Return whether the negatives of all pictures make the update, by the update alone."""
    assert result.inputs is not None
    images = result.inputs.double()
    for others in negatives(view, images):
        another = are_others(others, images)
        put = torch.where(another[:, None, None, None], others, images)
        if bool(another.any()) and (makes_update(check, put, labels) or _makes_with_others(view, result, put)):
            return True
    return False


def negatives(view: ServerView, images: Tensor) -> Iterator[Tensor]:
    """Yield the negatives of images; each may lie outside [0, 1].

    Args:
        view: whose network counts.
        images: (N, C, H, W).
    """
    mean, _ = view.task.normalization(images)
    own = gray_picture(view)
    grays = [torch.full_like(images[:1], GRAY), mean.to(images).expand_as(images[:1])]
    grays += [] if own is None else [own.to(images)]
    for number, gray in enumerate(grays):
        if not any(torch.equal(gray, earlier) for earlier in grays[:number]):
            yield 2 * gray - images


def _makes_with_others(view: ServerView, result: Reconstruction, images: Tensor) -> bool:
    """Return whether pictures make the update with other targets than those of the result."""
    if view.private:
        return False
    assert result.inputs is not None
    asked = comparison(view, replace(result, inputs=images.to(result.inputs), labels=None, verified=True))
    if asked is None:
        return False
    return any(makes_update(asked.check, *guess) for guess in itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS))
