"""Earlier rounds on the same image, where the network or its classifier is none of the server's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.pictures import POOLED, STEP, error, network, photograph

import attacks
from attacks import NotApplicable, Reconstruction
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import INPUTS
from attacks.update.earlier_rounds import EARLIER_ROUNDS, rounds_on_same_images
from defenses.mixup import Mixup
from defenses.noise import Noise
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch
from fl.view import ServerView, ThreatModel

APART = FedPer(lr=1e-3, steps=1)
SLOW = replace(STEP, lr=1e-3)
GENERATED = HyperFL(
    lr=0.1, steps=1, batch_size=None, head_epochs=0, parametrization=Hypernetwork(embedding=8, hidden=16, init="scaled")
)
TWO_STEPS = replace(GENERATED, steps=2)


def kept(method: Method, rounds: int = 3) -> tuple[ServerView, torch.Tensor]:
    """What a server has that kept every round of a client with one photograph, and the photograph."""
    task, photo = network(*POOLED), photograph(14)
    batch = Batch(photo, torch.tensor([1]))
    run = Federation(Client(task, method), [ClientData(batch, batch)])
    seen: list[ServerView] = []
    for _ in range(rounds):
        view, _ = run.observe(0, threat=ThreatModel(history_rounds=rounds - 1), history=tuple(seen))
        seen.append(replace(view, history=()))
        run.run_round()
    return view, photo


def lost(view: ServerView) -> ServerView:
    """The view of a round whose update is no numbers."""
    return replace(view, update={name: dense(value) * torch.nan for name, value in view.update.items()})


@pytest.mark.parametrize(("name", "method"), [("headless", SLOW), ("peel", GENERATED)])
def test_the_image_explains_every_round_without_the_classifier(name: str, method: Method) -> None:
    view, photo = kept(method)
    rewrite = attacks.build(name).rewrite  # type: ignore[attr-defined]
    easier = rewrite(view)
    assert isinstance(easier, ServerView)
    assert [past.round for past in easier.history] == [0, 1]
    search = attacks.build({"name": "ig", "tv_weight": 0.0})
    assert isinstance(search, GradientMatching)
    problem = search.build_problem(easier)
    assert len(problem.earlier) == 2
    right = (photo - problem.constants["offset"]) / problem.constants["scale"]
    at_truth, elsewhere = (ProblemBatch([problem]).evaluate({INPUTS: x[None]})[0].item() for x in (right, right + 0.5))
    assert at_truth < 1e-6 < 1e-3 * elsewhere
    first, second = view.history
    fewer = rewrite(replace(view, history=(lost(first), second)))
    assert len(fewer.history) == 1
    found = attacks.build({"name": f"{name}+ig", "iterations": 2})(view)
    assert isinstance(found, Reconstruction)
    assert EARLIER_ROUNDS in found.knowledge


def test_rounds_whose_classifier_is_searched_for_stay_apart() -> None:
    view, _ = kept(TWO_STEPS)
    easier = attacks.build("peel").rewrite(view)  # type: ignore[attr-defined]
    assert isinstance(easier, ServerView)
    assert easier.private
    assert not easier.history
    assert len(rounds_on_same_images(view)) == 2


@pytest.mark.parametrize(("name", "method"), [("cascade", SLOW), ("cascade", APART), ("peel+cascade", GENERATED)])
def test_a_noisy_round_is_made_up_for_by_an_earlier_one(name: str, method: Method) -> None:
    view, photo = kept(method)
    attack = attacks.build(name)
    noisy = replace(view, update=Noise(std=0.05).transform_update(view.update, stream(0, "noise")))
    alone, found, calm = attack(replace(noisy, history=())), attack(noisy), attack(view)
    assert isinstance(alone, NotApplicable) or not alone.verified
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert error(found, photo) < 1e-5
    assert EARLIER_ROUNDS in found.knowledge
    assert found.note == "the picture is that of round 0"
    assert isinstance(calm, Reconstruction)
    assert EARLIER_ROUNDS not in calm.knowledge


def test_rounds_count_where_a_client_is_known_to_feed_all_it_has() -> None:
    view, _ = kept(SLOW)
    assert len(rounds_on_same_images(view)) == 2  # its one image does not fill a batch of 50
    full = replace(view, method=replace(SLOW, batch_size=1))
    assert rounds_on_same_images(full) == ()  # it may have others
    assert rounds_on_same_images(replace(view, schedule=None)) == ()
    assert rounds_on_same_images(replace(view, defense=Mixup())) == ()  # blended anew in every round
