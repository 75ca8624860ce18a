"""Which image fed which batch, where the server does not know: guesses from the labels alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.problem import INPUTS, Problem
from fl.seeds import stream
from fl.types import ServerView

STALE = 20
"""Exchanges in a row without a new best, after which a search for orders begins elsewhere."""


def ranked(problem: Problem, tries: int, count: int) -> list[Problem]:
    """The problem with the likeliest orders of its batches, best first: at most `count`, at least one.

    Which classes a batch holds shows in a round's update even if every image is taken to be mid grey. So orders are
    ranked by the objective there: images are exchanged between batches of the same pass over the data wherever that
    lowers it, from several starting points. A search has to begin with its order, since images soon fit a wrong one so
    well that no exchange lowers the objective any more. (Dimitrov et al., TMLR 2022, give every pass images of its own
    instead, and need the labels of every batch all the same.)

    Args:
        problem: of a view whose order may be unknown.
        tries: orders to look at; 0 takes the images in turn, and so do labels or classifiers that are searched for.
        count: how many to return.
    """
    if problem.turn is None or not tries or problem.labels is None or problem.view.private or problem.view.parts:
        return [problem]
    view, draw = problem.view, stream(0, "orders")
    passes = _passes(view)
    offset, scale = problem.constants["offset"], problem.constants["scale"]
    shape = (view.batch_size or 1, *problem.space.shape(view.task))
    grey = {INPUTS: (torch.full(shape, 0.5).to(offset) - offset) / scale}
    met: dict[object, tuple[float, Tensor]] = {}
    now, best, stale = problem.turn, math.inf, 0
    for attempt in range(tries):
        tried = now if attempt == 0 else _exchanged(now, passes, draw)
        if stale >= STALE:
            tried, best, stale = _shuffled(now, passes, draw), math.inf, 0
        key = problem.batches(tried)
        stale += 1
        if any(len(set(batch)) < len(batch) for batch in key):  # where a pass ends within a batch (Poisson sampling)
            continue
        if key not in met:
            with torch.no_grad():
                fed = problem.fed(tried)
                value = float(fed.value(grey, fed.constants, view.client, stacked=False))
            met[key] = value if math.isfinite(value) else math.inf, tried
        if met[key][0] < best:
            now, best, stale = tried, met[key][0], 0
    found = sorted(met.values(), key=lambda pair: pair[0])
    return [problem.fed(order) for _, order in found[:count]]


def _passes(view: ServerView) -> list[int]:
    """How many images each pass over the data feeds: all of them, but for the last of a phase."""
    fed = [sum(map(sum, steps)) for steps in view.schedule or ()]
    count = view.batch_size or 1
    return [min(count, total - begin) for total in fed for begin in range(0, total, count)]


def _exchanged(order: Tensor, passes: list[int], draw: torch.Generator) -> Tensor:
    """The order (M,) with two images exchanged in one of the passes."""
    order = order.clone()
    parts = order.split(passes)
    mine = parts[int(torch.randint(len(parts), (), generator=draw))]
    a, b = torch.randint(len(mine), (2,), generator=draw).tolist()
    mine[a], mine[b] = mine[b].clone(), mine[a].clone()
    return order


def _shuffled(order: Tensor, passes: list[int], draw: torch.Generator) -> Tensor:
    """The order (M,) with the images of each pass shuffled."""
    return torch.cat([part[torch.randperm(len(part), generator=draw).to(part.device)] for part in order.split(passes)])
