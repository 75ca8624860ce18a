from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from support.updates import numbers

from defenses.quantize import Quantize
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense, scale_tensors

UPDATE: Tensors = {
    "small": numbers(200, 5) * 1e-3,
    "structured": LowRank.outer(numbers(120), numbers(10)),
    "flat": torch.full((4,), 0.3, dtype=torch.float64),
}


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_values_lie_on_a_grid_between_the_extremes(bits: int, rounding: Any) -> None:
    sent = Quantize(bits=bits, rounding=rounding).transform_update(UPDATE, stream(0))
    for name in ("small", "structured"):
        value, rounded = dense(UPDATE[name]), dense(sent[name])
        width = float(value.max() - value.min()) / (2**bits - 1)
        assert len(rounded.unique()) <= 2**bits
        assert float(rounded.min()) == pytest.approx(float(value.min()), rel=1e-6)
        assert float(rounded.max()) == pytest.approx(float(value.max()), rel=1e-6)
        limit = width * (0.5 if rounding == "nearest" else 1.0)
        assert float((rounded - value).abs().max()) <= limit * (1 + 1e-5)
    assert dense(sent["flat"]).tolist() == pytest.approx([0.3] * 4)


def test_stochastic_rounding_is_unbiased() -> None:
    defense = Quantize(bits=2, rounding="stochastic")
    value = dense(UPDATE["small"])
    mean = torch.stack([dense(defense.transform_update({"a": value}, stream(i))["a"]) for i in range(400)]).mean(0)
    width = float(value.max() - value.min()) / 3
    assert float((mean - value).abs().max()) < 5 * width / 2 / 400**0.5
    assert defense.transform_update(UPDATE, None) is UPDATE


@pytest.mark.parametrize(("kind", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_short_floats_round_to_their_bits(kind: Any, bits: int) -> None:
    sent = Quantize(format=kind).transform_update(UPDATE, stream(0))
    value, rounded = dense(UPDATE["structured"]), dense(sent["structured"])
    assert rounded.dtype == torch.float64
    assert 2.0 ** -(bits + 4) < float(((rounded - value) / value).abs().max()) <= 2.0**-bits


@pytest.mark.parametrize(
    "settings", [{"bits": 0}, {"bits": 17}, {"format": "float16", "rounding": "stochastic"}], ids=str
)
def test_settings_are_checked(settings: Any) -> None:
    with pytest.raises(ValueError, match=r"(bits|bucket): expected a whole number|expected rounding .nearest."):
        Quantize(**settings)


@pytest.mark.parametrize("kind", ["uniform", "float16", "bfloat16"])
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_update(method: Any, kind: Any) -> None:
    view, truth = worlds.federation(method, Quantize(format=kind)).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)


def test_the_unit_does_not_matter() -> None:
    defense = Quantize(bits=3)
    sent = defense.transform_update(UPDATE, stream(0))
    assert_near(defense.transform_update(scale_tensors(UPDATE, 1024.0), stream(0)), scale_tensors(sent, 1024.0), 1e-15)


def test_a_coarse_grid_is_compared_as_it_was_observed() -> None:
    """Its own extremes would give a guess another grid than the one it is compared with."""
    observed = Quantize(bits=2).transform_update(UPDATE, None)
    guess: Tensors = {name: dense(value) * 0.9 for name, value in UPDATE.items()}
    levels = dense(observed["small"]).unique()
    found = dense(Quantize(bits=2).surrogate(guess, observed)["small"])
    assert (found.flatten()[:, None] == levels).any(1).all()
    assert Quantize(bits=8).surrogate(guess, observed) is guess


def test_rounding_passes_gradients_through() -> None:
    value = numbers(10).requires_grad_()
    for sent in (
        Quantize(bits=2).transform_update({"a": value}, None),
        Quantize(bits=2).surrogate({"a": value}, {"a": numbers(10)}),
    ):
        (grad,) = torch.autograd.grad(dense(sent["a"]).sum(), value)
        assert torch.equal(grad, torch.ones_like(value))
