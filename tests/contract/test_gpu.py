"""What every method, defence and attack keeps to on a GPU: the numbers of the CPU, up to the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, tensors
from support.matrix import COLUMNS, ROWS, cells, shares

from attacks import NotApplicable, Reconstruction, attacks
from attacks.base import Attack, Result
from fl.client import Client
from fl.federation import Federation
from fl.simulate import observe
from fl.types import ServerView

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ATTACKS = dict(attacks.examples())


def federation(row: str, column: str, device: str) -> Federation:
    probe = ROWS[row]
    defense = probe.defense if column == "none" else COLUMNS[column]
    return worlds.federation(probe.method, defense, probe.task, device=device)


def onto_cpu(values: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, values)


@pytest.mark.parametrize(("row", "column"), cells())
def test_a_round_and_a_view_are_those_of_the_cpu(row: str, column: str) -> None:
    runs = [federation(row, column, device) for device in ("cpu", "cuda")]
    cpu, cuda = ({**run.server.shared, **run.server.buffers} for run in runs)
    assert all(value.is_cuda for value in tensors(cuda))
    assert_near(onto_cpu(cuda), cpu, 1e-8)
    views = [run.observe(1)[0] for run in runs] if shares(row) else []
    if views:
        assert_near(onto_cpu(views[1].update), views[0].update, 1e-8)
        assert all(value.is_cuda for value in tensors(views[1].update))
    for tuned in (False, True):
        assert list(runs[1].accuracy(tuned=tuned)) == list(runs[0].accuracy(tuned=tuned))


def victim(row: str, device: str) -> ServerView:
    """One step on a single image in the second round."""
    run = federation(row, "none", device)
    client = Client(run.client.base, worlds.one_step(run.client.method), run.client.defense)
    image = worlds.moved(worlds.images(1, "victim"), device)
    return observe(client, run.clients[1], run.download(1), image, round=1)[0]


def answers(attack: Attack, row: str) -> list[Result]:
    return [attack(victim(row, device), seed=3) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("row", ["fedavg", "hyperfl", "hyperfednet"])
@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_finds_what_it_finds_on_the_cpu(name: str, row: str) -> None:
    cpu, cuda = answers(ATTACKS[name], row)
    assert type(cuda) is type(cpu)
    if isinstance(cpu, NotApplicable):
        assert cuda == cpu
        return
    assert isinstance(cpu, Reconstruction)
    assert isinstance(cuda, Reconstruction)
    assert (cuda.inputs is None) == (cpu.inputs is None)
    if cpu.inputs is not None and cuda.inputs is not None:
        assert cuda.inputs.is_cuda
        assert (cuda.inputs.cpu() - cpu.inputs).abs().mean() < 1e-3
    assert cuda.verified == cpu.verified
