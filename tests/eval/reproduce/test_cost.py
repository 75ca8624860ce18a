"""Estimates: counts that can be checked by hand, and never zero for what is not known."""

from dataclasses import dataclass, replace

import pytest
from support.runs import tiny
from support.tiny import Registered
from torch import nn

from eval.reproduce import cost
from eval.reproduce.cost import client_images, experiment_cost
from eval.reproduce.item_status import describe_seconds
from fl.models import Network

CALM = ("observe.method={steps: 1}", "method=[{name: fedavg, lr: 0.1, batch_size: 6, epochs: 5}]", "attack=[]")


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


@dataclass(frozen=True, kw_only=True)
class Odd(Network):
    """A network that can't be built here."""

    input_shape: tuple[int, int, int] = (1, 8, 8)

    def body(self) -> nn.Sequential:
        raise OSError("its weights are not there")


def test_what_a_network_costs_that_cannot_be_built_is_not_known(monkeypatch):
    assert cost.network_work(Odd()) is None
    monkeypatch.setattr(cost, "network_work", lambda _model: None)
    assert experiment_cost(tiny(*CALM)).seconds is None
    assert describe_seconds(None) == "unknown"


def test_cost_grows_with_rounds_seeds_and_attacks():
    one = experiment_cost(tiny(*CALM, "federation.rounds=100"))
    assert (one.trainings, one.attacks) == (1, 0)
    twice = experiment_cost(tiny(*CALM, "federation.rounds=200"))
    assert twice.seconds == pytest.approx(2 * one.seconds, rel=0.1)
    seeds = experiment_cost(tiny(*CALM, "federation.rounds=100", "seeds=[0, 1, 2]", "attack=analytic"))
    assert (seeds.trainings, seeds.attacks) == (3, 3)
    assert seeds.seconds > 3 * one.seconds
    assert experiment_cost(tiny(*CALM, "attack=guess")).seconds is None  # of somebody's own attack nobody can tell
    searched = experiment_cost(tiny(*CALM, "federation.rounds=100", "attack={name: ig, iterations: 4000}"))
    assert searched.seconds - one.seconds > 4000 * 2 * 1e-3  # two updates, a millisecond a step at least


def test_images_of_a_client_come_from_partition_or_published_size():
    assert client_images(tiny(*CALM)).train == 12
    whole = tiny(*CALM, "task.dataset=mnist", "federation.partition={name: dirichlet, clients: 12}")
    found = client_images(replace(whole, federation=replace(whole.federation, held_out_clients=2)))
    assert (found.clients, found.held_out, found.train) == (10, 2, 5000)
    pooled = tiny(*CALM, "task.dataset={name: pooled, source: mnist}", "federation.partition={name: iid, clients: 10}")
    assert client_images(pooled).train == pytest.approx(5600)
    domains = tiny(*CALM, "task.dataset=pacs", "federation.partition={name: domains, leave_out: photo}")
    assert client_images(domains).train == pytest.approx(7_993 / 4)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (40, "40 s"), (200, "3 min"), (7200, "2 h"), (40 * 3600, "40 h"), (4e5, "5 days")],
)
def test_durations_in_words(seconds, words):
    assert describe_seconds(seconds) == words
