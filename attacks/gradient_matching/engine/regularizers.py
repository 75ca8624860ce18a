"""What an attacker believes of images before it has seen any update."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fl.client import Client
from fl.types import Candidate
from fl.view import ServerView


class Regularizer(Protocol):
    """A further term of a search's objective: a frozen dataclass of settings."""

    def constants(self, view: ServerView) -> Any:
        """Return the tensors that the regularizer needs of a view, in a tree whose form the settings alone decide."""

    def __call__(self, view: ServerView, candidate: Candidate, client: Client, constants: Any) -> Tensor:
        """Return its value at a guess, a number; differentiable, and fit for `vmap`.

        Args:
            view: of the guess's own trial; its received tensors and buffers may be stacked.
            candidate: the guess.
            client: the local rule as far as the server knows it.
            constants: what `constants` made of the same view.
        """


def total_variation(inputs: Tensor, std: Tensor) -> Tensor:
    """Return the mean absolute difference of neighboring pixels, down and across, in units of `std` per channel.

    The units are those of normalized images, in which IG's weights are stated (Geiping et al. 2020, section 4); the
    image's border has no neighbors and adds nothing, nor does a direction in which an image has one pixel.

    Args:
        inputs: (B, C, H, W) in [0, 1].
        std: (C,).
    """
    scale = std.view(-1, 1, 1)
    across = ((inputs[..., :, 1:] - inputs[..., :, :-1]) / scale).abs()
    down = ((inputs[..., 1:, :] - inputs[..., :-1, :]) / scale).abs()
    parts = [part.mean() for part in (across, down) if part.numel()]
    return sum(parts[1:], parts[0]) if parts else 0 * inputs.sum()
