"""How much each tensor of an update counts in a search, and how far each private tensor moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds
from torch import Tensor

import attacks
from attacks.base import Reconstruction
from attacks.gradient_matching.engine.base import PRIVATE_LR, GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.optimizers import Adam
from attacks.gradient_matching.engine.problem import INPUTS, SCALE_FLOOR, private_key
from defenses.noise import Noise
from defenses.precode import UNTRUSTED_WEIGHT, Precode
from fl.defense import Defense
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, dense, rms
from fl.types import Candidate
from fl.view import ServerView

ONE: dict[str, int | None] = {"steps": 1, "batch_size": None}

UNEXPLAINED = "the search did not explain the update, so nothing confirms the labels"
"""What two iterations come to, whatever the settings."""


def seen(method: Method | None = None, defense: Defense | None = None) -> ServerView:
    run = worlds.federation(method or FedAvg(lr=0.1, **ONE), defense)  # type: ignore[arg-type]
    return run.observe(0, data=worlds.images(1, "scales"))[0]


def search(**settings: object) -> GradientMatching:
    built = attacks.build({"name": "ig", "tv_weight": 0.0, **settings})
    assert isinstance(built, GradientMatching)
    return built


def value(view: ServerView, guess: Tensor, **settings: object) -> float:
    """The objective of a guess, as the search has it."""
    return ProblemBatch([search(**settings).build_problem(view)]).evaluate({INPUTS: guess[None]})[0].item()


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("objective", ["cosine", "l2"])
def test_each_tensor_is_divided_by_a_power_of_its_size(objective: str, balance: float) -> None:
    view = seen()
    guess = torch.rand(1, *view.task.input_shape, generator=stream(0, "guess")).double()
    problem = search().build_problem(view)
    pixels = problem.images_of(guess)
    predicted = predict(view, Candidate(pixels, problem.labels, {}))
    factors = {name: rms(observed) ** -balance for name, observed in view.update.items()}
    theirs, mine = (
        torch.cat([(dense(side[name]) * factors[name]).flatten() for name in view.update])
        for side in (view.update, predicted)
    )
    apart = 1 - torch.cosine_similarity(theirs, mine, dim=0)
    if objective == "l2":
        apart = (theirs - mine).square().sum() / theirs.square().sum()
    assert value(view, guess, objective=objective, balance=balance) == pytest.approx(apart.item(), rel=1e-6)


def test_a_balanced_objective_has_no_unit() -> None:
    view = seen()
    guess = torch.rand(1, *view.task.input_shape, generator=stream(0, "guess")).double()
    tiny = replace(view, update={name: dense(x) * 1e-140 for name, x in view.update.items()}, scale_unknown=True)
    at_scale = value(replace(view, scale_unknown=True), guess, balance=1.0)
    assert value(tiny, guess, balance=1.0) == pytest.approx(at_scale, rel=1e-6)


def test_small_tensors_count_as_a_thousandth_of_the_largest() -> None:
    view = seen()
    first, *others = view.update
    noise = {first: dense(view.update[first]) * 1e-9, **{name: view.update[name] for name in others}}
    weights = search(balance=1.0).build_problem(replace(view, update=noise)).constants["weights"]
    largest = max(rms(view.update[name]) for name in others)
    for name, value in noise.items():
        size = max(rms(value), SCALE_FLOOR * largest)
        assert float(weights[name]) == pytest.approx(SCALE_FLOOR * largest / size, rel=1e-6)


def test_structured_updates_are_balanced_as_dense_ones() -> None:
    view = worlds.federation(HyperFL(lr=0.1, **ONE)).observe(0, data=worlds.images(1, "scales"))[0]  # type: ignore[arg-type]
    flat = replace(view, update={name: dense(value) for name, value in view.update.items()})
    assert any(isinstance(value, LowRank) for value in view.update.values())
    found = []
    for seen_as in (view, flat):
        problem = search(balance=0.5).build_problem(seen_as)
        rows = search(balance=0.5).initial_variables(problem, 0, 0)
        found.append(ProblemBatch([problem]).evaluate({key: row[None] for key, row in rows.items()})[0].item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_noise_weighs_no_tensor_and_precode_withholds_some() -> None:
    assert search().build_problem(seen(defense=Noise(std=0.1))).constants["weights"] is None
    view = seen(defense=Precode(latent=4))
    for balance in (0.0, 1.0):
        weights = search(balance=balance).build_problem(view).constants["weights"]
        trusted, kept = ([n for n in weights if ("bottleneck" in n or "head" in n) is late] for late in (False, True))
        assert kept
        sizes = {n: rms(view.update[n]) ** balance if rms(view.update[n]) > 0 else 1.0 for n in view.update}
        assert max(float(weights[n]) * sizes[n] for n in kept) < 10 * UNTRUSTED_WEIGHT * max(
            float(weights[n]) * sizes[n] for n in trusted
        )


def test_private_tensors_move_by_the_step_of_the_longest_beginning() -> None:
    sizes = {"embedding": 0.5, "head": 0.25, "head.bias": 0.125}
    mover = Adam(search(private_lr=sizes, schedule="none"), [])
    names = ("embedding", "head.weight", "head.bias", "other")
    rows = {INPUTS: torch.zeros(1, 3), **{private_key(name): torch.zeros(1, 3) for name in names}}
    moved = mover.step(rows, {key: torch.full((1, 3), 2.0) for key in rows})
    steps = {name: -float(moved[private_key(name)][0, 0]) for name in names}
    assert steps == pytest.approx({"embedding": 0.5, "head.weight": 0.25, "head.bias": 0.125, "other": PRIVATE_LR})
    assert search(private_lr={"": 0.3}).private_step("whatever") == 0.3


def test_a_step_of_no_private_tensor_is_noted() -> None:
    view = seen(FedPer(lr=0.1, **ONE))  # type: ignore[arg-type]
    slip = search(iterations=2, private_lr={"haed": 0.1, "head": 0.1})(view)
    assert isinstance(slip, Reconstruction)
    assert "haed" in slip.note
    assert "head.weight" in slip.note
    right = search(iterations=2, private_lr={"head": 0.1})(view)
    assert isinstance(right, Reconstruction)
    assert right.note == UNEXPLAINED
    plain = search(iterations=2, private_lr={"head": 0.1})(seen())
    assert isinstance(plain, Reconstruction)
    assert plain.note in {"", UNEXPLAINED}


def test_the_steps_that_an_attack_has_by_default_are_no_slip() -> None:
    built = attacks.build({"name": "joint", "iterations": 2})
    assert isinstance(built, GradientMatching)
    assert {name: built.private_step(name) for name in ("embedding", "head.bias")} == {
        "embedding": 0.1,
        "head.bias": 0.01,
    }
    found = built(seen(FedPer(lr=0.1, **ONE)))  # type: ignore[arg-type]
    assert isinstance(found, Reconstruction)
    assert found.note == UNEXPLAINED


def test_steps_are_read_from_plain_data_and_checked() -> None:
    read = search(private_lr={"head": 1e-2, "": 1})
    assert read.private_lr == {"head": 0.01, "": 1.0}
    assert attacks.attacks.build(attacks.attacks.spec(read)) == read
    with pytest.raises(ValueError, match=r"private_lr.head: expected a number >= 0, got -1"):
        search(private_lr={"head": -1})
    with pytest.raises(ValueError, match=r"balance: expected a (whole )?number in \[0, 1\], got 2"):
        search(balance=2)
