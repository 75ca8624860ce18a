"""Clients that never take part, fine-tuning before scoring, one test for all."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_same

from defenses.dp_sgd import DPSGD
from defenses.noise import Noise
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.local import Local
from fl.privacy.private_method import PrivateMethod
from fl.seeds import derive_seed
from fl.simulation.accuracy import accuracy
from fl.simulation.client_round import RoundKey, prepare, train
from fl.simulation.protocol import Protocol
from fl.simulation.scores import accuracy_tuned, scores
from fl.types import Batch, Group, Phase, Task

METHOD = FedAvg(lr=0.1, momentum=0.5, epochs=2, batch_size=2)


def five(method: Method = METHOD, **settings: object) -> Federation:
    data = [ClientData(worlds.images(4, "train", n), worlds.images(6, "test", n)) for n in range(5)]
    client = Client(worlds.task(), method)
    return Federation(client, data, protocol=Protocol(**settings))  # type: ignore[arg-type]


def test_outsiders_never_train_and_the_server_does_not_count_them() -> None:
    run = five(FedPer.example(), held_out_clients=2)
    assert (run.server.clients, list(run.participants), list(run.held_out_clients)) == (3, [0, 1, 2], [3, 4])
    before = run.clients[3]
    record = run.step(everyone=True)
    assert record.clients == (0, 1, 2)
    assert len(record.accuracy or ()) == 3
    assert all(set(run.sampled_clients(round)) <= {0, 1, 2} for round in range(20))
    assert run.clients[3] is before
    for number, seen in zip(run.held_out_clients, record.further["unseen"], strict=True):
        own = run.data[number]
        both = Batch(torch.cat([own.train.inputs, own.test.inputs]), torch.cat([own.train.labels, own.test.labels]))
        params = {**run.server.shared, **run.private_init}
        assert seen == accuracy(run.client, params, run.server.buffers, both)


@pytest.mark.parametrize("rounds", [0, 1])
def test_where_nothing_is_sent_outsiders_have_nothing_to_be_scored(rounds: int) -> None:
    run = five(Local.example(), held_out_clients=2, fine_tune_epochs=1)
    for _ in range(rounds):
        run.run_round()
    assert set(scores(run)) == {"tuned", "unseen_tuned"}
    assert set(scores(five(FedPer.example(), held_out_clients=2, fine_tune_epochs=1))) == {
        "tuned",
        "unseen_tuned",
        "unseen",
    }


def test_without_a_protocol_there_is_nothing_more_to_score() -> None:
    assert scores(five()) == {}
    assert five().record().further == {}


@pytest.mark.parametrize("tuning", ["default", "head"])
def test_tuning_is_a_round_of_the_phases_that_the_method_says_and_leaves_no_trace(tuning: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class OnlyHead(FedAvg):
        """Tunes the classifier alone (made up for this test)."""

        def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
            return (Phase(groups=(Group(prefixes=(task.head,), lr=1.0),), epochs=epochs, batch_size=2),)

    method = replace(METHOD, epochs=1) if tuning == "default" else OnlyHead(lr=0.1)
    run = five(method, fine_tune_epochs=3, held_out_clients=1)
    before, clients = dict(run.server.shared), list(run.clients)
    found = scores(run)
    assert_same(run.server.shared, before)
    assert run.clients == clients
    assert {name: len(values) for name, values in found.items()} == {"unseen": 1, "tuned": 4, "unseen_tuned": 1}
    if tuning == "default":
        for number in (0, 4):
            longer = Client(run.client.base, replace(METHOD, epochs=3))
            own = run.data[number]
            key = RoundKey(client=number, seed=derive_seed(0, "tuning"))
            done = train(prepare(longer, clients[number], run.download(number), own.train, key=key))
            params = done.result.trained(run.server.shared)
            assert accuracy_tuned(run, number) == accuracy(run.client, params, {}, own.test)


def test_what_is_tuned_stays_at_home_so_no_noise_enters() -> None:
    run = five(fine_tune_epochs=2)
    noisy = Federation(Client(worlds.task(), METHOD, Noise(std=100.0)), run.data, protocol=Protocol(fine_tune_epochs=2))
    assert scores(noisy) == scores(run)
    noisy = Federation(Client(worlds.task(), METHOD, DPSGD(clip=1e-3)), run.data, protocol=Protocol(fine_tune_epochs=2))
    assert scores(noisy) == scores(run)


@pytest.mark.parametrize("mode", ["dp-joint", "as-published", "client-level"])
@pytest.mark.parametrize("kind", [DPFedAvg, Centaur, DPHyperFL])
def test_private_methods_tune_without_clipping_and_noise(kind: type[PrivateMethod], mode: Any) -> None:
    """As the method behind does, which clients at client level train by."""
    method = replace(kind.example(), mode=mode, clip=1e-3, noise_multiplier=1e4)
    behind = replace(kind.example(), mode="client-level", noise_multiplier=0.0)
    assert scores(five(method, fine_tune_epochs=2)) == scores(five(behind, fine_tune_epochs=2))
    if kind is DPFedAvg:
        plain = FedAvg(lr=0.1, momentum=0.5, weight_decay=5e-4, epochs=2, batch_size=2)
        assert scores(five(method, fine_tune_epochs=2)) == scores(five(plain, fine_tune_epochs=2))


@pytest.mark.parametrize("method", [METHOD, FedPer.example()])
def test_one_test_for_all(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = worlds.images(20, "whole")
    run = five(method, global_test=whole, held_out_clients=1)
    run.step()
    expected = tuple(run.score(number, whole) for number in run.participants)
    count = 0
    score = Federation.score

    def counted(self: Federation, number: int, images: Batch | None = None, *, adapted: bool = True) -> float:
        nonlocal count
        count += 1
        return score(self, number, images, adapted=adapted)

    monkeypatch.setattr(Federation, "score", counted)
    assert scores(run)["global"] == expected
    assert count - 1 == (1 if method is METHOD else 4)


def test_bad_protocols_say_so() -> None:
    with pytest.raises(ValueError, match="expected fewer held-out clients than the 5 clients, got 5"):
        five(held_out_clients=5)
    with pytest.raises(ValueError, match="expected fine_tune_epochs >= 0, got -1"):
        Protocol(fine_tune_epochs=-1)
