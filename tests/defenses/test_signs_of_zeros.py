"""No defense tells whether a number that it sends as 0 was positive or negative."""

from __future__ import annotations

import pytest
import torch
from support.updates import numbers

from defenses.prune import Prune
from defenses.qsgd import QSGD
from fl.defense import Defense, defenses
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense

UPDATE: Tensors = {
    "wide.weight": numbers(20, 30),
    "tiny.bias": numbers(20) * 1e-9,
    "structured": LowRank.outer(numbers(12), numbers(10)),
}
DEFENSES = [
    *(defense for _, defense in defenses.examples()),
    Prune(ratio=0.9, keep="random"),
    Prune(ratio=0.9, scope="global"),
    QSGD(bits=2),
    QSGD(bucket=7, norm="max"),
]


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_zeros_are_sent_without_a_sign(defense: Defense) -> None:
    for generator in (stream(0), None):
        for value in defense.transform_update(UPDATE, generator).values():
            sent = dense(value)
            assert not sent[sent == 0].signbit().any()


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_a_prediction_has_none_either(defense: Defense) -> None:
    sent = defense.transform_update(UPDATE, stream(0))
    for value in defense.surrogate(UPDATE, sent).values():
        assert not dense(value)[dense(value) == 0].signbit().any()


def test_what_is_not_finite_is_left_out_like_any_other_number() -> None:
    broken: Tensors = {"a": torch.tensor([3.0, torch.nan, 2.0, -1.0])}
    mask: Tensors = {"a": torch.tensor([1.0, 0.0, 1.0, 1.0])}
    assert dense(Prune(ratio=0.25).surrogate(broken, mask)["a"]).tolist() == [3, 0, 2, -1]
