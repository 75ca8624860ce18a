"""Asks of which other pictures a whole network returns what it returns of some."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.network.layer_chain import trace_view
from attacks.result import NotApplicable
from attacks.search_control import check_time_limit
from attacks.verification.update_comparison import UpdateComparison
from fl.seeds import stream
from fl.view import ServerView

SAME_OUTPUT = 1e-9
"""Relative to the largest output: what the order of sums may change."""
DIFFERENT = 1 / 510
"""Half a level of 8 bits: what a picture has to differ by somewhere to be another one."""
MARGIN = 1e-6
"""By how much numbers may lie beyond their range."""


@dataclass(frozen=True)
class WholeNetwork:
    """A network in double precision, and what it returns of some pictures.

    Attributes:
        model: of which the server knows each number, or has drawn those that it does not.
        images: (N, C, H, W).
        outputs: of these.
    """

    model: nn.Module
    images: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, view: ServerView, images: Tensor) -> WholeNetwork | None:
        """Return the network of a view with pictures (N, C, H, W), or None where it can't be told."""
        found = trace_view(view, view.device)
        if isinstance(found, NotApplicable):
            return None
        model, images = copy.deepcopy(found[0]), images.double()  # in training mode it counts statistics
        draw = stream(0, "private parameters")
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name in view.private:  # of which the server has zeros; large ones would close what comes above
                    drawn = torch.randn(value.shape, generator=draw, dtype=torch.float64)
                    value.copy_(drawn * value.shape[1:].numel() ** -0.5)
            return cls(model, images, model(images))

    def same(self, others: Tensor, *, sign: int = 1, least: float = SAME_OUTPUT) -> Tensor:
        """Return of which others the network returns the same (N,), or that times -1.

        Pictures count each by itself: a network may take one of a batch for another one, and the rest not.

        Args:
            others: (N, C, H, W).
            sign: 1 or -1.
            least: what outputs may differ by, relative to the largest, where that is more than the order of sums does.
        """
        check_time_limit()
        with torch.no_grad():
            far = (self.model(others) - sign * self.outputs).abs()
        limit, count = max(least, SAME_OUTPUT) * self.outputs.abs().max(), len(self.images)
        each = far.reshape(count, -1).amax(1) if len(far) == count else far.amax().expand(count)
        return each <= limit

    def makes_update(self, view: ServerView, check: UpdateComparison, others: Tensor, labels: Tensor) -> bool:
        """Return whether others make the update or, where the server knows a part of the network, have the same output.

        Args:
            view: that was attacked.
            check: the comparison with the update.
            others: (N, C, H, W).
            labels: with which the images make it.
        """
        return bool(self.same(others).all()) if view.private else makes_update(check, others, labels)

    def put(self, others: Tensor, where: Tensor) -> Tensor:
        """Return the images with others in the places (N,) named."""
        return torch.where(where[:, None, None, None], others, self.images)


def are_others(others: Tensor, images: Tensor) -> Tensor:
    """Return which of some pictures (N, C, H, W) can be ones, and are others than those given (N,)."""
    flat, before = others.flatten(1), images.to(others).flatten(1)
    inside = (flat >= -MARGIN).all(1) & (flat <= 1 + MARGIN).all(1)
    return inside & ((flat - before).abs().amax(1) > DIFFERENT)


def makes_update(check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    """Return whether images with labels make the update, to rounding or as closely as what was found.

    Args:
        check: the comparison with it.
        images: (N, C, H, W).
        labels: (N, ...).
    """
    return check.is_explained_to_rounding(images, labels) or bool(check.is_explained(images, labels))
