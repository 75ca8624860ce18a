from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.plain_training import per_sample_gradients
from support import worlds
from support.compare import assert_near, assert_same

import defenses.dp_sgd as module
from attacks.problem import Problem
from defenses.clip import Unscaled
from defenses.compose import Chain
from defenses.dp_sgd import DPSGD
from defenses.mixup import Mixup
from defenses.prune import Prune
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfedzero import HyperFedZero
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.privacy import STABILISER
from fl.tensors import Tensors, dense, norm

STEP = FedAvg(lr=1.0, steps=1, batch_size=None)
BATCH = worlds.images(4)


def update(defense: DPSGD, method: FedAvg = STEP, **settings: Any) -> Tensors:
    run = Federation(Client(worlds.task(**settings), method, defense), [ClientData(BATCH, BATCH)])
    return run.train(0).upload.update


def by_hand(clip: float, divisor: float = 4) -> Tensors:
    """Clip, sum, divide."""
    found = per_sample_gradients(worlds.task().model, BATCH.inputs, BATCH.labels)
    factors = [min(1.0, clip / (float(norm(g)) + STABILISER)) for g in found]  # type: ignore[arg-type]
    return {k: sum(f * g[k] for f, g in zip(factors, found, strict=True)) / divisor for k in found[0]}  # type: ignore


@pytest.mark.parametrize("clip", [1e-2, 1.0, 1e3])
def test_a_step_is_the_mean_of_clipped_gradients(clip: float) -> None:
    assert_near(update(DPSGD(clip=clip, noise_multiplier=0.0)), by_hand(clip), 1e-12)
    assert_near(update(DPSGD(clip=clip, noise_multiplier=0.0, denominator=8.0)), by_hand(clip, 8.0), 1e-12)


@pytest.mark.parametrize("settings", [{"noise_multiplier": 3.0}, {"std": 1.5}], ids=str)
def test_the_noise_has_its_size(settings: Any) -> None:
    """Standard deviation 0.5 * 3 = 1.5 on the sum of four images, so 0.375 on the mean; by Opacus."""
    noisy, plain = (update(DPSGD(clip=0.5, **s)) for s in (settings, {"noise_multiplier": 0.0}))
    noise = torch.cat([(dense(noisy[name]) - dense(plain[name])).flatten() for name in plain])
    assert float(noise.std()) == pytest.approx(0.375, rel=0.05)
    assert abs(float(noise.mean())) < 0.05


def test_training_takes_the_fastest_way_where_no_one_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def note(name: str) -> Any:
        way = getattr(module, name)
        return lambda *args, **settings: (used.append(name), way(*args, **settings))[1]

    for name in ("fastest", "private_gradient"):
        monkeypatch.setattr(module, name, note(name))
    update(DPSGD())
    assert used == ["fastest"]
    used.clear()
    update(DPSGD(noise_multiplier=0.0))
    assert used == ["private_gradient"]


@pytest.mark.parametrize("noise_multiplier", [0.0, 1e-9])
def test_both_ways_are_one_gradient(noise_multiplier: float) -> None:
    """Ghost clipping with next to no noise, and the gradient of each image."""
    for method in (STEP, worlds.one_step(HyperFL.example())):
        found = worlds.federation(method, DPSGD(clip=0.5, noise_multiplier=noise_multiplier), rounds=0).train(0)
        plain = worlds.federation(method, DPSGD(clip=0.5, noise_multiplier=0.0), rounds=0).train(0)
        assert_near(found.upload.update, plain.upload.update, 1e-6)
    frozen = replace(STEP, train_mode=False)
    assert update(DPSGD(noise_multiplier=noise_multiplier), frozen, batch_norm=True)


@pytest.mark.parametrize(
    "defense", [DPSGD.example(), Chain(parts=(Mixup(), DPSGD.example(), Prune(ratio=0.5)))], ids=str
)
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_update(method: Any, defense: Any) -> None:
    view, truth = worlds.federation(method, defense).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)


def test_predictions_leave_the_noise_out() -> None:
    noisy, plain = (
        worlds.federation(STEP, DPSGD(clip=0.5, noise_multiplier=m), rounds=0).observe(1) for m in (1.0, 0.0)
    )
    assert_near(predict(noisy[0], noisy[1].candidate()), plain[0].update, 1e-12)
    assert not torch.equal(dense(noisy[0].update["head.weight"]), dense(plain[0].update["head.weight"]))


def test_the_search_knows_the_clipping() -> None:
    view, truth = worlds.federation(STEP, DPSGD(clip=0.1, noise_multiplier=0.0)).observe(1)
    for known, at_truth in ((True, 1e-12), (False, 0.5)):
        seen = replace(view, threat=replace(view.threat, knows_defense=known))
        problem = Problem(seen, truth.labels, "l2")
        with torch.no_grad():
            off = problem.value({"inputs": truth.inputs}, problem.constants, seen.client, stacked=False)
        assert (float(off) < at_truth) == known


def test_what_it_cannot_defend_is_said_before_training() -> None:
    with pytest.raises(ValueError, match="expected a loss that treats images apart, got that of hyperfedzero"):
        Client(worlds.task(), HyperFedZero.example(), DPSGD())
    with pytest.raises(ValueError, match="got batch norm in train mode: use group norm"):
        Client(worlds.task(batch_norm=True), STEP, DPSGD())
    poisson = FedAvg(batch_size=2, sampler="poisson")
    with pytest.raises(ValueError, match="expected a denominator under Poisson sampling"):
        Client(worlds.task(), poisson, DPSGD())
    assert update(DPSGD(denominator=2.0), poisson)
    with pytest.raises(ValueError, match="at most 1 defence that changes the gradient"):
        Chain(parts=(DPSGD(), DPSGD()))


@pytest.mark.parametrize(
    "settings", [{"clip": 0.0}, {"noise_multiplier": -1.0}, {"std": float("inf")}, {"denominator": 0.0}]
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(settings))} >"):
        DPSGD(**settings)


def test_in_another_unit_directions_are_compared() -> None:
    assert DPSGD().rescaled() == Unscaled(scope="global")
