from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from reference.plain_training import per_sample_gradients
from support import worlds
from support.compare import assert_near, assert_same

import defenses.dp_sgd as module
from attacks.gradient_matching.engine.problem import MatchingProblem
from defenses.clip import ClipOfUnknownNorm
from defenses.compose import Chain
from defenses.dp_sgd import DPSGD
from defenses.mixup import Mixup
from defenses.prune import Prune
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.local import sampling
from fl.method import Method, Step
from fl.methods.fedavg import FedAvg
from fl.methods.fedjets import FedJETs
from fl.methods.fedper import FedPer
from fl.methods.fedprox import FedProx
from fl.methods.ga import GA
from fl.methods.hyperfedzero import HyperFedZero
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.privacy.accounting import Charge, compute_epsilon, gaussian_epsilon
from fl.privacy.dp_sgd import NORM_STABILIZER
from fl.seeds import stream
from fl.simulation.client_round import train
from fl.tensors import Payloads, Tensors, dense, norm

STEP = FedAvg(lr=1.0, steps=1, batch_size=None)
BATCH = worlds.images(4)


def update(defense: DPSGD, method: FedAvg = STEP, **settings: Any) -> Tensors:
    run = Federation(Client(worlds.task(**settings), method, defense), [ClientData(BATCH, BATCH)])
    return run.train(0).upload.update


def by_hand(clip: float, divisor: float = 4) -> Tensors:
    """Clip, sum, divide."""
    found = per_sample_gradients(worlds.task().model, BATCH.inputs, BATCH.labels)
    factors = [min(1.0, clip / (float(norm(g)) + NORM_STABILIZER)) for g in found]  # type: ignore[arg-type]
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

    for name in ("fastest_gradient", "private_gradient"):
        monkeypatch.setattr(module, name, note(name))
    update(DPSGD())
    assert used == ["fastest_gradient"]
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
        problem = MatchingProblem(seen, truth.labels, "l2")
        with torch.no_grad():
            off = problem.value({"inputs": truth.inputs}, problem.constants, seen.client, vmapped=False)
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
    with pytest.raises(ValueError, match="at most 1 defense that changes the gradient"):
        Chain(parts=(DPSGD(), DPSGD()))


@pytest.mark.parametrize(
    "settings", [{"clip": 0.0}, {"noise_multiplier": -1.0}, {"std": float("inf")}, {"denominator": 0.0}]
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected a (whole )?number >"):
        DPSGD(**settings)


def test_in_another_unit_directions_are_compared() -> None:
    assert DPSGD().with_unknown_scale() == ClipOfUnknownNorm(scope="global")


# ---- what may be said ------------------------------------------------------------------------------------------------
def said(method: Method, sizes: Sequence[int] = (4,), rounds: int = 3, defense: Defense | None = None) -> Any:
    client = Client(worlds.task(), method, defense or DPSGD(noise_multiplier=2.0, denominator=2.0))
    return client.defense.privacy(client.method, client.task, sizes, rounds)


def test_in_epochs_an_image_is_in_one_step_of_each_and_sampling_gains_nothing() -> None:
    found = said(FedAvg(epochs=5, batch_size=2), (4, 40))
    assert (found.rate, found.steps, found.adjacency, found.sampler) == (1.0, 15, "zero-out", "shuffle")
    assert found.epsilon == gaussian_epsilon(15**0.5 / 2.0, 1e-5) < found.epsilon_rdp
    both = said(HyperFL.example(), (4,), 3)
    assert both.steps == 3 * (HyperFL.example().head_epochs + HyperFL.example().epochs)
    assert both.epsilon == compute_epsilon([Charge(2.0, 1.0, both.steps)], 1e-5)
    assert "record-level" in both.sentence()
    assert "no guarantee for a real release" in both.sentence()


def test_under_poisson_sampling_every_step_counts_at_the_smallest_client_s_rate() -> None:
    found = said(FedAvg(epochs=2, batch_size=2, sampler="poisson"), (20, 8), 3, DPSGD(std=8.0, denominator=2.0))
    assert (found.rate, found.steps, found.noise_multiplier) == (0.25, 2 * 4 * 3, 2.0)
    assert found.epsilon == compute_epsilon([Charge(2.0, 0.25, 24)], 1e-5)
    assert found.epsilon < said(FedAvg(steps=8, batch_size=None), (8,)).epsilon
    assert said(FedAvg(epochs=2, batch_size=9, sampler="poisson"), (8,)).rate == 1.0  # all of a small client


@pytest.mark.parametrize("sampler", ["shuffle", "sequential"])
def test_no_image_is_in_more_steps_than_are_charged(sampler: str) -> None:
    """Against the batches that are drawn, and some image is in as many."""
    draw, task = stream(0, "schedules", sampler), worlds.task()
    for _ in range(60):
        n, size, count = (int(torch.randint(1, 12, (), generator=draw)) for _ in range(3))
        for length in ({"epochs": count}, {"steps": count}):
            method = FedAvg(**length, batch_size=size, sampler=sampler)  # type: ignore[arg-type]
            (steps,) = sampling.plan_batches(method.phases(task, 0), n, draw)
            met = torch.zeros(n, dtype=torch.int64)
            for (index,) in steps:
                met[index] += 1
            assert (1.0, int(met.max())) == module._noise_exposure(method.phases(task, 0), n)


class Channel:
    """Between clipping and noise: every release is nothing, so that two runs differ by what they sum alone."""

    def __init__(self) -> None:
        self.sums: list[Tensors] = []

    def __call__(self, sums: dict[str, torch.Tensor], std: float, generator: Any) -> dict[str, torch.Tensor]:
        assert std > 0
        assert generator is not None
        self.sums.append({name: value.clone() for name, value in sums.items()})
        return {name: torch.zeros_like(value) for name, value in sums.items()}


@pytest.mark.parametrize("method", [HyperFL.example(), FedPer.example(), FedAvg.example()], ids=lambda m: m.name)
def test_an_image_moves_as_many_sums_as_are_charged_by_the_clip_each(method: Any, monkeypatch: Any) -> None:
    """Private tensors are among what is summed; an image that counts as nothing is left out of its batches."""
    defense = DPSGD(clip=0.1, noise_multiplier=2.0, denominator=2.0)
    run = worlds.federation(method, defense, rounds=0)
    start, found = run.start(0), []
    for last in (4, 3):
        channel = Channel()
        monkeypatch.setattr("fl.privacy.dp_sgd._add_noise", channel)
        kept = tuple(tuple(tuple(i[i < last] for i in step) for step in steps) for steps in start.trace.order)
        train(replace(start, trace=replace(start.trace, order=kept), noise=stream(0, "noise")))
        found.append(channel.sums)
    moved = [
        float(torch.stack([(dense(a[n]) - dense(b[n])).square().sum() for n in a]).sum().sqrt())
        for a, b in zip(*found, strict=True)
    ]
    assert all(size <= 0.1 * (1 + 1e-9) for size in moved)
    assert sum(size > 0.09 for size in moved) == sum(size > 0 for size in moved)
    assert (
        sum(size > 0 for size in moved) == run.client.defense.privacy(run.client.method, run.client.task, [4], 1).steps
    )  # type: ignore


@dataclass(frozen=True, kw_only=True)
class Tells(FedAvg):
    """FedAvg that sends something beside."""

    name: ClassVar[str] = "tells"

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        return {"beside": {"norm": norm(params)}}, {}


@pytest.mark.parametrize(
    ("method", "defense", "reason"),
    [
        (FedAvg(), DPSGD(noise_multiplier=0.0), "no noise is added"),
        (FedProx(), DPSGD(), "fedprox has a gradient of its own"),
        (GA(), DPSGD(), "ga has a gradient of its own"),  # what its looks send is no noisy gradient
        (FedJETs(), DPSGD(), "fedjets has a gradient of its own"),
        (Tells(), DPSGD(), "tells sends or keeps more than its parameters"),
        (FedAvg(), Chain(parts=(Mixup(), DPSGD())), "the defense mixup mixes images"),
        (FedAvg(), Chain(parts=(DPSGD(), Prune(ratio=0.5))), ""),
    ],
)
def test_where_no_epsilon_follows_it_says_why(method: Method, defense: Defense, reason: str) -> None:
    found = said(method, (4,), 1, defense)
    assert reason in found.reason
    assert (found.epsilon is None) == bool(reason)
    assert found.sentence().startswith("no epsilon is claimed" if reason else "record-level")


def test_only_this_defense_claims_anything() -> None:
    assert said(FedAvg(), (4,), 1, Prune()) is None
    assert said(FedAvg(), (4,), 1, Chain(parts=(Prune(), Mixup()))) is None
    with pytest.raises(ValueError, match="at least 1 client"):
        said(FedAvg(), ())
