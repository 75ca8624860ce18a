"""Stacks of trials on the tiny federation, for what evaluates them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support import worlds
from torch import Tensor

import attacks
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from defenses.clip import Clip
from fl.defense import Defense
from fl.federation import Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.view import ServerView

TINY = Hypernetwork(embedding=4, hidden=24, init="scaled")
SETTINGS: dict[str, tuple[str, Method, Defense]] = {
    "one step": ("ig", FedAvg(lr=0.1, steps=1, batch_size=None), Defense()),
    "several steps": ("ig", FedAvg(lr=0.1, steps=3, batch_size=2, momentum=0.9, weight_decay=0.1), Defense()),
    "labels": ("dlg", FedAvg(lr=0.1, steps=1, batch_size=None), Defense()),
    "structured": ("joint", HyperFL(lr=0.1, steps=1, batch_size=None, head_epochs=0, parametrization=TINY), Defense()),
    "clipped": ("ig", FedAvg(lr=0.1, steps=1, batch_size=None), Clip(max_norm=0.01)),
}


def views(method: Method, defense: Defense, count: int, device: str = "cpu") -> list[ServerView]:
    run: Federation = worlds.federation(method, defense, rounds=0, device=device)
    images = (worlds.moved(worlds.images(2, "recorded", i), device) for i in range(count))
    return [run.observe(0, data=own)[0] for own in images]


def problems(name: str, count: int, device: str = "cpu") -> tuple[ProblemBatch, Callable[[int], dict[str, Tensor]]]:
    """A stack of so many trials, and a function from a seed to where they may be."""
    attack, method, defense = SETTINGS[name]
    settings = attacks.build({"name": attack, "tv_weight": 1e-3})
    assert isinstance(settings, GradientMatching)
    given = [settings.build_problem(view) for view in views(method, defense, count, device)]

    def point(seed: int) -> dict[str, Tensor]:
        rows = [settings.initial_variables(problem, seed, i) for i, problem in enumerate(given)]
        return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}

    return ProblemBatch(given), point
