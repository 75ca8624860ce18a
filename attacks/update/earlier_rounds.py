"""Earlier rounds of the same client on the same images, for a server that kept them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fl.defense import overrides
from fl.simulation.nonfinite_updates import all_finite
from fl.types import Phase
from fl.view import ServerView

EARLIER_ROUNDS = "earlier rounds"
"""What a result's `knowledge` says of them."""


def rounds_on_same_images(view: ServerView) -> tuple[ServerView, ...]:
    """Return the earlier views of the same images, oldest first.

    They are of rounds in which a client feeds all it has, unmixed.

    That images stay the same (no augmentation, no new ones) is taken for granted.
    """
    phases = view.method.phases(view.client.task, view.round)
    if view.schedule is None or overrides(view.client.defense, "transform_batch"):
        return ()
    if not all(_feeds_everything(phase, steps) for phase, steps in zip(phases, view.schedule, strict=False)):
        return ()
    return tuple(
        past
        for past in view.history
        if past.update and all_finite(past.update) and past.schedule and past.batch_size == view.batch_size
    )


def _feeds_everything(phase: Phase, steps: Sequence[Sequence[int]]) -> bool:
    """Return whether a phase feeds all that the client has, in whatever order."""
    if phase.sampler == "poisson":
        return False
    if phase.epochs is not None or phase.batch_size is None or not steps:
        return True
    return max(steps[0]) < phase.batch_size  # a first batch that is not full is all there is


def comparable_rounds(view: ServerView) -> tuple[ServerView, ...]:
    """Return the earlier views of the same images that a search can compare as well, oldest first.

    Where anything is private no view counts, as it moves on between the rounds and would have to be searched for in
    each.
    """
    return () if view.private else rounds_on_same_images(view)


def with_history(view: ServerView, easier: ServerView, rewrite: Callable[[ServerView], object]) -> ServerView:
    """Return `easier` with the earlier views of the same images, rewritten like `view` where they can be.

    Args:
        view: the one that was rewritten.
        easier: what it was rewritten to.
        rewrite: the rewriting, for one view.
    """
    if easier.private:
        return easier
    past = [rewrite(replace(earlier, history=())) for earlier in rounds_on_same_images(view)]
    return replace(easier, history=tuple(p for p in past if isinstance(p, ServerView) and not p.private))
