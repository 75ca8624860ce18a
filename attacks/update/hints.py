"""What an attack that does not apply advises instead, as parts of its reasons."""

from __future__ import annotations

from fl.view import ServerView

SEARCH_HINT = "a search that takes the same step on its guess can be tried: ig"
"""What there is where no equation of gradients holds."""


def surrogate_hint(view: ServerView, link: str) -> str:
    """Return `link` and the advice to take all steps for one.

    It is empty for a group, as several clients' steps are not one client's.
    """
    return "" if view.parts else f"{link}take all steps for one by surrogate+ before the attack"
