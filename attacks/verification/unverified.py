"""Says of a result that its attack does not verify why not, and what is open."""

from __future__ import annotations

import math

from attacks.labels.recovery import single_label
from attacks.result import Reconstruction
from attacks.verification.words import DEFENSE_UNKNOWN, LEFT_UNEXPLAINED, OPEN_NUMBERS, UNEXPLAINED
from fl.view import ServerView


def say_why_unverified(view: ServerView, result: Reconstruction) -> Reconstruction:
    """Return a result with the reason in its note where its attack, which can tell, does not verify it.

    Numbers that are not fixed are always counted. Of other reasons the attack's own words come first.

    Args:
        view: the view that was attacked.
        result: of an attack on it, as the update bears it out.
    """
    if result.verified or (result.verified is None and result.fixed is None):
        return result
    count = 0 if result.fixed is None else result.fixed.numel() - int(result.fixed.sum())
    if result.fixed is not None and count:
        said = OPEN_NUMBERS.format(count, result.fixed.numel())
        return result if said in result.note else result.with_note(said)
    if result.verified is None or _says_why(view, result):
        return result
    precision = "half a level of 8 bits" if view.task.inputs.is_image and result.inputs is not None else "its rounding"
    known = math.isfinite(result.objective) and result.objective > 0
    said = LEFT_UNEXPLAINED.format(result.objective, precision) if known else UNEXPLAINED.format(precision)
    return result.with_note(said if view.threat.knows_defense else f"{said}; {DEFENSE_UNKNOWN}")


def _says_why(view: ServerView, result: Reconstruction) -> bool:
    """Return whether the note of a result has more than what is said of its label."""
    if not result.note:
        return False
    label = single_label(view)[1] if view.batch_size == 1 else ""
    return result.note != label
