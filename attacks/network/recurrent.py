"""Finds recurrent layers, which no attack that solves layer by layer takes."""

from __future__ import annotations

from torch import nn

from attacks.result import NotApplicable
from fl.view import ServerView


def recurrent_obstacle(view: ServerView) -> NotApplicable | None:
    """Return why a network with a recurrent layer can't be solved layer by layer, or None where it has none."""
    for name, module in view.task.model.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            reason = (
                f"{name!r} ({type(module).__name__}) is recurrent: one weight sees what every step made of the steps "
                "before, so that its gradient is no equation of single inputs; a search can be tried: ig"
            )
            return NotApplicable(reason, limit=True)
    return None
