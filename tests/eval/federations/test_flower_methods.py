"""A round of a method in Flower is a round of our own federation."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import Result, Strategy
from support.flower_grid import RUN, LocalGrid

import defenses
from eval.federations import flower
from eval.federations.flower_methods import client_app, server_app
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method, methods
from fl.methods.fedavg import FedAvg
from fl.tensors import dense
from fl.types import Batch, Task

SEED, CLIENTS, ROUNDS = 3, 3, 2
SAME = ("ditto", "fedavg", "fedbabu", "fedbn", "fedper", "fedprox", "fedrep", "fedsam", "hyperfl", "moon", "pfedme")
EXAMPLES = dict(methods.examples())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def make_task() -> Task:
    """A network in float64 with batch norm, whose buffers are floats and integers."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return Task(net, (3, 2, 2), 3, head="4.")


def make_data(client: int) -> ClientData:
    generator = torch.Generator().manual_seed(client)
    images = torch.rand(6 + 2 * client, 3, 2, 2, generator=generator, dtype=torch.float64)
    batch = Batch(images, torch.randint(3, (len(images),), generator=generator))
    return ClientData(batch, batch)


def run_in_flower(method: Method, defense: Defense | None = None) -> dict[str, Tensor]:
    """What the server holds after all rounds."""
    results: list[Result] = []
    grid = LocalGrid(client_app(method, make_task(), make_data, defense=defense, seed=SEED), CLIENTS)
    serve = server_app(method, make_task(), clients=CLIENTS, rounds=ROUNDS, seed=SEED, finish=results.append)
    serve(grid, Context(RUN, 1, {}, RecordDict(), {}))
    return dict(results[0].arrays.to_torch_state_dict())


def run_here(method: Method, defense: Defense | None = None) -> dict[str, Tensor]:
    federation = Federation(
        Client(make_task(), method, defense or Defense()), [make_data(i) for i in range(CLIENTS)], SEED
    )
    for _ in range(ROUNDS):
        federation.run_round()
    buffers = {name: value for name, value in federation.server.buffers.items() if value.is_floating_point()}
    return {**{name: dense(value) for name, value in federation.server.shared.items()}, **buffers}


@pytest.mark.parametrize("name", SAME)
def test_rounds_are_the_same(name):
    found, expected = run_in_flower(EXAMPLES[name]), run_here(EXAMPLES[name])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_rounds_differ_by_the_seed():
    """That they are the same is no matter of course."""
    other = {name: value + 1e-6 for name, value in run_here(EXAMPLES["fedavg"]).items()}
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run_in_flower(EXAMPLES["fedavg"]), other, rtol=1e-10, atol=1e-12)


def test_a_defense_draws_the_same_noise():
    defense = defenses.build({"name": "noise", "std": 0.5})
    found, expected = (run(EXAMPLES["fedavg"], defense) for run in (run_in_flower, run_here))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "why"), [("scaffold", "single updates"), ("dp-fedavg", "keeps account"), ("pfedhn", "single updates")]
)
def test_methods_of_other_servers_are_refused(name, why):
    with pytest.raises(ValueError, match=why):
        client_app(EXAMPLES[name], make_task(), make_data)
    with pytest.raises(ValueError, match=why):
        server_app(EXAMPLES[name], make_task(), clients=CLIENTS, rounds=1)


def test_a_node_without_a_number_is_told_how_to_get_one():
    grid = LocalGrid(client_app(FedAvg(), make_task(), make_data), CLIENTS)
    for context in grid.contexts.values():
        context.node_config = {}
    with pytest.raises(ValueError, match="--node-config 'partition-id=0'"):
        server_app(FedAvg(), make_task(), clients=CLIENTS, rounds=1)(grid, Context(RUN, 1, {}, RecordDict(), {}))


def test_what_a_client_keeps_is_not_sent():
    grid = LocalGrid(client_app(EXAMPLES["fedper"], make_task(), make_data, seed=SEED), CLIENTS)
    serve = server_app(EXAMPLES["fedper"], make_task(), clients=CLIENTS, rounds=1, seed=SEED)
    serve(grid, Context(RUN, 1, {}, RecordDict(), {}))
    assert all("4.weight" not in reply.content["arrays"] for reply in grid.replies)
    assert all("private/4.weight" in context.state["hyperleak-client"] for context in grid.contexts.values())


def test_an_audit_goes_around_the_strategy(tmp_path):
    kinds: list[type[Strategy]] = []

    def wrap(strategy: Strategy) -> Strategy:
        kinds.append(type(strategy))
        return strategy

    mod = flower.record_mod(tmp_path)
    grid = LocalGrid(client_app(FedAvg(batch_size=2), make_task(), make_data, mods=[mod]), CLIENTS)
    serve = server_app(FedAvg(batch_size=2), make_task(), clients=CLIENTS, rounds=1, wrap=wrap)
    serve(grid, Context(RUN, 1, {}, RecordDict(), {}))
    assert [kind.__name__ for kind in kinds] == ["MethodStrategy"]
    assert len(list(tmp_path.rglob("*.npz"))) == CLIENTS
