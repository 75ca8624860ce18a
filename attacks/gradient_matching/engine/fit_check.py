"""Checks whether what a search ended at explains the update: else its pictures and labels are guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from attacks.gradient_matching.engine.problem import LABELS, MatchingProblem, Variables
from attacks.labels.recovery import LABELS_COUNTED, are_labels_proven
from attacks.result import Reconstruction, Remark
from attacks.update.classifier_update import classifier_names
from fl.defense import Defense
from fl.privacy.private_method import PrivateMethod
from fl.view import ServerView

EXPLAINED_BELOW = 0.1
"""1 - cos between the update predicted and the one observed up to which a search has explained it.

Searches that found their images end below 0.01, such as were given a wrong label at 0.7."""
MIN_HISTORY = 8
"""Values of a history (one every 50 iterations) below which nobody can tell whether it still falls."""
FALLING_RATIO = 0.9
"""Share of what it was a quarter of the search before, below which an objective still falls."""
LABELS_UNCONFIRMED = "the search did not explain the update, so nothing confirms the labels"
"""What a result notes then of labels that the server did not know."""
LABELS_SEARCHED = "the search chose the labels, and with other inputs others may explain the update as well"
"""What a result notes of labels that no gradient of the outputs tells, even where the search explained the update."""


@dataclass(frozen=True)
class SearchLength:
    """How long a search was.

    Attributes:
        iterations: at most.
        constant_lr: share of the search in which the step size stays as it is.
        cut_short: what stopped it before, in words; empty where nothing did.
    """

    iterations: int
    constant_lr: float
    cut_short: str = ""


def note_misfit(
    result: Reconstruction, problem: MatchingProblem, row: Variables, search: SearchLength
) -> Reconstruction:
    """Add to a result how well it explains the update, whether the search gave up, and whether labels are confirmed.

    Where nothing was added to an update, the true images explain all of it, so a search that does not has failed and
    says nothing of what another finds. Noise and the like leave a rest that no search explains; then it gave up only if
    its objective still fell, or it was cut short.

    Args:
        result: of the search.
        problem: that was searched.
        row: where it ended.
        search: how long it was.
    """
    view, misfit = problem.view, problem.cosine_misfit(row)
    result = replace(result, misfit=misfit)
    guessed = result.labels is not None and view.labels is None and view.method.uses_labels
    if misfit <= EXPLAINED_BELOW:
        doubt = _doubt_of_labels(view, searched=LABELS in row) if guessed else ""
        return result.with_note(doubt, Remark.LABELS_DOUBTFUL) if doubt else result
    if guessed:
        result = result.with_note(LABELS_UNCONFIRMED, Remark.LABELS_DOUBTFUL)
    if not (search.cut_short or is_noiseless(view) or still_falling(result.history, search.constant_lr)):
        return result
    how_far = f"1 - cos = {misfit:.2g}" if math.isfinite(misfit) else "no number"
    what = search.cut_short or f"the search (of at most {search.iterations} iterations) ended"
    return replace(result, given_up=f"{what} without explaining the update ({how_far})")


def _doubt_of_labels(view: ServerView, *, searched: bool) -> str:
    """Return why labels may be others though a search explained the update with them; "" where nothing speaks for that.

    Without the classifier's bias nothing tells the gradient of the outputs: what flows back of another label comes in
    the update times what other pictures make of a layer (adapters that begin at zero, a classifier of two classes or
    one that is not sent).

    Args:
        view: the view that was attacked.
        searched: whether the search changed the labels.
    """
    if searched and classifier_names(view, view.update)[1] is None:
        return LABELS_SEARCHED
    counted = not searched and view.task.loss.is_cross_entropy and view.batch_size != 1
    return LABELS_COUNTED if counted and not are_labels_proven(view) else ""


def is_noiseless(view: ServerView) -> bool:
    """Return whether nothing was done to the update that its images do not explain."""
    members = view.client.defense.members() if view.threat.knows_defense else view.defense.members()
    return all(type(part) is Defense for part in members) and not isinstance(view.method, PrivateMethod)


def still_falling(history: Sequence[float], constant_lr: float) -> bool:
    """Return whether an objective still fell when the search ended, or was too short to tell.

    Args:
        history: the objective, at equal distances.
        constant_lr: share of it in which the step size stays as it is: it always falls where that does.
    """
    steady = [value for value in history if math.isfinite(value)][: math.ceil(constant_lr * len(history))]
    if len(steady) < MIN_HISTORY:
        return True
    quarter = len(steady) // 4
    return median(steady[-quarter:]) < FALLING_RATIO * median(steady[-2 * quarter : -quarter])
