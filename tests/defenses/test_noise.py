from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from support.updates import numbers
from torch import Tensor

from defenses.compose import Chain
from defenses.noise import Noise
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense, rms, scale_tensors

UPDATE: Tensors = {
    "small": numbers(200, 50) * 1e-3,
    "large": numbers(5000) * 10,
    "structured": LowRank.outer(numbers(120), numbers(90)) * 0.5,
    "zero": torch.zeros(4, dtype=torch.float64),
}


def draws(defense: Noise, update: Tensors = UPDATE, seed: int = 0) -> dict[str, Tensor]:
    noisy = defense.transform_update(update, stream(seed))
    return {name: dense(noisy[name]) - dense(value) for name, value in update.items()}


def test_absolute_noise_has_one_size() -> None:
    found = draws(Noise(std=0.3, unit="absolute"))
    for name in ("small", "large", "structured"):
        assert float(found[name].std()) == pytest.approx(0.3, rel=0.05)
        assert abs(float(found[name].mean())) < 0.02
    assert found["zero"].any()


def test_relative_noise_follows_each_tensor() -> None:
    found = draws(Noise(std=0.3))
    for name in ("small", "large", "structured"):
        size = float(dense(UPDATE[name]).square().mean().sqrt())
        assert float(found[name].std()) == pytest.approx(0.3 * size, rel=0.05)
        assert rms(UPDATE[name]) == pytest.approx(size)
    assert not found["zero"].any()


def test_relative_noise_scales_with_the_update() -> None:
    noisy = Noise(std=0.3).transform_update(UPDATE, stream(0))
    louder = Noise(std=0.3).transform_update(scale_tensors(UPDATE, 1024.0), stream(0))
    assert_near(louder, scale_tensors(noisy, 1024.0), 1e-14)


@pytest.mark.parametrize("unit", ["relative", "absolute"])
def test_noise_follows_from_the_seed_alone(unit: Any) -> None:
    one, same, other = (Noise(unit=unit).transform_update(UPDATE, stream(seed)) for seed in (0, 0, 1))
    assert_same(one, same)
    assert not torch.equal(dense(one["large"]), dense(other["large"]))


@pytest.mark.parametrize("unit", ["relative", "absolute"])
def test_no_noise_is_no_defense_bit_for_bit(unit: Any) -> None:
    nothing = Noise(std=0.0, unit=unit)
    assert nothing.transform_update(UPDATE, stream(0)) is UPDATE
    assert set(nothing.noise_std(UPDATE).values()) == {0.0}
    for method in (FedAvg.example(), HyperFL.example()):
        with_, without = (worlds.federation(method, defense).train(0).upload for defense in (nothing, None))
        assert_same(with_.update, without.update)


@pytest.mark.parametrize("std", [-0.1, float("nan"), float("inf")])
def test_settings_are_checked(std: float) -> None:
    with pytest.raises(ValueError, match=r"std: expected a (whole )?number >= 0"):
        Noise(std=std)


def test_deviations_are_those_of_the_noise() -> None:
    defense = Noise(std=0.3)
    observed = defense.transform_update(UPDATE, stream(0))
    found = defense.noise_std(observed)
    for name, value in UPDATE.items():
        assert found[name] == pytest.approx(0.3 * rms(value), rel=0.02)
    larger = defense.noise_std(scale_tensors(observed, 1024.0))
    assert larger == pytest.approx({name: 1024 * value for name, value in found.items()})
    assert set(Noise(std=0.3, unit="absolute").noise_std(observed).values()) == {0.3}


def test_deviations_of_an_update_of_zeros() -> None:
    assert Noise().noise_std({"a": torch.zeros(3)}) == {"a": 0.0}


@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_predictions_leave_the_noise_out(method: Any) -> None:
    view, truth = worlds.federation(method, Noise(std=0.1)).observe(1)
    with torch.no_grad():
        predicted = predict(view, truth.candidate())
    for name, value in view.update.items():
        off = float((dense(predicted[name]) - dense(value)).norm() / dense(value).norm())
        assert 0 < off < 0.3, name


def test_a_release_draws_noise_that_no_seed_gives() -> None:
    for defense in (Noise(std=0.5), Chain(parts=(Noise(std=0.5), Noise(std=0.0)))):
        first, second = defense.release(UPDATE), defense.release(UPDATE)
        assert not torch.equal(dense(first["small"]), dense(second["small"]))
        noise = dense(first["small"]) - dense(UPDATE["small"])
        assert abs(rms(noise) / rms(UPDATE["small"]) - 0.5) < 0.03
        assert torch.equal(dense(first["zero"]), dense(UPDATE["zero"]))
    assert Noise(std=0.0).release(UPDATE) is UPDATE
