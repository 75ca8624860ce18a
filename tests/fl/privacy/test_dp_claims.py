"""What methods with differential privacy claim, and what they refuse to claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import worlds

from defenses.mixup import Mixup
from fl.defense import Defense, record_reader
from fl.method import methods
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.fedavg import FedAvg
from fl.methods.ppsgd import PPSGD
from fl.privacy.accounting import Charge, compute_epsilon
from fl.settings import FormerNameWarning


def test_the_statement_is_the_accountant_s() -> None:
    method = DPFedAvg(noise_multiplier=1.1, epochs=1, rounds=3, images=60, batch_size=6)
    said = method.privacy([60, 60, 80], rounds=2)
    assert (said.unit, said.adjacency, said.trusted, said.steps) == ("record", "add-remove", "nobody else", 20)
    assert said.epsilon == compute_epsilon([Charge(1.1, 0.1, 20)], 1e-5)
    assert said.epsilon_rdp == compute_epsilon([Charge(1.1, 0.1, 20)], 1e-5, "rdp")
    assert method.privacy([60], rounds=9).steps == 90  # what has left a client is charged, whatever was planned
    assert "record-level" in said.sentence()
    assert "no guarantee for a real release" in said.sentence()
    assert "no guarantee" not in replace(method, noise_source="secure").privacy([60], 1).sentence()


def test_the_smallest_client_counts_where_sizes_differ() -> None:
    method = DPFedAvg(noise_multiplier=2.0, images=None, batch_size=10, epochs=1, rounds=5)
    said = method.privacy([100, 50, 400], rounds=5)
    assert (said.rate, said.steps) == (0.2, 25)
    small = DPFedAvg(noise_multiplier=2.0, images=100, batch_size=10, epochs=1, rounds=5)
    assert small.privacy([100, 10], rounds=5).rate == 1.0  # it feeds all it has in every step


def test_only_secret_numbers_of_images_may_be_one_more_or_less() -> None:
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "batch_size": 10, "steps": 1}
    public, own = DPFedAvg(images=100, **settings), DPFedAvg(images=None, **settings)
    assert public.privacy([100, 12], 1).adjacency == "add-remove"
    assert public.privacy([100, 11], 1).adjacency == "zero-out"  # with one gone the other feeds all in every step
    assert public.privacy([100, 10], 1).adjacency == "zero-out"  # all that the smaller one has is in every step
    assert own.privacy([100], 1).adjacency == "zero-out"  # its rate follows from its number
    assert [method.aggregation_weight(60) for method in (public, own, replace(public, sampler="shuffle"))] == [
        100.0,
        60.0,
        60.0,
    ]
    assert FedAvg().aggregation_weight(60) == 60.0


def test_shuffled_batches_claim_nothing_from_sampling() -> None:
    method = DPFedAvg(noise_multiplier=11.62, sampler="shuffle", images=1000, batch_size=100)
    said = method.privacy([1000], rounds=200)
    assert (said.adjacency, said.rate, said.steps) == ("zero-out", 1.0, 1000)
    assert said.epsilon == pytest.approx(14.7, abs=0.05)


@pytest.mark.parametrize("kind", [Centaur, PPSGD, DPHyperFL])
def test_no_epsilon_as_published(kind: Any) -> None:
    said = kind(mode="as-published", noise_multiplier=10.0).privacy([600], rounds=200)
    assert said.epsilon is None
    assert said.epsilon_rdp is None
    assert "private weights are trained without noise" in said.sentence()


def test_no_epsilon_without_noise_or_under_a_defense_that_looks_beside() -> None:
    assert "no noise" in DPFedAvg(noise_multiplier=0.0).privacy([600], rounds=1).reason
    assert "mixup" in DPFedAvg(noise_multiplier=1.0).privacy([600], 1, record_reader=record_reader(Mixup())).reason
    assert DPFedAvg(noise_multiplier=1.0).privacy([600], 1, record_reader=record_reader(Defense())).epsilon is not None
    assert methods.build("fedavg").privacy([600], rounds=1) is None


def test_client_level_trusts_the_server() -> None:
    method = DPFedAvg(mode="client-level", epsilon=4.0, clip=1.0, rounds=100)
    said = method.privacy([10, 600], rounds=100)
    assert (said.unit, said.adjacency, said.rate, said.steps) == ("client", "zero-out", 1.0, 100)
    assert "server" in said.trusted
    assert 3.99 < (said.epsilon or 0) <= 4.0


def test_the_published_noise() -> None:
    emnist = DPFedAvg(images=1000, batch_size=100, accountant="rdp")
    cifar = DPFedAvg(accountant="rdp")
    assert emnist.sigma == pytest.approx(11.62, abs=0.02)
    assert cifar.sigma == pytest.approx(10.62, abs=0.02)
    assert Centaur(mode="as-published", accountant="rdp").sigma == cifar.sigma
    assert Centaur(images=1000, batch_size=100, accountant="rdp").sigma == pytest.approx(12.73, abs=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": None}, "neither"),
        ({"clip": 0.0}, "clip: expected a number > 0, got"),
        ({"delta": 1.0}, r"delta: expected a number in \(0, 1\), got"),
        ({"images": None}, "a public number"),
        ({"noise_multiplier": -1.0}, "noise_multiplier: expected a number >= 0 or null, got"),
        ({"rate": 1.5}, r"rate: expected a number in \(0, 1\] or null, got"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPFedAvg(**settings)


def test_running_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match="without batch statistics"):
        worlds.federation(DPFedAvg.example(), task_=worlds.task(batch_norm=True), rounds=0)


@pytest.mark.parametrize(("noise_on", "given"), [("extractor", True), ("hypernetwork", False)])
def test_as_published_it_is_said_where_the_update_gives_the_embedding_away(noise_on: Any, given: bool) -> None:
    method = DPHyperFL(mode="as-published", noise_multiplier=10.0, noise_on=noise_on)
    assert ("gives the embedding away" in method.privacy([600], rounds=200).reason) == given
    assert "embedding" not in replace(method, mode="dp-joint").privacy([600], rounds=1).reason


def test_the_former_name_of_where_noise_comes_from_is_read() -> None:
    with pytest.warns(FormerNameWarning) as caught:
        method = methods.build({"name": "dp-fedavg", "profile": "release"})
    assert {str(w.message) for w in caught} == {"'profile' is now 'noise_source'", "'release' is now 'secure'"}
    assert method == DPFedAvg(noise_source="secure")
    assert methods.spec(method, oldest_names=True)["profile"] == "release"
