from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from support.frameworks import flower_sent, flower_update, updates

from defenses.clip import Clip
from defenses.flower_local_dp import FlowerLocalDp
from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.privacy.accounting import gaussian_epsilon
from fl.seeds import stream
from fl.tensors import Tensors, dense, norm, scale_tensors
from fl.view import ThreatModel

FLIP: dict[str, Any] = {"clipping_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5}
"""What FLIP ships (pull request 833)."""


def test_the_noise_is_that_of_the_classical_theorem() -> None:
    assert FlowerLocalDp().std == pytest.approx(math.sqrt(2 * math.log(125_000)))
    assert FlowerLocalDp(**FLIP).std == pytest.approx(4.845e-5, rel=1e-3)  # as FLIP's log has it
    assert FlowerLocalDp(sensitivity=0.0).std == 0.0


def test_an_update_is_shortened_and_made_noisy() -> None:
    update: Tensors = {"a": torch.randn(300, 200, generator=stream(0)), "b": torch.randn(50, generator=stream(1))}
    defense = FlowerLocalDp(clipping_norm=2.0, sensitivity=0.01)
    short = scale_tensors(update, 2 / float(norm(update)))
    assert_near(defense.transform_update(update, None), short, 1e-6)
    noise = dense(defense.transform_update(update, stream(2))["a"]) - dense(short["a"])
    assert float(noise.std()) == pytest.approx(defense.std, rel=0.02)
    assert defense.noise_std(update) == dict.fromkeys(update, defense.std)
    assert_same(FlowerLocalDp(clipping_norm=1e9, sensitivity=0.0).transform_update(update, stream(2)), update)
    released = [dense(defense.release(update)["a"]) for _ in range(2)]
    assert not torch.equal(*released)


def test_who_knows_it_clips_predictions() -> None:
    defense = FlowerLocalDp(clipping_norm=1e-3, sensitivity=0.0)
    view, truth = worlds.federation(FedAvg.example(), defense).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)
    assert_same(defense.surrogate(predict(view, truth.candidate(), defended=False), view.update), view.update)
    unaware, _ = worlds.federation(FedAvg.example(), defense).observe(1, threat=ThreatModel(knows_defense=False))
    with torch.no_grad():
        assert float(norm(predict(unaware, truth.candidate()))) > 2 * float(norm(view.update))
    assert_same(
        defense.transmit_known_part(view.update, view.update),
        Clip(max_norm=1e-3).transmit_known_part(view.update, view.update),
    )


def test_what_follows_from_the_noise_itself_is_claimed() -> None:
    """As Flower is told, a sensitivity far below the clip promises 10 where 1e5 and more follows."""
    method, task = FedAvg.example(), worlds.task()
    told = FlowerLocalDp(epsilon=1.0).privacy(method, task, [10], 1)
    assert told.epsilon is not None
    assert told.epsilon == pytest.approx(gaussian_epsilon(1 / FlowerLocalDp().std, 1e-5), rel=1e-6)
    assert told.epsilon < 1
    flip = FlowerLocalDp(**FLIP).privacy(method, task, [10], 1)
    assert flip.epsilon is not None
    assert flip.epsilon > 1e8
    assert FlowerLocalDp(sensitivity=0.0).privacy(method, task, [10], 1).epsilon is None
    more = FlowerLocalDp().privacy(method, task, [10], 5).epsilon
    assert more is not None
    assert more > told.epsilon


@pytest.mark.parametrize(
    "settings", [{"clipping_norm": 0.0}, {"sensitivity": -1.0}, {"epsilon": 0.0}, {"delta": 0.0}, {"delta": 1.0}]
)
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
        FlowerLocalDp(**settings)


def test_it_does_what_flower_does() -> None:
    mods = pytest.importorskip("flwr.clientapp.mod")
    for number, change in enumerate(updates(20, torch.float64)):
        before = {name: torch.randn(value.shape, dtype=torch.float64) for name, value in change.items()}
        after = {name: value - change[name] for name, value in before.items()}
        size = float(norm(dict(change)))
        for clip in (0.5 * size, 2 * size):
            mod = mods.LocalDpMod(clipping_norm=clip, sensitivity=0.0, epsilon=1.0, delta=1e-5)
            theirs = flower_update(flower_sent(mod, before, after), before)
            ours = FlowerLocalDp(clipping_norm=clip, sensitivity=0.0).transform_update(dict(change), stream(number))
            for name, value in theirs.items():
                torch.testing.assert_close(dense(ours[name]), value, rtol=1e-6, atol=1e-12)


def test_it_adds_the_noise_that_flower_adds() -> None:
    mods = pytest.importorskip("flwr.clientapp.mod")
    before = {"a": torch.zeros(200, 200, dtype=torch.float64)}
    after = {"a": torch.full((200, 200), 1e-9, dtype=torch.float64)}
    sent = flower_update(flower_sent(mods.LocalDpMod(1.0, 0.3, 2.0, 1e-3), before, after), before)
    expected = FlowerLocalDp(clipping_norm=1.0, sensitivity=0.3, epsilon=2.0, delta=1e-3).std
    assert float(sent["a"].std()) == pytest.approx(expected, rel=0.02)
