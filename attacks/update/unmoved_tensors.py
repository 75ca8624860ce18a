"""Tensors of an update that did not move at all: those that were not trained, or not sent."""

from __future__ import annotations

from dataclasses import replace

from fl.tensors import dense
from fl.view import ServerView


def without_unmoved(view: ServerView) -> ServerView:
    """Return the view without the tensors that did not move at all, if others did; else the view itself.

    A client that hands its optimizer only some of its tensors sends the others as they came. That is less to compare
    with, and nothing that speaks against what an attack finds.

    Args:
        view: what the server saw.
    """
    moved = {name: value for name, value in view.update.items() if bool(dense(value).any())}
    still = len(view.update) - len(moved)
    return view if not moved or not still or view.parts else replace(view, update=moved)
