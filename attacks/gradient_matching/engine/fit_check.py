"""Whether what a search ended at explains the update: where it does not, its pictures and labels are guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from attacks.gradient_matching.engine.problem import Problem, Variables
from attacks.result import Reconstruction, Result
from fl.defense import Defense
from fl.privacy.private_method import Private
from fl.view import ServerView

EXPLAINED = 0.1
"""1 - cos between the update predicted and the one observed up to which a search has explained it.

Searches that found their images end below 0.01, such as were given a wrong label at 0.7."""
ENOUGH = 8
"""Values of a history (one every 50 iterations) below which nobody can tell whether it still falls."""
FALLS = 0.9
"""Share of what it was a quarter of the search before, below which an objective still falls."""
DOUBTFUL = "the search did not explain the update, so nothing confirms the labels"
"""What a result notes then of labels that the server did not know."""


def doubted(result: Result | None, problem: Problem, row: Variables, iterations: int, *, fixed: float) -> Result | None:
    """The result of a search with what is open about it: whether it gave up, and whether anything confirms its labels.

    Where nothing was added to an update, the true images explain all of it, so a search that does not has failed and
    says nothing of what another finds. Noise and the like leave a rest that no search explains; then it gave up only if
    its objective still fell.

    Args:
        result: of the search.
        problem: that was searched.
        row: where it ended.
        iterations: of the search.
        fixed: share of the search in which the step size stays as it is.
    """
    if not isinstance(result, Reconstruction):
        return result
    view, left = problem.view, problem.unexplained(row)
    if left <= EXPLAINED:
        return result
    guessed = result.labels is not None and view.labels is None and view.method.uses_labels
    note = "; ".join(filter(None, (result.note, DOUBTFUL if guessed else "")))
    if not (plain(view) or falling(result.history, fixed)):
        return replace(result, note=note)
    how_far = f"1 - cos = {left:.2g}" if math.isfinite(left) else "no number"
    given_up = f"the search (of at most {iterations} iterations) ended without explaining the update ({how_far})"
    return replace(result, note=note, given_up=given_up)


def plain(view: ServerView) -> bool:
    """Whether nothing was done to the update that its images do not explain."""
    members = view.client.defense.members() if view.threat.knows_defense else view.defense.members()
    return all(type(part) is Defense for part in members) and not isinstance(view.method, Private)


def falling(history: Sequence[float], fixed: float) -> bool:
    """Whether an objective still fell when the search ended, or was too short to tell.

    Args:
        history: the objective, at equal distances.
        fixed: share of it in which the step size stays as it is: it always falls where that does.
    """
    steady = [value for value in history if math.isfinite(value)][: math.ceil(fixed * len(history))]
    if len(steady) < ENOUGH:
        return True
    quarter = len(steady) // 4
    return median(steady[-quarter:]) < FALLS * median(steady[-2 * quarter : -quarter])
