"""What a search compares where it knows the defense: the truth stays the best guess."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from torch import Tensor

from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import INPUTS, MatchingProblem, private_key
from attacks.rewriting.headless import Headless
from defenses.clip import Clip, ClipOfUnknownNorm
from defenses.compose import Chain
from defenses.flower_local_dp import FlowerLocalDp
from defenses.nvflare_percentile import NVFlarePercentile
from defenses.precode import Precode
from defenses.prune import Prune
from defenses.quantize import Quantize
from defenses.secagg import SecAgg
from defenses.signsgd import SignSGD
from defenses.soteria import Soteria
from fl.aggregated_view import as_single_client
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.tensors import dense
from fl.types import Truth
from fl.view import ServerView


def observed(defense: Defense, *, known: bool = True, **settings: Any) -> tuple[ServerView, Truth]:
    method = replace(worlds.one_step(FedAvg.example()), **settings)
    run = worlds.federation(method, defense)
    view, truth = run.observe(1, data=worlds.images(1, "victim"))
    return replace(view, threat=replace(view.threat, knows_defense=known), labels=truth.labels), truth


def value(
    view: ServerView, truth: Truth, objective: str, *, wrong: bool = False, private: dict[str, Tensor] | None = None
) -> float:
    """The objective at the true image, or at its negative, and at these private tensors."""
    problem = MatchingProblem(
        view, truth.labels if view.method.uses_labels else torch.zeros(1, dtype=torch.int64), objective
    )
    pixels = 1 - truth.inputs if wrong else truth.inputs
    mean, std = (torch.tensor(x, dtype=pixels.dtype).view(-1, 1, 1) for x in (view.task.mean, view.task.std))
    kept = {private_key(name): own[None] for name, own in (private or {}).items()}
    found, _ = ProblemBatch([problem]).evaluate({INPUTS: ((pixels - mean) / std)[None], **kept})
    return float(found)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    "defense",
    [
        Clip(max_norm=1e-2),
        Clip(max_norm=1e-3, scope="tensor"),
        Quantize(bits=2),
        Chain(parts=(Prune(ratio=0.5), Clip(max_norm=1e-3))),
        NVFlarePercentile(percentile=60.0, gamma=5e-3),
        FlowerLocalDp(clipping_norm=1e-2, sensitivity=0.0),
    ],
    ids=str,
)
def test_nothing_is_left_at_the_truth(defense: Defense, weight_decay: float) -> None:
    for objective in ("l2", "cosine"):
        assert value(*observed(defense, weight_decay=weight_decay), objective) < 1e-12
    assert value(*observed(defense, known=False, weight_decay=weight_decay), "l2") > 0.05


@pytest.mark.parametrize("weight_decay", [0.0, 1.0])
@pytest.mark.parametrize("images", [1, 4])
@pytest.mark.parametrize("group", [(), (SecAgg(group_size=3),)], ids=["alone", "group"])
def test_of_precode_nothing_is_left_at_the_truth_with_its_draws(
    group: tuple[Defense, ...], images: int, weight_decay: float
) -> None:
    """What is left without them is no fault of the objective. Each row of them is one image's, in the order fed."""
    defense = Chain(parts=(Precode(latent=6, beta=0.1), *group))
    run = worlds.federation(FedAvg(lr=0.1, steps=1, weight_decay=weight_decay), defense)
    data = [worlds.images(images, "victim", i) for i in range(defense.group_size)]
    view, truth = run.observe(0, data=data)
    drawn = {name: dense(own) for name, own in truth.private.items()}
    assert len(drawn) == defense.group_size
    back = truth.trace.order[0][0][0].argsort().view(-1, images)  # the clients' images stand one after the other
    in_turn = {name: own[rows % images] for (name, own), rows in zip(drawn.items(), back, strict=True)}
    for objective in ("l2", "cosine"):
        assert value(view, truth, objective, private=in_turn) < 1e-20
        assert value(view, truth, objective, private={n: torch.zeros_like(own) for n, own in drawn.items()}) > 0.02
        if images > 1:
            assert value(view, truth, objective, private=drawn) > 0.02


@pytest.mark.parametrize("step", [None, 0.1])
def test_signs_agree_at_the_truth(step: float | None) -> None:
    for objective in ("l2", "cosine"):
        right, wrong = (value(*observed(SignSGD(step=step)), objective, wrong=w) for w in (False, True))
        unaware = value(*observed(SignSGD(step=step), known=False), objective)
        assert right < 0.9 * wrong
        assert right < 0.9 * unaware


@pytest.mark.parametrize("weight_decay", [0.0, 1.0])
@pytest.mark.parametrize("defense", [Clip(max_norm=2e-2), Prune(ratio=0.9), SignSGD(), Soteria(ratio=0.5)], ids=str)
def test_every_client_of_a_group_defends_its_own_update(defense: Defense, weight_decay: float) -> None:
    """One step on one image each: nothing is left at the truth. Not to know of it is to take them for one client."""
    run = worlds.federation(
        FedAvg(lr=0.1, steps=1, weight_decay=weight_decay), Chain(parts=(defense, SecAgg(group_size=3)))
    )
    view, truth = run.observe(0, data=[worlds.images(1, "victim", i) for i in range(3)])
    for objective in ("l2", "cosine"):
        assert value(view, truth, objective) < 1e-20
    unaware = replace(view, threat=replace(view.threat, knows_defense=False))
    assert value(unaware, truth, "l2") > 1e-6
    assert isinstance(as_single_client(unaware), ServerView)
    assert isinstance(as_single_client(view), str)


def test_a_rewritten_view_knows_no_lengths() -> None:
    view, truth = observed(Clip(max_norm=1e-3, scope="tensor"))
    cut = Headless().rewrite(view)
    assert isinstance(cut, ServerView)
    assert cut.defense == ClipOfUnknownNorm(scope="tensor")
    assert value(cut, truth, "cosine") < 1e-12
    assert value(replace(cut, defense=Defense()), truth, "cosine") > 1e-3
