from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from support.frameworks import nvflare_filtered, updates
from support.updates import numbers

from defenses.nvflare_percentile import NVFlarePercentile, PercentileOfUnknownScale
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.tensors import LowRank, Tensors, dense, scale_tensors


def filtered(values: list[float], **settings: Any) -> list[float]:
    sent = NVFlarePercentile(**settings).transform_update({"a": torch.tensor(values, dtype=torch.float64)}, None)
    return [round(x, 12) for x in dense(sent["a"]).tolist()]


def test_small_numbers_are_left_out_and_large_ones_cut() -> None:
    """The 50th percentile of sizes 1, 2, 3, 4, 50 is 3, which is sent itself; 25 is between 2 and 2 of 1, 2, 3, ..."""
    values = [-1.0, 2.0, -3.0, 4.0, -50.0]
    assert filtered(values, percentile=50.0, gamma=10.0) == [0, 0, -3, 4, -10]
    assert filtered(values, percentile=49.0, gamma=10.0) == [0, 0, -3, 4, -10]
    assert filtered(values, percentile=25.0, gamma=3.5) == [0, 2, -3, 3.5, -3.5]
    assert filtered(values, percentile=0.0, gamma=100.0) == values
    assert filtered(values, percentile=100.0, gamma=100.0) == [0, 0, 0, 0, -50]


def test_numbers_are_looked_at_a_step() -> None:
    assert filtered([-10.0, 20.0, 500.0], percentile=50.0, gamma=3.0, steps=10) == [0, 20, 30]


def test_the_percentile_is_that_of_all_tensors_and_scalars_pass() -> None:
    update: Tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([30.0, 40.0, 50.0]), "c": torch.tensor(7.0)}
    sent = NVFlarePercentile(percentile=50.0, gamma=35.0).transform_update(update, None)
    assert dense(sent["a"]).tolist() == [0.0, 0.0]
    assert dense(sent["b"]).tolist() == [30.0, 35.0, 35.0]
    assert float(dense(sent["c"])) == 7.0
    structured: Tensors = {"a": LowRank.outer(numbers(4), numbers(3))}
    assert int((dense(NVFlarePercentile(percentile=50.0).transform_update(structured, None)["a"]) == 0).sum()) == 6
    assert NVFlarePercentile().transform_update({}, None) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("settings", "steps"), [({}, None), ({}, 7), ({"percentile": 50, "gamma": 1e-3}, 3), ({"percentile": 95}, None)]
)
def test_it_does_what_nvflare_does(settings: dict[str, Any], steps: int | None, dtype: torch.dtype) -> None:
    own = pytest.importorskip("nvflare.app_common.filters.percentile_privacy").PercentilePrivacy(**settings)
    mine = NVFlarePercentile(**{key: float(value) for key, value in settings.items()}, steps=steps or 1)
    for update in updates(25, dtype):
        theirs, sent = nvflare_filtered(own, update, steps), mine.transform_update(dict(update), None)
        for name, value in theirs.items():
            np.testing.assert_allclose(dense(sent[name]).numpy(), value, rtol=3e-7, atol=0)


def test_nvflares_defaults_are_ours() -> None:
    own = pytest.importorskip("nvflare.app_common.filters.percentile_privacy").PercentilePrivacy()
    assert (own.percentile, own.gamma) == (NVFlarePercentile().percentile, NVFlarePercentile().gamma)


@pytest.mark.parametrize("settings", [{"percentile": -1.0}, {"percentile": 101.0}, {"gamma": 0.0}, {"steps": 0}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
        NVFlarePercentile(**settings)


@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_lies_in_all_intervals(method: Any) -> None:
    defense = NVFlarePercentile(percentile=40.0, gamma=0.01)
    view, truth = worlds.federation(method, defense).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)
    with torch.no_grad():
        undefended = predict(view, truth.candidate(), defended=False)
        wrong = predict(view, replace(truth.candidate(), inputs=1 - truth.inputs), defended=False)
    assert_same(defense.surrogate(undefended, view.update), view.update)
    off = {n: dense(v) - dense(view.update[n]) for n, v in defense.surrogate(wrong, view.update).items()}
    assert any(bool(gap[dense(view.update[n]) == 0].any()) for n, gap in off.items())


def test_a_prediction_is_charged_for_what_lies_outside_of_an_interval() -> None:
    defense = NVFlarePercentile(gamma=10.0)
    observed: Tensors = {"a": torch.tensor([0.0, 0.0, 2.0, -3.0, 10.0, -10.0])}
    predicted: Tensors = {"a": torch.tensor([1.5, -2.5, 2.25, 3.0, 12.0, -9.0])}
    assert dense(defense.surrogate(predicted, observed)["a"]).tolist() == [0.0, -0.5, 2.25, 3.0, 10.0, -9.0]
    assert dense(defense.transmit_known_part(predicted, observed)["a"]).tolist() == [0.0, 0.0, 2.25, 3.0, 0.0, 0.0]
    assert defense.gap_limit(observed) == 2.0
    everything_cut: Tensors = {"a": torch.tensor([0.0, 10.0])}  # the percentile may have been far above the limit
    assert dense(defense.surrogate({"a": torch.tensor([50.0, 60.0])}, everything_cut)["a"]).tolist() == [0.0, 10.0]
    assert defense.gap_limit(everything_cut) == math.inf


def test_in_another_unit_the_largest_size_is_taken_for_the_limit() -> None:
    update: Tensors = {"a": numbers(40), "b": numbers(30, 2) * 3}
    sent = NVFlarePercentile(percentile=30.0, gamma=1.5).transform_update(update, None)
    unknown = NVFlarePercentile().with_unknown_scale()
    assert isinstance(unknown, PercentileOfUnknownScale)
    for unit in (1.0, 100.0):
        assert_near(unknown.surrogate(update, scale_tensors(sent, unit)), scale_tensors(sent, unit), 1e-12)
    assert_same(
        unknown.transmit_known_part(update, sent), NVFlarePercentile(gamma=1.5).transmit_known_part(update, sent)
    )
