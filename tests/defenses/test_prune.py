from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_same
from support.updates import numbers
from torch import Tensor

from defenses.prune import Prune
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.methods.scaffold import Scaffold
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense

UPDATE: Tensors = {
    "small": numbers(20, 5) * 1e-3,
    "large": numbers(50) * 10,
    "structured": LowRank.outer(numbers(12), numbers(10)),
    "one": numbers(1),
}


def pruned(**settings: Any) -> dict[str, Tensor]:
    sent = Prune(**settings).transform_update(UPDATE, stream(0))
    return {name: dense(value) for name, value in sent.items()}


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.99])
def test_the_share_of_every_tensor(ratio: float) -> None:
    sent = pruned(ratio=ratio)
    for name, value in UPDATE.items():
        whole, gone = dense(value), sent[name] == 0
        assert int(gone.sum()) == int(ratio * value.numel())
        assert torch.equal(sent[name][~gone], whole[~gone])
        if gone.any():
            assert whole[gone].abs().max() <= whole[~gone].abs().min()


def test_the_share_of_the_whole_update() -> None:
    sent = pruned(ratio=0.5, scope="global")
    counts = {name: int((value == 0).sum()) for name, value in sent.items()}
    assert sum(counts.values()) == int(0.5 * 271)
    assert counts["small"] == 100  # the smallest entries of the update
    assert counts["large"] < 10
    kept = torch.cat([dense(v)[sent[n] != 0].abs() for n, v in UPDATE.items()])
    lost = torch.cat([dense(v)[sent[n] == 0].abs() for n, v in UPDATE.items()])
    assert lost.max() <= kept.min()


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_ties_keep_the_count(scope: Any) -> None:
    sent = Prune(ratio=0.5, scope=scope).transform_update({"a": torch.ones(10)}, stream(0))
    assert float(dense(sent["a"]).sum()) == 5


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_no_pruning_is_no_defense_bit_for_bit(scope: Any) -> None:
    nothing = Prune(ratio=0.0, scope=scope)
    assert nothing.transform_update(UPDATE, stream(0)) is UPDATE
    assert nothing.surrogate(UPDATE, UPDATE) is UPDATE
    for method in (FedAvg.example(), HyperFL.example()):
        with_, without = (worlds.federation(method, defense).train(0).upload for defense in (nothing, None))
        assert_same(with_.update, without.update)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.2, float("nan")])
def test_settings_are_checked(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio: expected a (whole )?number in \[0, 1\), got"):
        Prune(ratio=ratio)


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_an_attacker_who_knows_it_predicts_the_update(method: Any, scope: Any) -> None:
    view, truth = worlds.federation(method, Prune(ratio=0.8, scope=scope)).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)
    unaware = replace(view, threat=replace(view.threat, knows_defense=False))
    predicted = predict(unaware, truth.candidate())
    for name, value in view.update.items():
        sent = dense(value) != 0
        assert torch.equal(dense(predicted[name])[sent], dense(value)[sent])
    assert any(dense(predicted[name])[dense(value) == 0].any() for name, value in view.update.items())


def test_further_payloads_are_pruned_too() -> None:
    upload = worlds.federation(Scaffold.example(), Prune(ratio=0.5)).train(0).upload
    weight = dense(upload.extra["control"]["body.fc1.weight"])
    assert int((weight == 0).sum()) == weight.numel() // 2


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_random_pruning_zeros_as_many_entries_as_stated_and_leaves_the_others(scope: Any) -> None:
    defense = Prune(ratio=0.5, keep="random", scope=scope)
    sent = defense.transform_update(UPDATE, stream(0))
    gone = {name: dense(sent[name]) == 0 for name in UPDATE}
    counts = {name: int(mask.sum()) for name, mask in gone.items()}
    assert sum(counts.values()) == (int(0.5 * 271) if scope == "global" else 50 + 25 + 60 + 0)
    for name, value in UPDATE.items():
        assert torch.equal(dense(sent[name])[~gone[name]], dense(value)[~gone[name]])
    large = dense(UPDATE["large"]).abs()
    assert large[gone["large"]].max() > large[~gone["large"]].min()  # sizes do not decide
    again, other = (dense(defense.transform_update(UPDATE, stream(seed))["small"]) == 0 for seed in (0, 1))
    assert torch.equal(again, gone["small"])
    assert not torch.equal(other, gone["small"])


def test_a_random_mask_is_read_off_the_update() -> None:
    view, truth = worlds.federation(FedAvg.example(), Prune(ratio=0.5, keep="random")).observe(1)
    with torch.no_grad():
        whole = predict(view, truth.candidate())
    assert all(dense(value).all() for value in whole.values())  # a prediction has no mask
    assert_same(view.defense.surrogate(whole, view.update), view.update)
