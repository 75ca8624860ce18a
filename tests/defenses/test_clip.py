from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from support.updates import numbers

from attacks.base import NotApplicable, Reconstruction, build
from defenses.clip import Clip
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, add_scaled, dense, norm, scale_tensors
from fl.view import ThreatModel

UPDATE: Tensors = {
    "small": numbers(20, 5) * 1e-3,
    "large": numbers(50) * 10,
    "structured": LowRank.outer(numbers(12), numbers(10)),
    "zero": torch.zeros(3, dtype=torch.float64),
}


def test_the_whole_update_is_shortened_in_its_own_direction() -> None:
    sent = Clip(max_norm=0.5).transform_update(UPDATE, stream(0))
    assert float(norm(sent)) == pytest.approx(0.5)
    assert_near(sent, scale_tensors(UPDATE, 0.5 / float(norm(UPDATE))), 1e-14)
    assert isinstance(sent["structured"], LowRank)


def test_each_tensor_is_shortened_apart() -> None:
    sent = Clip(max_norm=0.5, scope="tensor").transform_update(UPDATE, stream(0))
    assert torch.equal(dense(sent["small"]), dense(UPDATE["small"]))
    assert not dense(sent["zero"]).any()
    for name in ("large", "structured"):
        assert float(dense(sent[name]).norm()) == pytest.approx(0.5)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_short_update_keeps_every_bit(scope: Any) -> None:
    assert_same(Clip(max_norm=1e6, scope=scope).transform_update(UPDATE, stream(0)), UPDATE)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_settings_are_checked(max_norm: float) -> None:
    with pytest.raises(ValueError, match=r"max_norm: expected a (whole )?number > 0"):
        Clip(max_norm=max_norm)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_update(method: Any, scope: Any) -> None:
    view, truth = worlds.federation(method, Clip(max_norm=1e-3, scope=scope)).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)
    assert_same(view.defense.surrogate(predict(view, truth.candidate(), defended=False), view.update), view.update)
    unaware = replace(view, threat=replace(view.threat, knows_defense=False))
    with torch.no_grad():
        longer = float(norm(predict(unaware, truth.candidate())))
    assert longer > 2 * float(norm(view.update))


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_in_another_unit_the_truth_has_the_observed_direction(scope: Any) -> None:
    defense = Clip(max_norm=0.5, scope=scope)
    observed = scale_tensors(defense.transform_update(UPDATE, None), 100.0)
    assert_near(defense.with_unknown_scale().surrogate(UPDATE, observed), observed, 1e-12)


def test_the_share_of_a_known_part_is_found() -> None:
    known: Tensors = {"a": numbers(4000)}
    rest: Tensors = {"a": torch.randn(4000, generator=stream(1), dtype=torch.float64)}
    whole = add_scaled(known, rest)
    defense = Clip(max_norm=0.25 * float(norm(whole)))
    found = defense.transmit_known_part(known, defense.transform_update(whole, None))
    assert_near(found, scale_tensors(known, 0.25), 0.1)
    unclipped = Clip(max_norm=2 * float(norm(whole)))
    assert_same(unclipped.transmit_known_part(known, whole), known)


def test_a_clipped_hypernetwork_is_peeled_all_the_same() -> None:
    method = worlds.one_step(HyperFL.example())
    view, truth = worlds.federation(method, Clip(max_norm=1e-3)).observe(1)
    result = build("peel")(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    found, true = dense(result.private["embedding"]), dense(truth.private["embedding"])
    assert float((found - true).norm() / true.norm()) < 1e-6


def test_lengths_clipped_apart_are_not_solved_for() -> None:
    method = worlds.one_step(HyperFL.example())
    view, _ = worlds.federation(method, Clip(max_norm=1e-3, scope="tensor")).observe(1)
    assert isinstance(build("peel")(view), NotApplicable)
    view, _ = worlds.federation(worlds.one_step(FedAvg.example()), Clip(max_norm=1e-3, scope="tensor")).observe(1)
    for name in ("spear", "surrogate+spear"):  # a rewritten view has a stand-in for the defense
        result = build(name)(view)
        assert isinstance(result, NotApplicable)
        assert "the defense clip leaves no ratio" in result.reason


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("max_norm", [1e-4, 1e-3, 1e-2])
def test_lengths_clipped_apart_are_not_verified_by_a_server_that_does_not_know(max_norm: float, bias: bool) -> None:
    generator = Hypernetwork(embedding=8, hidden=16, init="scaled", bias=bias)
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, weight_decay=0.0, parametrization=generator)
    defense, unaware = Clip(max_norm=max_norm, scope="tensor"), ThreatModel(knows_defense=False)
    view, truth = worlds.federation(method, defense).observe(1, threat=unaware)
    for route in ("auto", "trunk", "heads"):
        result = build({"name": "peel", "route": route})(view)
        assert isinstance(result, Reconstruction)
        pairs = [(dense(result.private[f"extractor/{n}"]), w) for n, w in truth.extractor.items()]
        off = max(float((x - w).norm() / w.norm()) for x, w in pairs)
        assert not result.verified or off < 1e-9
    plain, _ = worlds.federation(method).observe(1, threat=unaware)
    result = build("peel")(plain)
    assert isinstance(result, Reconstruction)
    assert result.verified
