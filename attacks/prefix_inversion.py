"""Runs an attack on the network above a pixel prefix, and confirms its result on the whole network.

A pixel prefix (`attacks.network.pixel_prefix`) is what a network does to pixels before its first trained weights, such
as a logarithm or instance normalization. Attacks that solve layer by layer do not get through it. They run on the
network above instead, whose "picture" v is the prefix's output moved into [0, 1]. What they find is mapped back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from attacks.labels.targets import with_target
from attacks.network.pixel_prefix import PixelPrefix, doubt_later_functions, read_pixel_prefix
from attacks.result import NotApplicable, Reconstruction, Result
from attacks.update.float_rounding import largest_rounding
from attacks.verification.value_errors import value_errors
from fl.view import ServerView

FORMER_KINDS = {"bent": "pixelwise", "scaled": "normalized"}
"""Kinds of prefixes by the names they had before, which attacks of others may still state."""


Confirm = Callable[[ServerView, Result], Any]
"""Returns a result of the kind it was given, verified only where the update of the view bears it out."""


class Confirming(Protocol):
    """An attack, as far as its results are confirmed."""

    def confirm(self, view: ServerView, result: Result) -> Result:
        """Return the result, verified only where the update of the view bears it out."""


def network_above(attack: object, view: ServerView) -> ServerView | None:
    """Return the view of the network above the prefix, on which an attack is to run instead; None without one.

    Args:
        attack: states by `inverted_prefixes` above which kinds of prefixes it runs.
        view: what the server saw.
    """
    inverted = {FORMER_KINDS.get(kind, kind) for kind in getattr(attack, "inverted_prefixes", ())}
    if not inverted or view.batch_size != 1 or view.private or view.parts:
        return None
    prefix = read_pixel_prefix(view)
    return None if prefix is None or prefix.kind not in inverted else prefix.above(view)


def needs_whole_network(view: ServerView, confirmed: Result | None) -> bool:
    """Return whether the attack has to run on the whole network as well, since the network above led to nothing.

    Behind a function of single pixels, levels of 8 bits lie where an attack on the network above does not look for
    them.

    Args:
        view: what the server saw.
        confirmed: the result on the network above, confirmed; None where the attack refused it.
    """
    if not isinstance(confirmed, Reconstruction) or confirmed.inputs is None:
        return True
    prefix = read_pixel_prefix(view)
    return prefix is not None and prefix.kind == "pixelwise" and not confirmed.verified


def is_better(on_whole: Reconstruction, on_above: Result) -> bool:
    """Return whether the result on the whole network is a picture, or the one on the network above is none."""
    return on_whole.inputs is not None or isinstance(on_above, NotApplicable) or on_above.inputs is None


def confirm_whole(attack: Confirming, view: ServerView, above: ServerView | None, result: Result) -> Result:
    """Return a result as the update of the whole network bears it out.

    Pictures whose scale the network normalizes away are confirmed on the network above, whose input has no scale.

    Args:
        attack: that made the result.
        view: what the server saw.
        above: the view of the network above, on which the attack ran; None if it ran on the whole network.
        result: of the attack.
    """
    confirm: Confirm = getattr(attack, "confirm", lambda view, result: result)
    if not isinstance(result, Reconstruction):
        return confirm(view, result)
    if result.inputs is None:
        return confirm(view if above is None else above, with_target(view, result))
    prefix = read_pixel_prefix(view) if above is not None or not (view.private or view.parts) else None
    if prefix is None:
        return confirm(view, with_target(view, result))
    if prefix.kind == "pixelwise":
        on_pixels = result if above is None else prefix.turn_back(result)
        return _bound_pixels(prefix, view, above, result, confirm(view, with_target(view, on_pixels)))
    return _confirm_normalized(confirm, prefix, view, above, result)


def _confirm_normalized(
    confirm: Confirm, prefix: PixelPrefix, view: ServerView, above: ServerView | None, result: Reconstruction
) -> Result:
    """Return a picture as the network above a normalization bears it out."""
    ran_above, pictures = above is not None, None
    assert result.inputs is not None
    if above is None:
        above = prefix.above(view) if view.batch_size == 1 == len(result.inputs) else None
        pictures = result.inputs
    if above is None:
        return prefix.turn_back(confirm(view, with_target(view, result)), pictures)
    found = result if ran_above else replace(result, inputs=prefix.values(result.inputs), seen=None)
    confirmed = prefix.turn_back(confirm(above, with_target(above, found)), pictures)
    next_prefix = read_pixel_prefix(above)
    is_followed = next_prefix is not None and next_prefix.kind == "pixelwise" and not next_prefix.affine
    return doubt_later_functions(confirmed) if is_followed else confirmed


def _bound_pixels(
    prefix: PixelPrefix, view: ServerView, above: ServerView | None, result: Reconstruction, confirmed: Result
) -> Result:
    """Return a result below functions of single pixels, not verified where rounding may move one to another level.

    Args:
        prefix: the functions.
        view: what the server saw.
        above: the view of the network above, if the attack ran on it: the result's inputs are v then, else pictures.
        result: of the attack.
        confirmed: the same, as the update of the whole network bears it out.
    """
    is_borne_out = isinstance(confirmed, Reconstruction) and (confirmed.verified or confirmed.approximate)
    if not isinstance(confirmed, Reconstruction) or not is_borne_out or result.inputs is None:
        return confirmed
    values = result.inputs if above is not None else prefix.values(result.inputs)

    def errors(which: Tensor | None) -> Tensor | None:
        network = above or (prefix.above(view) if view.batch_size == 1 else None)
        found = replace(result, inputs=values, labels=confirmed.labels, seen=None)
        return None if network is None else value_errors(network, found, which)

    return prefix.bound(values, confirmed, largest_rounding(view), errors, solved=above is not None)
