"""Negatives of pictures, which networks may take for these.

A network that takes a gray off pixels, adds no bias and then takes absolute values, squares or cosines returns the same
of a picture and its negative. What flows back changes its sign with the picture, so that the update is the same to the
last digit. One of two classes whose functions are all odd returns the opposite: that of the other class makes the same
update. The negative of a picture x is 2 c - x, with c what such a network takes for gray.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from attacks.network.layer_chain import trace_view
from attacks.network.pixel_map import gray_picture
from attacks.result import NotApplicable, Reconstruction
from attacks.verification.comparison import MAX_BORNE_OUT_LABELS, comparison
from attacks.verification.update_comparison import UpdateComparison
from fl.seeds import stream
from fl.view import ServerView

GRAY = 0.5
"""What networks take for gray at most times."""
SAME_OUTPUT = 1e-9
"""Relative to the largest output: what the order of sums may change."""
DIFFERENT = 1 / 510
"""Half a level of 8 bits: what a negative has to differ by somewhere to be another picture."""
MARGIN = 1e-6
"""By how much numbers may lie beyond their range."""


def has_negative(view: ServerView, result: Reconstruction, check: UpdateComparison, labels: Tensor) -> bool:
    """Return whether the negative of one of a result's pictures makes the update as well.

    Where the server does not know the whole network, what the rest of it returns has to be the same.

    Args:
        view: that was attacked.
        result: with pictures that the update bears out.
        check: the comparison with it.
        labels: with which these do.
    """
    assert result.inputs is not None
    images = result.inputs.double()
    found = trace_view(view, view.device)
    if isinstance(found, NotApplicable):
        return False
    model = copy.deepcopy(found[0])  # in training mode it counts statistics
    _draw_private(model, view)
    with torch.no_grad():
        before = model(images)
        for other in negatives(view, images):
            after, limit = model(other), SAME_OUTPUT * before.abs().max()
            same, opposite = (bool((after - sign * before).abs().max() <= limit) for sign in (1, -1))
            if same and (bool(view.private) or _makes(check, other, labels)):
                return True
            if opposite and len(images) == 1 and _makes_with_others(view, result, other):
                return True
    return False


def negatives(view: ServerView, images: Tensor) -> Iterator[Tensor]:
    """Yield images with one of them as its negative, where that is another picture in [0, 1].

    Args:
        view: of which the network counts.
        images: (N, C, H, W).
    """
    mean, _ = view.task.normalization(images)
    own = gray_picture(view)
    grays = [torch.full_like(images[:1], GRAY), mean.to(images).expand_as(images[:1])]
    grays += [] if own is None else [own.to(images)]
    for number, gray in enumerate(grays):
        if any(torch.equal(gray, earlier) for earlier in grays[:number]):
            continue
        for place in range(len(images)):
            other = images.clone()
            other[place] = 2 * gray[0] - images[place]
            inside = bool((other[place] >= -MARGIN).all()) and bool((other[place] <= 1 + MARGIN).all())
            if inside and float((other - images).abs().max()) > DIFFERENT:
                yield other


def _draw_private(model: nn.Module, view: ServerView) -> None:
    """Draw the numbers of a model that the server does not know, of which it has zeros."""
    draw = stream(0, "negatives")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in view.private:
                value.copy_(torch.randn(value.shape, generator=draw, dtype=torch.float64))


def _makes(check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    return check.is_explained_to_rounding(images, labels) or bool(check.is_explained(images, labels))


def _makes_with_others(view: ServerView, result: Reconstruction, image: Tensor) -> bool:
    """Return whether a picture makes the update with other targets than those of the result."""
    if view.private:
        return False
    assert result.inputs is not None
    asked = comparison(view, replace(result, inputs=image.to(result.inputs), labels=None, verified=True))
    if asked is None:
        return False
    return any(_makes(asked.check, *guess) for guess in itertools.islice(asked.guesses, MAX_BORNE_OUT_LABELS))
