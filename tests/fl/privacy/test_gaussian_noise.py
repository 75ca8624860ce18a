"""Noise that follows from a key, wherever it is drawn."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import grad, vmap

from fl.privacy.gaussian_noise import Noise, draw_key, fresh_key
from fl.runtime import secure_rng
from fl.seeds import stream

SHAPES = {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.zeros(5, dtype=torch.float64)}


def test_a_key_says_it_all() -> None:
    key = draw_key(stream(0))
    one, same, other = (Noise(k).like(SHAPES) for k in (key, key.clone(), draw_key(stream(1))))
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in SHAPES.items()}
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    raw = np.random.Generator(np.random.Philox(key=np.array(key.tolist(), dtype=np.uint64))).standard_normal(11)
    assert torch.equal(torch.cat([value.flatten() for value in one.values()]), torch.from_numpy(raw))


def test_both_words_of_a_key_count_to_the_last_bit() -> None:
    # torch's own generators give equal numbers for seeds that agree in their lowest 32 bits
    draws = {float(Noise(torch.tensor([a, b])).like(SHAPES)["b"][0]) for a in (5, 5 + 2**32) for b in (7, 7 + 2**40)}
    assert len(draws) == 4


def test_fresh_keys_differ() -> None:
    assert len({tuple(fresh_key().tolist()) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_standard_normal(secret: bool, dtype: torch.dtype) -> None:
    values = Noise(draw_key(stream(0)), secret).like({"x": torch.zeros(200_000, dtype=dtype)})["x"]
    assert values.dtype == dtype
    assert stats.kstest(values.double().numpy(), "norm").pvalue > 1e-4


def test_secret_noise_follows_from_the_key_by_a_hash() -> None:
    key, count = torch.tensor([3, 2**62 + 1]), secure_rng.BLOCK_SIZE + 7
    found = Noise(key, secret=True).like({"x": torch.zeros(count, dtype=torch.float64)})["x"].numpy()
    expected = []
    for block, size in enumerate((secure_rng.BLOCK_SIZE, 7)):
        told = b"".join(part.to_bytes(8, "little") for part in (3, 2**62 + 1, block))
        raw = hashlib.shake_256(told).digest(8 * 4 * size)
        numbers = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(4 * size)]
        far = stats.norm.isf(np.array([(number >> 12) + 0.5 for number in numbers]) / 2**53)
        terms = np.where([number % 2 for number in numbers], far, -far).reshape(4, size)
        expected.append(terms.sum(0) / 2)
    assert np.abs(found - np.concatenate(expected)).max() < 1e-12
    assert len(np.unique(found)) == count
    ends = secure_rng.words_to_normals(np.array([0, 1, 2**64 - 1, 2**64 - 2], dtype=np.uint64))
    assert ends[:2] == pytest.approx(stats.norm.isf(2.0**-54) * np.array([-1, 1]))  # 8.3: no number is infinite
    assert (ends[2:] * [1, -1] > 0).all()
    assert abs(ends[2:]).max() < 1e-15


def test_secret_choices_are_uniform_and_never_the_same() -> None:
    drawn = secure_rng.secure_uniform(100_000)
    assert stats.kstest(drawn, "uniform").pvalue > 1e-6  # by chance once in a million
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    assert len(np.unique(drawn * 2**53 % 2**10)) == 2**10  # to the last bits
    assert not np.isin(secure_rng.secure_uniform(1000), drawn).any()


@pytest.mark.parametrize("secret", [False, True])
def test_it_is_the_same_inside_transforms(secret: bool) -> None:
    keys = torch.stack([draw_key(stream(seed)) for seed in range(3)])
    alone = torch.stack([Noise(key, secret).like(SHAPES)["b"] for key in keys])
    assert torch.equal(vmap(lambda key: Noise(key, secret).like(SHAPES)["b"])(keys), alone)
    same = vmap(lambda x: x + Noise(keys[0], secret).like(SHAPES)["b"])(torch.zeros(2, 5, dtype=torch.float64))
    assert torch.equal(same, alone[:1].expand(2, -1))
    twice = vmap(grad(lambda x: (x * (x + Noise(keys[0], secret).like(SHAPES)["b"])).sum()))
    slopes = twice(torch.zeros(2, 5).double())
    assert torch.equal(slopes, alone[:1].expand(2, -1))
