"""A client that diverges is named, and nothing of the round stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_same

from fl.federation import Federation
from fl.finite import check_finite
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hfedf import HFedF
from fl.methods.hyperfl import HyperFL
from fl.tensors import LowRank, Term
from fl.types import Upload

WORDS = r"client 1: its update is not finite in round 1 \([\d,]+ of [\d,]+ numbers of '[\w.]+' are NaN or infinite\)"


def upload(**parts: object) -> Upload:
    return Upload(client=1, weight=2.0, **{"update": {"w": torch.ones(2, 3)}, **parts})  # type: ignore[arg-type]


def test_numbers_pass() -> None:
    """All are looked at: bases of structured updates are known from then on, and nothing else is."""
    row, base = torch.ones(1, 3), torch.ones(3, 3)
    structured = LowRank(base, 0.5, (Term(torch.tensor(2.0), row, row), Term(1.0, row, row)), (3, 3))
    whole = {"update": {"w": structured}, "extra": {"c": {"v": torch.ones(2)}}, "buffers": {"n": torch.tensor(3)}}
    known: dict[int, torch.Tensor] = {}
    check_finite([upload(), upload(**whole), upload(update={})], 0, known)
    assert list(known) == [id(base)]
    assert known[id(base)] is base
    check_finite([], 0, known)
    assert list(known) == [id(base)]
    base.fill_(torch.nan)
    check_finite([upload(**whole)], 0, known)  # what is known is not looked at again
    with pytest.raises(ValueError, match=r"9 of 9 numbers of 'w'"):
        check_finite([upload(**whole)], 0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_none_is_named_wherever_it_is(value: float) -> None:
    bad, row = torch.tensor([1.0, value, 2.0]), torch.ones(1, 3)
    factor = LowRank(None, 0.0, (Term(1.0, row, bad[None]),), (3, 3))
    weight = LowRank(None, 0.0, (Term(torch.tensor(value), row, row),), (3, 3))
    sent = ({"update": {"w": bad}}, {"update": {"w": factor}}, {"update": {"w": weight}})
    for parts in (*sent, {"extra": {"c": {"w": bad}}}, {"buffers": {"w": bad}}):
        with pytest.raises(ValueError, match=r"client 1: .* in round 7 \(1 of [13] numbers of 'w'"):
            check_finite([replace(upload(), client=0), upload(**parts)], 7)


@pytest.mark.parametrize(
    "method", [FedAvg.example(), HyperFL.example(), HFedF.example()], ids=lambda method: method.name
)
def test_a_round_with_a_client_that_diverged_leaves_no_trace(method: Method) -> None:
    run = worlds.federation(method)
    broken = replace(run.data[1].train, inputs=run.data[1].train.inputs * torch.nan)
    run = Federation(run.client, [own if i != 1 else replace(own, train=broken) for i, own in enumerate(run.data)])
    run.run_round([0, 2])
    before, clients = run.server, list(run.clients)
    with pytest.raises(ValueError, match=WORDS):
        run.run_round()
    assert_same(run.server.shared, before.shared)
    assert run.server.round == 1
    assert run.clients == clients
    run.run_round([0, 2])
