"""Pictures of other contrast that make the same update, about what a network takes for gray.

A network that takes a gray c off pixels, adds no bias and then normalizes returns the same of a picture x and of all of

    c + s (x - c),  s > 0,

and so does what flows back. Whole levels of 8 bits decide where none of the others is at such. Of a black and white
picture about a middle gray many are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from attacks.network.pixel_map import gray_picture
from attacks.search_control import check_time_limit
from attacks.verification.level_lines import pictures_on_lines
from attacks.verification.pixel_levels import at_levels
from attacks.verification.same_outputs import WholeNetwork
from attacks.verification.update_comparison import UpdateComparison
from fl.view import ServerView

SLIGHTLY_DULLER, DULLER = 0.98, 0.8
"""What contrast is multiplied by in pictures that must not make the update: for one that is verified, and for one that
counts as near."""

ROUNDINGS = 10.0
"""Of a view's precision, by which outputs differ where a private classifier leaves nothing else to ask."""


def ask_contrast(
    view: ServerView,
    check: UpdateComparison,
    images: Tensor,
    labels: Tensor,
    network: WholeNetwork | None = None,
) -> Literal["told", "nearly", "open"]:
    """Return whether an update tells pictures from such of another contrast, or nearly tells it.

    Where the server does not know the whole network, what the rest of it returns has to do.

    Args:
        view: the view that was attacked.
        check: the comparison with the update, which the images explain.
        images: (N, C, H, W).
        labels: with which they do.
        network: with what it returns of the images; None makes it where some of it is private.
    """
    gray = gray_picture(view)
    network = (network or WholeNetwork.of(view, images)) if view.private and gray is not None else None
    if gray is None or (view.private and network is None):
        return "told"
    own, allowed = check.bounds.predict_exactly(images, labels) if network is None else ({}, {})
    images, gray = images.double(), gray.to(images.device).double()
    rounding = ROUNDINGS * torch.finfo(view.dtype).eps
    factor = None if network is not None else _stated_factor(check, own, allowed)

    def makes(others: Tensor) -> bool:
        check_time_limit()
        if network is not None:
            return bool(network.same(others, least=rounding).all())
        if others is images:
            return not check.exceeds(own, allowed, factor)
        return not check.exceeds(check.predictor.predict_in_double(others, labels), allowed, factor)

    def duller(share: float) -> Tensor:
        return gray + share * (images - gray)

    if not makes(images) or not makes(duller(SLIGHTLY_DULLER)):
        return "told"
    whole = at_levels(images)
    others = None if whole is None else pictures_on_lines(whole, _far_along(whole, whole - gray)[None])
    if others is not None and not any(map(makes, others)):
        return "told"
    return "open" if makes(duller(DULLER)) else "nearly"


def _stated_factor(check: UpdateComparison, made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> float | None:
    """Return by what a prediction is multiplied at the stated step size, or None where it is of no such size."""
    if check.view.scale_unknown:
        return None
    return None if check.exceeds(made, allowed, check.stated_factor) else check.stated_factor


def _far_along(images: Tensor, away: Tensor) -> Tensor:
    """Return images moved along lines, so that some pixel of each moves by half of the range."""
    longest = away.abs().amax((1, 2, 3), keepdim=True).clamp_min(torch.finfo(away.dtype).tiny)
    return images + away * (0.5 / longest)
