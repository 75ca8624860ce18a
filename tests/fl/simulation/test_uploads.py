"""Uploads joined as they come: the same round up to rounding, in bounded memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same

import fl.simulation.uploads
from fl.client import Client
from fl.engines.sequential import Engine
from fl.federation import ClientData, Federation
from fl.method import Method, mean
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.fedavg import FedAvg
from fl.methods.fedgma import FedGMA
from fl.methods.hyperfl import HyperFL
from fl.simulation.client_round import Round
from fl.simulation.uploads import Uploads, merge_uploads
from fl.tensors import LowRank, Term, dense
from fl.types import Trace, Upload

BASE = torch.arange(24.0, dtype=torch.float64).view(6, 4)


def federation(method: Method) -> Federation:
    """Four clients of 3 to 6 images."""
    data = [ClientData(worlds.images(n, "train"), worlds.images(2, "test", n)) for n in (3, 4, 5, 6)]
    return Federation(Client(worlds.task(batch_norm=True), method), data)


@pytest.mark.parametrize(
    "method", [FedAvg.example(), replace(HyperFL.example(), train_mode=True)], ids=lambda method: method.name
)
def test_a_round_whose_uploads_are_joined_is_the_same_round(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, bounded = federation(method), federation(method)
    whole.step(evaluate=False)
    monkeypatch.setattr(fl.simulation.uploads, "MAX_SEPARATE_BYTES", 0)
    bounded.step(evaluate=False)
    assert_near(bounded.server.shared, whole.server.shared, 1e-12)
    assert any(value.is_floating_point() for value in whole.server.buffers.values())
    assert_near(bounded.server.buffers, whole.server.buffers, 1e-12)
    for mine, other in zip(bounded.clients, whole.clients, strict=True):
        assert_same(mine.private, other.private)


def sent(client: int) -> Upload:
    """An update of 2 outer products over a matrix of 6 x 4, of a client with that many images and one more."""
    left, right = (torch.randn(2, n, generator=torch.Generator().manual_seed(client)).double() for n in (6, 4))
    update = LowRank(BASE, 0.25, (Term(1.0, left, right),), (6, 4))
    return Upload(client, client + 1.0, {"w": update})


def test_joined_uploads_weigh_as_much_and_take_no_more_room_than_a_matrix() -> None:
    uploads = [sent(i) for i in range(3)]
    one = merge_uploads(uploads[:1]).update["w"]
    assert isinstance(one, LowRank)
    three = merge_uploads(uploads)
    assert isinstance(three.update["w"], torch.Tensor)
    assert three.weight == 6
    expected = sum(dense(upload.update["w"]) * upload.weight / 6 for upload in uploads)
    assert torch.allclose(three.update["w"], expected, atol=1e-12)


def test_one_dense_value_among_structured_ones_makes_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a hundred clients' matrices made by itself would take longer than their training."""
    uploads = [merge_uploads([sent(i) for i in range(3)]), *(sent(i) for i in range(3, 9))]
    made: list[LowRank] = []
    plain = LowRank.dense
    monkeypatch.setattr(LowRank, "dense", lambda value: made.append(value) or plain(value))
    whole = mean(uploads, lambda upload: upload.update["w"])
    assert len(made) == 1
    expected = sum(plain(sent(i).update["w"]) * (i + 1) / 45 for i in range(9))  # type: ignore[arg-type]
    assert torch.allclose(dense(whole), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("room", "method", "kept"),
    [
        (0, FedAvg(), 1),
        (0, FedGMA(), 3),
        (2**20, FedAvg(), 3),
        (0, DPFedAvg.example(), 1),
        (0, replace(DPFedAvg.example(), mode="client-level", rate=None, local_steps=None), 3),
    ],
)
def test_only_means_are_joined_and_only_for_want_of_room(
    room: int, method: Method, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fl.simulation.uploads, "MAX_SEPARATE_BYTES", room)
    uploads = Uploads(method)
    for client in range(3):
        uploads.add(Upload(client, 1.0, {"w": torch.ones(3)}))
    assert len(uploads.kept) == kept
    assert sum(upload.weight for upload in uploads.kept) == 3


class Watched(Engine):
    """Counts the rounds whose images are still in memory when the next client is done."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Trace]] = []
        self.most = 0

    def train(self, run: Federation, numbers: Sequence[int], *, evaluate: bool = False) -> Iterator[Round]:
        for done in super().train(run, numbers, evaluate=evaluate):
            self.seen.append(weakref.ref(done.trace))
            self.most = max(self.most, sum(trace() is not None for trace in self.seen))
            yield done


def test_a_step_drops_what_clients_fed() -> None:
    run = federation(FedAvg.example())
    run._engine = watched = Watched()
    run.step(evaluate=False)
    assert len(watched.seen) == 4
    assert watched.most <= 2
