from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_near
from torch import Tensor

from fl.client import Client
from fl.engines import EngineName
from fl.engines.factored import engine as factored
from fl.engines.factored.merging import merge_outer_products
from fl.federation import ClientData, Federation
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import TRUNK_BIAS, Hypernetwork
from fl.tensors import LowRank
from fl.types import Phase, Task


def products(*speaking: list[int], sums: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outer products whose right side speaks in the given ones of 6 units, and weights of some sums."""
    draw = torch.Generator().manual_seed(0)
    right = torch.zeros(len(speaking), 6, dtype=torch.float64)
    for row, units in zip(right, speaking, strict=True):
        row[units] = torch.rand(len(units), generator=draw).double() + 0.1
    left, weights = (torch.randn(n, len(right), generator=draw).double() for n in (9, sums))
    return left.mT.contiguous(), right, weights


@pytest.mark.parametrize(
    ("speaking", "sums", "first", "after"),
    [
        ([[0, 2]] * 9, 1, 0, 2),
        ([[0, 2]] * 9, 2, 0, 4),
        ([[0, 2]] * 8, 2, 0, 4),
        ([[0, 2]] * 7, 2, None, None),  # more than half
        ([[0, 1, 2, 3, 4, 5], *[[2]] * 7], 2, 1, 3),  # one that fell silent late stays as it is
        ([*[[2]] * 7, [0, 1, 2, 3, 4, 5]], 2, None, None),
        ([[0], [1], [0, 1], [], [1], [0]], 1, 0, 2),
        ([[1], [], [], []], 2, 1, 1),
        ([[]] * 3, 2, 0, 0),
        ([], 2, None, None),
    ],
)
def test_merged_sums_are_the_sums(speaking: list[list[int]], sums: int, first: int | None, after: int | None) -> None:
    left, right, weights = products(*speaking, sums=sums)
    found = merge_outer_products(left, right, weights)
    if found is None:
        assert first is None
        return
    assert (found.first, found.first + len(found.left)) == (first, after)
    kept = slice(None, found.first)
    lefts, rights = torch.cat([left[kept], found.left]), torch.cat([right[kept], found.right])
    for before, weight in zip(weights, torch.cat([weights[:, kept], found.weights], 1), strict=True):
        assert_near({"sum": (lefts.mT * weight) @ rights}, {"sum": (left.mT * before) @ right}, 1e-14)


class Nesterov(HyperFL):
    """Two phases that move the heads, the first without momentum, the second with Nesterov's."""

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        head, main = super().phases(task, round)
        return (head, replace(main, momentum=0.0), replace(main, nesterov=True))


SETTINGS = {"lr": 0.05, "epochs": 6, "batch_size": 2, "max_norm": 0.5, "weight_decay": 1e-2}
HYPERNETWORK = Hypernetwork(embedding=4, hidden=32, init="scaled")


def federation(method: HyperFL, engine: EngineName) -> Federation:
    """Two clients of 4 and 6 images, in whose hypernetwork two units speak."""
    data = [ClientData(worlds.images(n, "train"), worlds.images(4, "test", n)) for n in (4, 6)]
    run = Federation(Client(worlds.task(), method), data, engine=engine)
    bias = torch.full((32,), -10.0, dtype=torch.float64)
    bias[[3, 8]] = 5.0
    run.server = replace(run.server, shared={**run.server.shared, TRUNK_BIAS: bias})
    return run


@pytest.mark.parametrize(
    "method",
    [
        HyperFL(**SETTINGS, parametrization=HYPERNETWORK),
        HyperFL(**SETTINGS, momentum=0.0, parametrization=HYPERNETWORK),
        HyperFL(**SETTINGS, parametrization=replace(HYPERNETWORK, bias=False)),
        Nesterov(**SETTINGS, parametrization=HYPERNETWORK),
    ],
    ids=["momentum", "no momentum", "no biases", "nesterov"],
)
def test_a_round_in_which_few_units_speak_equals_the_loop(method: HyperFL, monkeypatch: pytest.MonkeyPatch) -> None:
    during = set()

    def watched(*sums: Tensor) -> object:
        found = merge_outer_products(*sums)
        during.update({len(sums[2])} if found else set())
        return found

    monkeypatch.setattr(factored, "merge_outer_products", watched)
    loop, factors = (federation(method, engine) for engine in ("loop", "factored"))
    for _ in range(2):
        for mine, other in zip(factors.run_round(), loop.run_round(), strict=True):
            assert_near(mine.upload.update, other.upload.update, 1e-12)
            assert_near(mine.state.private, other.state.private, 1e-12)
            heads = [value for value in mine.upload.update.values() if isinstance(value, LowRank)]
            steps = sum(map(len, mine.trace.order[1:]))
            assert all(len(value.terms[0].left) <= steps // 2 for value in heads)
    assert during == ({1, 2} if method.momentum else {1})  # weights and momentum in training, weights alone after it
