"""Auditing the package's own noisy step: never flagged where it is right, flagged where it is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import worlds
from support.cover import one_at_a_time

import fl.privacy.dp_sgd
import fl.privacy.private_method
from defenses.compose import Chain
from defenses.dp_sgd import DPSGD
from defenses.prune import Prune
from eval.privacy import canaries, client_canaries
from fl.client import Client
from fl.method import Method
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.fedavg import FedAvg
from fl.methods.ppsgd import PPSGD
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.privacy.accounting import Charge, compute_epsilon
from fl.privacy.gaussian_noise import Noise
from fl.privacy.private_method import PrivateMethod
from fl.types import Upload

MANY, SEEDS = 10_000, 6
METHOD = DPFedAvg(noise_multiplier=1.5, images=1000, batch_size=800, steps=1, rounds=2)
"""Two rounds of one step, each of four in five records."""
Break = Callable[[pytest.MonkeyPatch], None]


def half_the_noise(patch: pytest.MonkeyPatch) -> None:
    right = fl.privacy.dp_sgd._add_noise
    patch.setattr(fl.privacy.dp_sgd, "_add_noise", lambda sums, std, generator: right(sums, std / 2, generator))


def twice_the_clip(patch: pytest.MonkeyPatch) -> None:
    right = fl.privacy.dp_sgd._clip_factors
    patch.setattr(fl.privacy.dp_sgd, "_clip_factors", lambda norms, clip: right(norms, 2 * clip))


def noise_again_after_resuming(patch: pytest.MonkeyPatch) -> None:
    """The second epoch draws the keys of the first again, as after a restart that lost count, and other batches."""
    right, kept, count = fl.privacy.private_method.draw_key, list[torch.Tensor](), [0]

    def key(generator: torch.Generator) -> torch.Tensor:
        kept.append(right(generator))
        count[0] += 1
        half = MANY // canaries.BLOCK
        return kept[(count[0] - 1) % half]

    patch.setattr(fl.privacy.private_method, "draw_key", key)


def no_noise_at_first(patch: pytest.MonkeyPatch) -> None:
    right, count = fl.privacy.dp_sgd._add_noise, [0]

    def noisy(sums: Any, std: float, generator: Any) -> Any:
        count[0] += 1
        return sums if count[0] <= (MANY // canaries.BLOCK) else right(sums, std, generator)

    patch.setattr(fl.privacy.dp_sgd, "_add_noise", noisy)


def audited(seed: int, broken: Break | None = None) -> canaries.CanaryAudit:
    with pytest.MonkeyPatch.context() as patch:
        if broken is not None:
            broken(patch)
        return canaries.audit(METHOD, [1000], 2, canaries=MANY, seed=seed, significance=0.05)


def test_a_right_step_is_never_flagged() -> None:
    found = [audited(seed) for seed in range(SEEDS)]
    assert found[0].claimed == compute_epsilon([Charge(1.5, 0.8, 2)], 1e-5)
    assert all(0.5 * one.claimed < one.lower < one.claimed < one.ceiling for one in found)  # and not for want of power
    assert "does not refute" in found[0].sentence()


@pytest.mark.parametrize("broken", [half_the_noise, twice_the_clip, noise_again_after_resuming, no_noise_at_first])
def test_a_broken_step_is_flagged(broken: Break) -> None:
    found = [audited(seed, broken) for seed in range(SEEDS // 2)]
    assert all(one.refuted for one in found)
    assert "which refutes the 3.64 claimed" in found[0].sentence()


# ---- every private method ------------------------------------------------------------------------------------------
SETTINGS: dict[str, Any] = {"noise_multiplier": 1.0, "images": 500, "batch_size": 400, "steps": 1, "rounds": 3}
EVERY: dict[str, PrivateMethod] = {
    "dp-fedavg": DPFedAvg(**SETTINGS),
    "dp-fedavg, shuffled": DPFedAvg(**SETTINGS, sampler="shuffle"),
    "dp-fedavg, from the system": DPFedAvg(**SETTINGS, noise_source="secure"),
    "centaur": Centaur(**SETTINGS),
    "ppsgd": PPSGD(**SETTINGS),
    "dp-hyperfl": DPHyperFL(**SETTINGS, parametrization=Hypernetwork(embedding=4, hidden=8)),
}


@pytest.mark.parametrize("name", list(EVERY))
def test_every_method_s_own_steps_show_what_they_are_charged_for(name: str) -> None:
    method = EVERY[name]
    coins = torch.rand(1500, generator=torch.Generator().manual_seed(1)) < 0.5
    statement = method.privacy([500], 3)
    assert statement is not None
    read = canaries.noisy_releases(canaries.single_step_method(method, statement.rate), 6, coins, seed=1)
    out, inside = read[:, ~coins.numpy()], read[:, coins.numpy()]
    assert out.mean() == pytest.approx(0.0, abs=0.06)
    assert out.std() == pytest.approx(1.0, abs=0.06)  # noise alone, in units of the clip
    assert inside.mean() == pytest.approx(statement.rate, abs=0.07)  # a canary has the length of the clip where drawn
    assert abs(np.corrcoef(out)[np.triu_indices(6, 1)]).max() < 0.2


# ---- at client level -----------------------------------------------------------------------------------------------
SERVER = DPFedAvg(mode="client-level", noise_multiplier=2.0, clip=0.3, rounds=4)
CLIENT_LEVEL: dict[str, PrivateMethod] = {
    "dp-fedavg": SERVER,
    "dp-fedavg, from the system": replace(SERVER, noise_source="secure"),
    "centaur": Centaur(mode="client-level", noise_multiplier=2.0, clip=0.3, rounds=4),
    "ppsgd": PPSGD(mode="client-level", noise_multiplier=2.0, clip=0.3, rounds=4, steps=1),
    "dp-hyperfl": DPHyperFL(mode="client-level", noise_multiplier=2.0, clip=0.3, rounds=4),
}
HEADS = {f"hypernet.heads.body.{part}.{end}" for part in ("weight", "bias") for end in ("weight", "bias")}
TENSORS = {
    "centaur": {"body.weight", "body.bias"},
    "ppsgd": {"body.weight", "body.bias", "common.head.weight"},
    "dp-hyperfl": {"hypernet.trunk.weight", *HEADS},
}


@pytest.mark.parametrize("name", list(CLIENT_LEVEL))
def test_every_server_s_noise_shows_what_it_is_charged_for(name: str) -> None:
    # noise of the system is other every time: with so many, the bounds below are six standard errors and more
    count = 2400 if CLIENT_LEVEL[name].noise_source == "secure" else 600
    coins = torch.rand(count, generator=torch.Generator().manual_seed(1)) < 0.5
    signs = np.array([[1.0], [-1.0], [1.0], [1.0]]).repeat(count, 1)
    found = dict(client_canaries.noisy_client_releases(CLIENT_LEVEL[name], signs, coins, seed=1))
    assert set(found) == TENSORS.get(name, {"body.weight", "body.bias", "head.weight"})
    for read in found.values():
        read = read * signs / 2.0
        out, inside = read[:, ~coins.numpy()], read[:, coins.numpy()]
        assert out.mean() == pytest.approx(0.0, abs=0.1)
        assert out.std() == pytest.approx(1.0, abs=0.06)
        assert inside.mean() == pytest.approx(0.5, abs=0.1)  # a client has the length of the clip
        assert abs(np.corrcoef(out)[np.triu_indices(4, 1)]).max() < 0.2


def half_the_server_s_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fl.privacy.private_method, "Noise", lambda key, *rest: Halved(Noise(key, *rest)))


def twice_the_server_s_clip(patch: pytest.MonkeyPatch) -> None:
    right = fl.privacy.private_method.norm
    patch.setattr(fl.privacy.private_method, "norm", lambda values: right(values) / 2)


def one_key_for_all_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fl.privacy.private_method, "Noise", lambda key, *rest: Noise(key * torch.tensor([1, 0]), *rest))


def more_images_count_for_more(patch: pytest.MonkeyPatch) -> None:
    right = PrivateMethod._clip_upload
    patch.setattr(
        PrivateMethod, "_clip_upload", lambda self, upload: replace(right(self, upload), weight=upload.weight)
    )


def half_the_noise_in(tensor: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fl.privacy.private_method, "Noise", lambda key, *rest: Halved(Noise(key, *rest), tensor))


def twice_the_clip_in(tensor: str, patch: pytest.MonkeyPatch) -> None:
    right = PrivateMethod._clip_upload

    def clipped(self: PrivateMethod, upload: Upload) -> Upload:
        update = right(self, upload).update
        return replace(upload, update={**update, tensor: update[tensor] * 2.0}, weight=1.0)

    patch.setattr(PrivateMethod, "_clip_upload", clipped)


def a_clip_that_overlooks(tensor: str, patch: pytest.MonkeyPatch) -> None:
    right = fl.privacy.private_method.norm
    patch.setattr(
        fl.privacy.private_method, "norm", lambda values: right({n: v for n, v in values.items() if n != tensor})
    )


class Halved:
    """Noise of half the size, everywhere or in one tensor."""

    def __init__(self, noise: Noise, tensor: str = "") -> None:
        self.noise, self.tensor = noise, tensor

    def like(self, values: dict[str, Any]) -> dict[str, Any]:
        return {n: v / 2 if self.tensor in {"", n} else v for n, v in self.noise.like(values).items()}


def test_a_right_server_is_never_flagged() -> None:
    found = [canaries.audit(SERVER, [100] * 10, 4, canaries=1000, seed=seed, significance=0.05) for seed in range(3)]
    assert found[0].claimed == compute_epsilon([Charge(2.0, 1.0, 4)], 1e-5)
    assert all(0.2 * one.claimed < one.lower < one.claimed < one.ceiling for one in found)


@pytest.mark.parametrize(
    "broken",
    [
        half_the_server_s_noise,
        twice_the_server_s_clip,
        one_key_for_all_rounds,
        more_images_count_for_more,
    ],
)
def test_a_broken_server_is_flagged(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert canaries.audit(SERVER, [100] * 10, 4, canaries=1000, seed=0, significance=0.05).refuted


@one_at_a_time(
    broken=[half_the_noise_in, twice_the_clip_in, a_clip_that_overlooks],
    tensor=["body.weight", "body.bias", "head.weight"],
)
def test_a_server_that_is_broken_in_one_tensor_is_flagged(
    broken: Callable[[str, pytest.MonkeyPatch], None], tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(tensor, monkeypatch)
    assert canaries.audit(SERVER, [100] * 10, 4, canaries=1000, seed=0, significance=0.05).refuted


# ---- the defense ---------------------------------------------------------------------------------------------------
def defended(sampler: str) -> Client:
    """Two rounds of one step on all records, or on four in five of them by chance."""
    method = FedAvg(lr=0.1, steps=1, batch_size=None if sampler == "shuffle" else 800, sampler=sampler)  # type: ignore
    defense = Chain(parts=(DPSGD(clip=0.5, noise_multiplier=1.5, denominator=800.0), Prune(ratio=0.9)))
    return Client(worlds.task(), method, defense)


@pytest.mark.parametrize(("sampler", "rate"), [("shuffle", 1.0), ("poisson", 0.8)])
def test_the_defense_s_steps_show_what_they_are_charged_for(sampler: str, rate: float) -> None:
    client = defended(sampler)
    found = [canaries.audit_defense(client, [1000], 2, canaries=2000, seed=seed) for seed in range(2)]
    claimed = compute_epsilon([Charge(1.5, rate, 2)], 1e-5)
    assert all(0.3 * claimed < one.lower < one.claimed == claimed < one.ceiling for one in found)
    with pytest.MonkeyPatch.context() as patch:
        half_the_noise(patch)
        assert all(canaries.audit_defense(client, [1000], 2, canaries=2000, seed=seed).refuted for seed in range(2))


def test_a_hypernetwork_s_own_gradient_shows_less() -> None:
    method = replace(EVERY["dp-hyperfl"], noise_on="hypernetwork")  # type: ignore[call-arg]
    found = canaries.audit(method, [500], 3, canaries=400)
    assert 0 <= found.lower < found.claimed


def test_an_audit_is_a_function_of_its_seed() -> None:
    first, again, other = (canaries.audit(METHOD, [1000], 2, canaries=300, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_noise_used_twice_is_seen_in_differences() -> None:
    draw = np.random.default_rng(0)
    included = np.arange(400) % 4 < 2
    noise = draw.normal(size=(2, 400)) * 100
    read = np.concatenate([noise, noise]) + (draw.random((4, 400)) < 0.5) * included
    found = canaries.canary_scores(read, included)
    assert found.shape == (1 + 4 + 1, 400)
    assert found[0].tolist() == pytest.approx(read.sum(0).tolist())
    assert not (found[-1][~included] > 1e-9).any()
    assert (found[-1][included] > 0.5).mean() > 0.6
    assert len(canaries.canary_scores(draw.normal(size=(4, 400)), included)) == 1 + 4
    assert len(canaries.canary_scores(np.zeros((4, 400)), included)) == 1 + 4  # nothing to correlate


@pytest.mark.parametrize(
    ("method", "rounds", "message"),
    [
        (FedAvg(lr=0.1, steps=1), 1, "claims no differential privacy"),
        (DPFedAvg(noise_multiplier=0.0), 1, "no noise is added"),
        (Centaur(noise_multiplier=1.0, mode="as-published"), 1, "trained without noise"),
        (DPFedAvg(noise_multiplier=1.0), 0, "no noisy step"),
    ],
)
def test_what_cannot_be_audited_is_refused(method: Method, rounds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canaries.audit(method, [600], rounds)


def test_a_defense_that_claims_nothing_is_refused() -> None:
    silent, noiseless = (Client(worlds.task(), FedAvg(), defense) for defense in (Prune(), DPSGD(noise_multiplier=0)))
    for client, message in ((silent, "prune claims no differential privacy"), (noiseless, "no noise is added")):
        with pytest.raises(ValueError, match=message):
            canaries.audit_defense(client, [600], 1)


def test_too_few_canaries_are_refused() -> None:
    with pytest.raises(ValueError, match="8 or more"):
        canaries.audit(METHOD, [600], 1, canaries=4)
