"""Finds recurrent layers, which no attack that solves layer by layer takes."""

from __future__ import annotations

from torch import nn

from attacks.result import NotApplicable
from fl.view import ServerView

TOGETHER, SEARCH = "cascade solves the steps of one example together", "a search can be tried: ig"
"""What may apply to recurrent networks."""


def recurrent_obstacle(view: ServerView, instead: str = f"{TOGETHER}, or {SEARCH}") -> NotApplicable | None:
    """Return why a network with a recurrent layer can't be solved layer by layer, or None where it has none.

    Args:
        view: what the server saw.
        instead: what to try.
    """
    for name, module in view.task.model.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            reason = (
                f"{name!r} ({type(module).__name__}) is recurrent: one weight sees what every step made of the steps "
                f"before, so that its gradient is no equation of single inputs; {instead}"
            )
            return NotApplicable(reason, limit=True)
    return None
