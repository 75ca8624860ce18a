from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near
from support.frameworks import flower_sent, flower_update, updates

from defenses.flower_adaptive_clipping import FlowerAdaptiveClipping
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import Tensors, dense, norm, scale_tensors


def test_an_update_is_shortened_to_the_rounds_norm() -> None:
    update: Tensors = {"a": torch.randn(30, 20, generator=stream(0)), "b": torch.randn(50, generator=stream(1))}
    sent = FlowerAdaptiveClipping().transform_update(update, stream(0))
    assert_near(sent, scale_tensors(update, 0.1 / float(norm(update))), 1e-6)


def test_the_norm_moves_away_from_the_quantile() -> None:
    """All clipped, it shrinks by exp(-0.1) a round; none clipped, it grows: the paper has it the other way about."""
    defense = FlowerAdaptiveClipping()
    assert defense.next_clipping_norm(1.0) == pytest.approx(0.1 * math.exp(-0.1))
    assert defense.next_clipping_norm(0.0) == pytest.approx(0.1 * math.exp(0.1))
    assert defense.next_clipping_norm(0.5) == pytest.approx(0.1)


def test_the_noise_goes_by_the_norm_after_the_move() -> None:
    defense = FlowerAdaptiveClipping(noise_multiplier=1.0, num_sampled_clients=100, observer="clients")
    z = (1 - 1 / 100) ** -0.5  # the count's noise has the standard deviation 5
    assert defense.update_noise_multiplier == pytest.approx(z)
    assert defense.std == pytest.approx(z * 0.1 * math.exp(-0.1) / 100)
    assert FlowerAdaptiveClipping(clipped_share=0.5, noise_multiplier=1.0).std == pytest.approx(z * 0.1 / 100)
    assert FlowerAdaptiveClipping(noise_multiplier=0.0).std == 0.0
    claimed = defense.privacy(FedAvg.example(), worlds.task(), [10], 1)
    assert claimed.noise_multiplier == pytest.approx(z * math.exp(-0.1))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="expected noise_multiplier < 2"):
        FlowerAdaptiveClipping(noise_multiplier=1.0, num_sampled_clients=10)
    for settings in ({"clipping_norm": 0.0}, {"clip_norm_lr": 0.0}, {"target_clipped_quantile": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
            FlowerAdaptiveClipping(**settings)
    with pytest.raises(ValueError, match="clipped_share"):
        FlowerAdaptiveClipping(clipped_share=math.nan)


def test_the_mod_does_what_flower_does() -> None:
    mods = pytest.importorskip("flwr.clientapp.mod")
    for change in updates(20, torch.float64):
        before = {name: torch.randn(value.shape, dtype=torch.float64) for name, value in change.items()}
        after = {name: value - change[name] for name, value in before.items()}
        for clip in (0.5 * float(norm(dict(change))), 2 * float(norm(dict(change)))):
            message = flower_sent(mods.adaptiveclipping_mod, before, after, clipping_norm=clip)
            ours = FlowerAdaptiveClipping(clipping_norm=clip).transform_update(dict(change), None)
            for name, value in flower_update(message, before).items():
                torch.testing.assert_close(dense(ours[name]), value, rtol=1e-6, atol=1e-12)
            assert bool(message.content["metrics"]["norm_bit"]) is (clip < float(norm(dict(change))))


@pytest.mark.parametrize("side", ["Client", "Server"])
@pytest.mark.parametrize("size", [10.0, 0.01])
def test_the_wrapper_does_what_flower_does(side: str, size: float) -> None:
    """Updates far above and far below the norm, over two rounds: the norm, and the noise by the one after the move."""
    strategies, app = pytest.importorskip("flwr.serverapp.strategy"), pytest.importorskip("flwr.app")
    mods, count, z = pytest.importorskip("flwr.clientapp.mod"), 4, 0.3
    settings: dict[str, Any] = {"noise_multiplier": z, "num_sampled_clients": count, "clipped_count_stddev": 1e-6 + z}
    own = getattr(strategies, f"DifferentialPrivacy{side}SideAdaptiveClipping")(strategies.FedAvg(), **settings)
    own.clipped_count_stddev = 0.0  # so that the norm follows from the updates alone
    mine = FlowerAdaptiveClipping(**settings, clipped_share=float(size > 0.1), observer="clients")
    assert own.clipping_norm == mine.clipping_norm
    assert own.noise_multiplier == pytest.approx(mine.update_noise_multiplier)
    before = {"a": torch.zeros(200, 200, dtype=torch.float64)}
    change = torch.randn(200, 200, generator=stream(0), dtype=torch.float64)
    change *= size / float(change.norm())
    own.current_arrays = app.ArrayRecord({"a": app.Array(before["a"].numpy())})
    mod = (
        mods.adaptiveclipping_mod
        if side == "Client"
        else (lambda message, context, call_next: call_next(message, context))
    )
    for number in range(2):
        norm_now = own.clipping_norm
        replies = [flower_sent(mod, before, {"a": -change}, clipping_norm=norm_now) for _ in range(count)]
        merged, _ = own.aggregate_train(number, replies)
        at = FlowerAdaptiveClipping(
            **settings, clipping_norm=norm_now, clipped_share=mine.clipped_share, observer="clients"
        )
        clean = dense(at.transform_update({"a": change}, None)["a"])
        noise = -torch.from_numpy(merged["a"].numpy().copy()) - clean
        assert float(noise.std()) == pytest.approx(at.std, rel=0.02)
        assert own.clipping_norm == pytest.approx(at.next_clipping_norm(at.clipped_share))
