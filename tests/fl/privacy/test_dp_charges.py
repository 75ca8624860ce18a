"""What is charged is what is executed: real rounds of random schedules, record by record, and budgets that stop."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support import worlds

import fl.privacy.dp_sgd
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.ppsgd import PPSGD
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.privacy.accounting import Charge, compute_epsilon
from fl.privacy.private_method import NOISE_KEY, PrivateMethod
from fl.types import Order

KINDS: list[type[PrivateMethod]] = [DPFedAvg, Centaur, PPSGD, DPHyperFL]


def drawn(source: random.Random, most: int = 200) -> tuple[type[PrivateMethod], dict[str, Any], int]:
    """A random method, schedule and number of images."""
    kind = source.choice(KINDS)
    settings: dict[str, Any] = {
        "images": source.choice([None, source.randint(1, most)]),
        "batch_size": source.choice([None, source.randint(1, max(most * 3 // 10, 2))]),
        "sampler": source.choice(["poisson", "poisson", "shuffle", "sequential"]),
    }
    if source.random() < 0.5:
        settings |= {"epochs": source.randint(1, 4)}
    else:
        settings |= {"steps": source.randint(1, 9), "epochs": None}
    if kind in (Centaur, DPHyperFL):
        settings["head_epochs"] = source.randint(0, 2)
    if kind is DPHyperFL:
        settings["parametrization"] = Hypernetwork.example()
    return kind, settings, source.randint(1, most)


def federation_of(method: PrivateMethod, n: int) -> Federation:
    """One client of `n` images."""
    data = worlds.images(n)
    return Federation(Client(worlds.task(), method), [ClientData(data, data)], seed=n)


def most_steps(order: Order) -> int:
    """Of one record, in the steps of a round."""
    met = Counter(i for steps in order for (index,) in steps for i in index.tolist())
    return max(met.values(), default=0)


def test_no_record_is_in_more_steps_than_are_charged() -> None:
    source, inside, expected, spread = random.Random(0), 0.0, 0.0, 0.0
    for _ in range(200):
        kind, settings, n = drawn(source)
        method = kind(noise_multiplier=0.0, **settings)  # of which no epsilon need be found
        start = federation_of(method, n).start(0)
        said = method.privacy([n], 1)
        order, steps = start.trace.order, sum(map(len, start.trace.order))
        keys = [tuple(draws[NOISE_KEY].tolist()) for phase in start.trace.draws for draws in phase]
        assert len(keys) == len(set(keys)) == steps  # one noise each
        if settings["sampler"] == "poisson":
            assert steps == said.steps
            fed = sum(len(index) for phase in order for (index,) in phase)
            assert said.rate < 1 or fed == steps * n
            inside, expected = inside + fed, expected + said.rate * steps * n
            spread += said.rate * (1 - said.rate) * steps * n
        else:
            assert said.rate == 1
            assert most_steps(order) == said.steps, (kind, settings, n)  # exact, not a bound
    assert abs(inside - expected) < 5 * spread**0.5


def test_every_step_of_real_training_meets_noise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source, releases, right = random.Random(1), list[float](), fl.privacy.dp_sgd._add_noise

    def noisy(sums: Any, std: float, generator: Any) -> Any:
        assert generator is not None
        releases.append(std)
        return right(sums, std, generator)

    monkeypatch.setattr(fl.privacy.dp_sgd, "_add_noise", noisy)
    for _ in range(20):
        kind, settings, n = drawn(source, most=8)
        method = kind(noise_multiplier=1.5, **settings)
        releases.clear()
        done = federation_of(method, n).train(0)
        assert releases == [1.5 * method.clip] * sum(map(len, done.trace.order))


def test_steps_that_go_round_few_images_are_charged_as_often_as_they_meet_them() -> None:
    # 17 of 80 images a step are four batches of one pass; a client of 12 feeds all it has four times
    method = DPFedAvg(noise_multiplier=5.0, images=80, batch_size=17, steps=4, epochs=None, sampler="shuffle")
    assert [method.privacy([n], 10).steps for n in (80, 52, 51, 35, 34, 18, 17, 12, 1)] == [
        *[10, 10, 20, 20, 20, 20, 40, 40, 40]
    ]
    assert method.privacy([80, 12], 10).steps == 40


def test_a_budget_holds_for_a_client_of_any_size() -> None:
    source = random.Random(2)
    for _ in range(200):
        kind, settings, n = drawn(source)
        settings |= {"images": settings["images"] or 100, "sampler": source.choice(["shuffle", "sequential"])}
        method = kind(epsilon=source.uniform(0.5, 8), rounds=source.randint(1, 5), **settings)
        run = federation_of(method, n)
        server, executed = run.server, 0
        while not method.exclusion_reason(server, 0):
            server, executed = (
                method.begin_round(server, [0], run.client.task),
                executed + most_steps(run.start(0).trace.order),
            )
        epsilon = method.epsilon or 0.0
        assert compute_epsilon([Charge(method.sigma, 1.0, executed)], method.delta) <= epsilon
        if settings.get("epochs"):  # these meet every client as often: another round would be too much
            more = executed * (method.rounds + 1) // method.rounds
            assert compute_epsilon([Charge(method.sigma, 1.0, more)], method.delta) > epsilon


def test_a_budget_of_steps_by_chance_is_spent_to_the_end() -> None:
    source = random.Random(3)
    for _ in range(2):  # seconds each
        kind, settings, _ = drawn(source)
        settings |= {"images": source.randint(50, 200), "batch_size": source.randint(5, 40), "sampler": "poisson"}
        method = kind(epsilon=source.uniform(0.5, 8), rounds=source.randint(1, 5), accountant="rdp", **settings)
        run = federation_of(method, 300)
        steps = sum(map(len, run.start(0).trace.order)) * method.rounds
        rate = settings["batch_size"] / settings["images"]
        epsilon = method.epsilon or 0.0
        assert compute_epsilon([Charge(method.sigma, rate, steps)], method.delta, "rdp") <= epsilon
        more = steps * (method.rounds + 1) // method.rounds
        assert compute_epsilon([Charge(method.sigma, rate, more)], method.delta, "rdp") > epsilon


def test_a_round_that_is_observed_takes_no_more_steps_than_training() -> None:
    method = DPFedAvg(epsilon=4.0, images=80, batch_size=17, epochs=3, sampler="shuffle")
    assert method.local_steps == 3
    with pytest.raises(ValueError, match="local_steps of at most 3"):
        DPFedAvg(epsilon=4.0, images=80, batch_size=1, steps=4, epochs=None, sampler="shuffle", local_steps=3)
    assert DPFedAvg(epsilon=4.0, images=80, steps=4, epochs=None, sampler="shuffle").local_steps == 4
    server = DPFedAvg(mode="client-level", epsilon=4.0, rounds=10)  # whose noise no local step meets
    assert replace(server, steps=30, epochs=None).sigma == server.sigma
