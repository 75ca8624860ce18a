"""What every method, defense and attack keeps to on a GPU: the numbers of the CPU, up to the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, tensors
from support.matrix import COLUMNS, ROWS, cells, shares

from attacks import NotApplicable, Reconstruction, attacks
from attacks.base import Attack, Result
from fl.federation import Federation

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


def answers(attack: Attack, row: str) -> list[Result]:
    probe = ROWS[row]
    views = (worlds.victim(probe.method, probe.defense, probe.task, device) for device in ("cpu", "cuda"))
    return [attack(view, seed=3) for view in views]


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
