"""What leaves a client, and what it keeps, follows from its noisy releases alone: no record enters it beside them."""

from __future__ import annotations

import pytest
import torch
from support import worlds
from support.compare import assert_same
from support.private import ALL, EVERY, as_published
from torch import Tensor

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.privacy.private_method import PrivateMethod
from fl.tensors import Tensors, dense
from fl.types import Batch


class Told:
    """Puts given releases in the place of noisy sums, the same for whatever was summed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, sums: dict[str, Tensor], std: float, generator: object) -> dict[str, Tensor]:
        self.count += 1
        draw = torch.Generator().manual_seed(self.count)
        return {n: torch.randn(v.shape, generator=draw, dtype=v.dtype) for n, v in sums.items()}


def after(method: PrivateMethod, data: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensors, Tensors]:
    """The second update of a client, and what it keeps then, where all its releases are given."""
    monkeypatch.setattr("fl.privacy.dp_sgd._add_noise", Told())
    run = Federation(Client(worlds.task(), method), [ClientData(data, data)])
    run.run_round()
    run.run_round()
    done = run.train(0)
    sent = {name: dense(value) for name, value in done.upload.update.items()}
    return {**sent}, {**run.clients[0].private}


@ALL
def test_other_records_change_nothing_where_the_releases_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (after(EVERY[name], worlds.images(4, kind), monkeypatch) for kind in ("these", "those"))
    for mine, theirs in zip(one, other, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("name", ["dp-hyperfl"])
def test_as_published_the_update_tells_of_an_embedding_without_noise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (after(as_published(EVERY[name]), worlds.images(4, kind), monkeypatch) for kind in ("these", "those"))
    for mine, theirs in zip(one, other, strict=True):
        assert any(not torch.equal(dense(mine[n]), dense(theirs[n])) for n in mine)
