"""A client that diverges is named, and nothing of the round stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support import worlds
from support.compare import assert_same
from torch import Tensor

from fl.defense import Defense
from fl.federation import Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hfedf import HFedF
from fl.methods.hyperfl import HyperFL
from fl.simulation.nonfinite_updates import check_finite
from fl.tensors import LowRank, Tensors, Term
from fl.types import Upload

WORDS = r"client 1: its update is not finite in round 1 \([\d,]+ of [\d,]+ numbers of '[\w.]+' are NaN or infinite\)"


def upload(**parts: object) -> Upload:
    return Upload(client=1, weight=2.0, **{"update": {"w": torch.ones(2, 3)}, **parts})  # type: ignore[arg-type]


def test_finite_updates_pass_and_bases_are_looked_at_once() -> None:
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


@dataclass(frozen=True, kw_only=True)
class Weighted(FedAvg):
    """Counts clients by what it is told."""

    counts: object = 1.0

    def aggregation_weight(self, images: int) -> float:
        return self.counts  # type: ignore[return-value]


@pytest.mark.parametrize("weight", [np.int64(2), np.float32(2)], ids=["int64", "float32"])
def test_a_weight_of_numpy_is_a_number(weight: object) -> None:
    run = worlds.federation(Weighted(steps=1, counts=weight), rounds=0)
    run.run_round()
    assert run.server.round == 1


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, -1.0, 3e38, True, "4", None])
def test_a_weight_that_is_none_is_named(weight: object) -> None:
    run = worlds.federation(Weighted(steps=1, counts=weight), rounds=0)
    with pytest.raises(ValueError, match="client 0: expected a weight in the mean from 0"):
        run.run_round()
    assert run.server.round == 0


@dataclass(frozen=True, kw_only=True)
class Sends(Defense):
    """Sends something else."""

    name: ClassVar[str] = "sends"  # type: ignore[misc]
    how: Callable[[Tensors], Tensors]

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        return self.how(update)


FORMS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a shape that broadcasts": (lambda t: t[:1], r"of shape \(\d+.*\), got \(1,"),
    "an axis more": (lambda t: t[None], "of shape"),
    "a number": (lambda t: 0.5, "as a tensor, got float"),
    "another type": (lambda t: t.float(), "with dtype torch.float64, got torch.float32"),
    "whole numbers": (lambda t: t.long(), "with dtype"),
    "sparse": (lambda t: t.to_sparse(), "with layout"),
    "another device": (lambda t: t.to("meta"), "with device"),
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_tensor_in_another_form_is_named(kind: str) -> None:
    change, words = FORMS[kind]

    def how(update: Tensors) -> Tensors:
        name = list(update)[-1]
        return {**update, name: change(update[name])}  # type: ignore[arg-type, dict-item]

    run = worlds.federation(FedAvg(steps=1), Sends(how=how), rounds=0)
    with pytest.raises(ValueError, match=rf"client 0: expected 'head.\w+' {words}"):
        run.run_round()


def test_tensors_that_lack_and_tensors_that_nobody_asked_for_are_named() -> None:
    for how, words in (
        (lambda update: dict(list(update.items())[1:]), r"client 0: '[\w.]+' is missing"),
        (lambda update: {**update, "mine": torch.ones(2)}, "client 0: it sends 'mine', which the server did not send"),
    ):
        with pytest.raises(ValueError, match=words):
            worlds.federation(FedAvg(steps=1), Sends(how=how), rounds=0).run_round()


def test_numbers_near_the_largest_are_named() -> None:
    with pytest.raises(ValueError, match=r"client 1: its update has numbers of up to 3e\+38 in 'w' in round 2"):
        check_finite([upload(update={"w": torch.tensor([1.0, -3e38])})], 2)
    check_finite([upload(update={"w": torch.tensor([1.0, -1e30])})], 2)
    check_finite([upload(update={"w": torch.tensor([1.0, -3e38], dtype=torch.float64)})], 2)
