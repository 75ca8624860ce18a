from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from support.frameworks import flower_sent, flower_update, updates

from defenses.flower_fixed_clipping import FlowerFixedClipping
from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.privacy.accounting import gaussian_epsilon
from fl.seeds import stream
from fl.tensors import Tensors, dense, norm, scale_tensors

UPDATE: Tensors = {"a": torch.randn(300, 200, generator=stream(0)), "b": torch.randn(50, generator=stream(1))}


def test_a_curious_server_sees_no_noise() -> None:
    mine, theirs = FlowerFixedClipping(), FlowerFixedClipping(clipping="server")
    assert_near(mine.transform_update(UPDATE, stream(0)), scale_tensors(UPDATE, 10 / float(norm(UPDATE))), 1e-6)
    assert_same(theirs.transform_update(UPDATE, stream(0)), UPDATE)
    assert set(mine.noise_std(UPDATE).values()) == {0.0}
    assert mine.group_size == 1
    for defense in (mine, theirs):
        claim = defense.privacy(FedAvg.example(), worlds.task(), [10], 1)
        assert claim.epsilon is None
        assert "before it adds noise" in claim.reason


@pytest.mark.parametrize("clipping", ["client", "server"])
def test_others_see_the_mean_with_the_servers_noise(clipping: Any) -> None:
    defense = FlowerFixedClipping(
        noise_multiplier=0.5, clipping_norm=2.0, num_sampled_clients=4, clipping=clipping, observer="clients"
    )
    assert defense.group_size == 4
    parts = [dense(defense.transform_update(UPDATE, stream(i, "noise"))["a"]) for i in range(4)]
    noise = torch.stack(parts).mean(0) - dense(scale_tensors(UPDATE, 2 / float(norm(UPDATE)))["a"])
    assert float(noise.std()) == pytest.approx(0.5 * 2 / 4, rel=0.02)
    assert defense.noise_std(UPDATE)["a"] == defense.std == 0.25
    claim = defense.privacy(FedAvg.example(), worlds.task(), [10], 3)
    assert claim.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(3) / 0.5, 1e-5))
    assert claim.trusted.startswith("the server")


def test_a_release_leaves_noise_to_the_server() -> None:
    defense = FlowerFixedClipping(observer="clients")
    assert float(norm(defense.release(UPDATE))) == pytest.approx(10)
    assert_same(FlowerFixedClipping(observer="clients", clipping="server").release(UPDATE), UPDATE)


def test_a_group_is_observed_and_predicted() -> None:
    defense = FlowerFixedClipping(clipping_norm=1e-3, noise_multiplier=0.0, num_sampled_clients=3, observer="clients")
    view, truth = worlds.federation(FedAvg.example(), defense).observe(0)
    assert len(view.parts) == 3
    assert_same(predict(view, truth.candidate()), view.update)


def test_who_knows_it_clips_predictions() -> None:
    defense = FlowerFixedClipping(clipping_norm=1e-3)
    view, truth = worlds.federation(FedAvg.example(), defense).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)
    assert_same(defense.surrogate(predict(view, truth.candidate(), defended=False), view.update), view.update)
    assert defense.with_unknown_scale().name == "clip"
    assert FlowerFixedClipping(clipping="server").with_unknown_scale().name == "none"


@pytest.mark.parametrize(
    "settings", [{"clipping_norm": 0.0}, {"noise_multiplier": -1.0}, {"num_sampled_clients": 0}, {"delta": 0.0}]
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
        FlowerFixedClipping(**settings)


def test_the_mod_does_what_flower_does() -> None:
    mods = pytest.importorskip("flwr.clientapp.mod")
    for change in updates(20, torch.float64):
        before = {name: torch.randn(value.shape, dtype=torch.float64) for name, value in change.items()}
        after = {name: value - change[name] for name, value in before.items()}
        for clip in (0.5 * float(norm(dict(change))), 2 * float(norm(dict(change)))):
            theirs = flower_update(flower_sent(mods.fixedclipping_mod, before, after, clipping_norm=clip), before)
            ours = FlowerFixedClipping(clipping_norm=clip).transform_update(dict(change), None)
            for name, value in theirs.items():
                torch.testing.assert_close(dense(ours[name]), value, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("side", ["Client", "Server"])
def test_the_wrapper_does_what_flower_does(side: str) -> None:
    """Six clients' mean, clipped and with noise: the same size of noise, and the same mean."""
    strategies, app = pytest.importorskip("flwr.serverapp.strategy"), pytest.importorskip("flwr.app")
    clip, z, count = 3.0, 0.7, 6
    kind = getattr(strategies, f"DifferentialPrivacy{side}SideFixedClipping")
    own = kind(strategies.FedAvg(), z, clip, count)
    before = {"a": torch.zeros(200, 200, dtype=torch.float64)}
    changes = [{"a": torch.randn(200, 200, generator=stream(i), dtype=torch.float64)} for i in range(count)]
    mods = pytest.importorskip("flwr.clientapp.mod")
    after = [{"a": -change["a"]} for change in changes]
    mod = (
        mods.fixedclipping_mod
        if side == "Client"
        else (lambda message, context, call_next: call_next(message, context))
    )
    replies = [flower_sent(mod, before, weights, clipping_norm=clip) for weights in after]
    own.current_arrays = app.ArrayRecord({"a": app.Array(before["a"].numpy())})
    merged, _ = own.aggregate_train(1, replies)
    theirs = -torch.from_numpy(merged["a"].numpy().copy())
    defense = FlowerFixedClipping(noise_multiplier=z, clipping_norm=clip, num_sampled_clients=count, observer="clients")
    clean = torch.stack([dense(defense.transform_update(dict(change), None)["a"]) for change in changes]).mean(0)
    assert float((theirs - clean).std()) == pytest.approx(defense.std, rel=0.02)
    assert abs(float((theirs - clean).mean())) < 5 * defense.std / 200
