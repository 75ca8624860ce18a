from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_near, assert_same
from support.updates import numbers

from defenses.qsgd import QSGD
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense, scale_tensors

UPDATE: Tensors = {
    "small": numbers(20, 5) * 1e-3,
    "structured": LowRank.outer(numbers(12), numbers(10)),
    "zero": torch.zeros(4, dtype=torch.float64),
}


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 4])
def test_values_are_levels_of_the_norm(bits: int, norm: Any) -> None:
    defense = QSGD(bits=bits, norm=norm)
    assert defense.levels == {2: 1, 4: 7}[bits]
    sent = defense.transform_update(UPDATE, stream(0))
    for name in ("small", "structured"):
        value, rounded = dense(UPDATE[name]), dense(sent[name])
        unit = float(value.norm() if norm == "l2" else value.abs().max()) / defense.levels
        levels = rounded / unit
        assert torch.allclose(levels, levels.round(), atol=1e-9)
        assert float((rounded - value).abs().max()) < unit * (1 + 1e-9)
        assert not ((rounded != 0) & (rounded.sign() != value.sign())).any()
    assert not dense(sent["zero"]).any()


@pytest.mark.parametrize("bucket", [None, 7])
def test_rounding_is_unbiased(bucket: int | None) -> None:
    defense, value = QSGD(bits=3, bucket=bucket), dense(UPDATE["small"])
    found = torch.stack([dense(defense.transform_update({"a": value}, stream(i))["a"]) for i in range(500)])
    assert float((found.mean(0) - value).abs().max()) < 5 * float(value.norm()) / 3 / 2 / 500**0.5


def test_small_buckets_bring_less_noise() -> None:
    value = numbers(10_000)
    errors = []
    for bucket in (None, 100):
        sent = QSGD(bucket=bucket).transform_update({"a": value}, stream(0))
        errors.append(float((dense(sent["a"]) - value).norm()))
    assert 2 < errors[0] / errors[1] < 20


def test_buckets_are_rounded_apart() -> None:
    value = torch.cat([numbers(8), 1e6 * numbers(8)])
    sent = dense(QSGD(bits=8, bucket=8).transform_update({"a": value}, stream(0))["a"])
    assert float((sent[:8] - value[:8]).norm() / value[:8].norm()) < 0.05


@pytest.mark.parametrize("settings", [{"bits": 1}, {"bits": 17}, {"bucket": 0}], ids=str)
def test_settings_are_checked(settings: Any) -> None:
    with pytest.raises(ValueError, match=r"(bits|bucket): expected a whole number|expected rounding .nearest."):
        QSGD(**settings)


def test_seeds_units_and_predictions() -> None:
    defense = QSGD()
    one, same, other = (defense.transform_update(UPDATE, stream(seed)) for seed in (0, 0, 1))
    assert_same(one, same)
    assert not torch.equal(dense(one["structured"]), dense(other["structured"]))
    assert_near(defense.transform_update(scale_tensors(UPDATE, 1024.0), stream(0)), scale_tensors(one, 1024.0), 1e-15)
    assert defense.transform_update(UPDATE, None) is UPDATE
