"""Guesses, by labels alone, which image fed which batch and which label is whose, where that is unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from attacks.gradient_matching.engine.problem import INPUTS, MatchingProblem
from fl.seeds import stream
from fl.view import ServerView

MAX_FUTILE_EXCHANGES = 20
"""Exchanges in a row without a new best, after which a search for orders begins elsewhere."""


def rank_orders(problem: MatchingProblem, tries: int, count: int) -> list[MatchingProblem]:
    """Return the problem with the likeliest orders of its batches, best first: at most `count`, at least one.

    Which classes a batch holds shows in a round's update even if every image is taken to be mid gray. So orders are
    ranked by the objective there: images are exchanged between batches of the same pass over the data wherever that
    lowers it, from several starting points. A search has to begin with its order, since images soon fit a wrong one so
    well that no exchange lowers the objective any more. (Dimitrov et al., TMLR 2022, give every pass images of its own
    instead, and need the labels of every batch all the same.)

    Args:
        problem: of a view whose order may be unknown.
        tries: orders to look at; 0 takes the images in turn, and so do labels or classifiers that are searched for.
        count: how many to return.
    """
    if (
        problem.default_order is None
        or not tries
        or problem.labels is None
        or problem.view.private
        or problem.view.parts
    ):
        return [problem]
    view = problem.view
    passes = _images_per_pass(view)

    def value(order: Tensor) -> float:
        # where a pass ends within a batch (Poisson sampling) an image may be there twice
        twice = any(len(set(batch)) < len(batch) for batch in problem.batch_contents(order))
        return math.inf if twice else _objective_at_gray(problem.with_order(order))

    met = _search_exchanges(problem.default_order, passes, tries, value, problem.batch_contents, stream(0, "orders"))
    return [problem.with_order(order) for order in met[:count]] or [problem]


def assign_labels(problem: MatchingProblem, tries: int) -> Tensor | None:
    """Return the labels read off (N,), each given to the image whose batches it explains best.

    It is None where nothing tells.

    As orders are by `rank_orders`: by the objective at mid gray, labels being exchanged wherever that lowers it.

    Args:
        problem: of a view whose order is known.
        tries: deals to look at; 0 looks at none.
    """
    counted, view = problem.recovered_labels, problem.view
    if not tries or counted is None or view.private or view.parts or view.order is None:
        return None

    def value(labels: Tensor) -> float:
        return _objective_at_gray(replace(problem, labels=labels))

    met = _search_exchanges(
        counted, [len(counted)], tries, value, lambda labels: tuple(labels.tolist()), stream(0, "deals")
    )
    return met[0] if met else None


def _objective_at_gray(problem: MatchingProblem) -> float:
    """Return the objective where every image is mid gray; infinite where it is not a number."""
    view, constants = problem.view, problem.constants
    offset, scale = constants["offset"], constants["scale"]
    shape = (view.batch_size or 1, *problem.space.shape(view.task))
    gray = {INPUTS: (torch.full(shape, 0.5).to(offset) - offset) / scale}
    with torch.no_grad():
        found = float(problem.value(gray, constants, view.client, vmapped=False))
    return found if math.isfinite(found) else math.inf


def _search_exchanges(
    now: Tensor,
    parts: list[int],
    tries: int,
    value: Callable[[Tensor], float],
    key: Callable[[Tensor], Hashable],
    draw: torch.Generator,
) -> list[Tensor]:
    """Return what was met of finite `value`, least first.

    In so many `tries`, entries of `now` (M,) are exchanged within `parts` of it.

    Of those whose `key` is equal only the first is looked at.
    """
    met: dict[Hashable, tuple[float, Tensor]] = {}
    best, stale = math.inf, 0
    for attempt in range(tries):
        tried = now if attempt == 0 else _exchange_two(now, parts, draw)
        if stale >= MAX_FUTILE_EXCHANGES:
            tried, best, stale = _shuffle_passes(now, parts, draw), math.inf, 0
        stale += 1
        same = key(tried)
        if same not in met:
            met[same] = value(tried), tried
        if met[same][0] < best:
            now, best, stale = tried, met[same][0], 0
    found = sorted((pair for pair in met.values() if pair[0] < math.inf), key=lambda pair: pair[0])
    return [one for _, one in found]


def _images_per_pass(view: ServerView) -> list[int]:
    """Return how many images each pass over the data feeds: all of them, but for the last of a phase."""
    fed = [sum(map(sum, steps)) for steps in view.schedule or ()]
    count = view.batch_size or 1
    return [min(count, total - begin) for total in fed for begin in range(0, total, count)]


def _exchange_two(order: Tensor, passes: list[int], draw: torch.Generator) -> Tensor:
    """Return the order (M,) with two images exchanged in one of the passes."""
    order = order.clone()
    parts = order.split(passes)
    mine = parts[int(torch.randint(len(parts), (), generator=draw))]
    a, b = torch.randint(len(mine), (2,), generator=draw).tolist()
    mine[a], mine[b] = mine[b].clone(), mine[a].clone()
    return order


def _shuffle_passes(order: Tensor, passes: list[int], draw: torch.Generator) -> Tensor:
    """Return the order (M,) with the images of each pass shuffled."""
    return torch.cat([part[torch.randperm(len(part), generator=draw).to(part.device)] for part in order.split(passes)])
