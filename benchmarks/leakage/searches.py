"""How fast every search goes, by network and number of victims: part (e) of `benchmarks.performance.scaling`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import attacks
from attacks.base import NotApplicable
from attacks.gradient_matching.engine.best_iterates import BestIterates
from attacks.gradient_matching.engine.problem import Variables
from attacks.gradient_matching.engine.traced_objective import MIN_EVALUATIONS_TO_TRACE, STEADY_EVALUATIONS
from benchmarks.performance.noise_data import STEP, victims
from fl.method import Method
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.view import ServerView

NETWORKS = ("hyperfl-colour", "lenet-zhu")
VICTIMS = (1, 4, 16, 64)
WORK, LEAST = 256, 6
"""Iterations times trials of a case, and the fewest iterations."""
HYPERFL = HyperFL(steps=1, batch_size=None, head_epochs=0, parametrization=Hypernetwork(init="scaled"))
BILEVEL: dict[str, Any] = {"name": "bilevel", "preset": "published"}
ENDLESS: dict[str, Any] = {"tolerance": 0.0, "patience": 0, "success_threshold": 0.0}
"""Searches that would stop of themselves go on."""
SEARCHES: dict[str, tuple[Method, dict[str, Any], str]] = {
    "dlg": (STEP, {"name": "dlg", "objective": "l2", **ENDLESS}, "iterations"),
    "idlg": (STEP, {"name": "idlg", "objective": "l2", **ENDLESS}, "iterations"),
    "ig": (STEP, {"name": "ig"}, "iterations"),
    "gradinversion": (STEP, {"name": "gradinversion"}, "iterations"),
    "rog": (STEP, {"name": "rog", "preset": "published"}, "iterations"),
    "joint": (HYPERFL, {"name": "joint", "preset": "published"}, "iterations"),
    "bilevel, the embedding": (
        HYPERFL,
        {"name": "bilevel", "preset": "published", "iterations": 1},
        "lower_iterations",
    ),
    "bilevel, the image": (HYPERFL, {**BILEVEL, "lower_iterations": 1}, "iterations"),
    "peel+ig": (HYPERFL, {"name": "peel+ig"}, "iterations"),
}
"""Whom each is tried on, its settings, and which of them counts its iterations."""


def searches(
    names: Sequence[str] = tuple(SEARCHES),
    networks: Sequence[str] = NETWORKS,
    counts: Sequence[int] = VICTIMS,
    work: int = WORK,
) -> list[dict[str, Any]]:
    """Image-iterations per CPU second of every search."""
    torch.set_num_threads(1)
    found = []
    for network in networks:
        seen: dict[Method, list[ServerView]] = {
            method: victims(network, max(counts), method) for method in (STEP, HYPERFL)
        }
        for name in names:
            method = SEARCHES[name][0]
            rates = [rate(name, seen[method][:count], work) for count in counts]
            found.append({"attack": name, "network": network, "victims": list(counts), "rates": rates})
    return found


def rate(name: str, views: Sequence[ServerView], work: int = WORK) -> float:
    """Of the iterations after those in which a search is set up and, where it is long by default, recorded."""
    _, settings, counted = SEARCHES[name]
    one = attacks.build(settings)
    further = max(work // (len(views) * getattr(one, "restarts", 1)), LEAST)
    length = getattr(getattr(one, "then", one), counted)
    with (
        patch(
            "attacks.gradient_matching.engine.batching.MIN_EVALUATIONS_TO_TRACE",
            0 if length >= STEADY_EVALUATIONS + MIN_EVALUATIONS_TO_TRACE else MIN_EVALUATIONS_TO_TRACE,
        ),
        timed() as laps,
    ):
        _call({**settings, counted: STEADY_EVALUATIONS + further}, views)
    return sum(trials for trials, _ in laps) / sum(spent for _, spent in laps)


@contextmanager
def timed() -> Iterator[list[tuple[int, float]]]:
    """Trials and CPU seconds of every iteration of every search but the first `STEADY_EVALUATIONS`."""
    laps, last, note = list[tuple[int, float]](), [0.0], BestIterates.update

    def noted(watch: BestIterates, iteration: int, values: Tensor, variables: Variables) -> Tensor:
        now = time.process_time()
        if iteration > STEADY_EVALUATIONS:
            laps.append((len(values), now - last[0]))
        last[0] = now
        return note(watch, iteration, values, variables)

    with patch.object(BestIterates, "update", noted):
        yield laps


def _call(settings: dict[str, Any], views: Sequence[ServerView]) -> None:
    results = attacks.build(settings).run(views, list(range(len(views))))
    if refused := [result.reason for result in results if isinstance(result, NotApplicable)]:
        raise ValueError(f"expected {settings['name']} to apply to every victim, got: {refused[0]}")
