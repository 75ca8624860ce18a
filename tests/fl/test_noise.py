"""Noise that follows from a key, wherever it is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import grad, vmap

from fl.noise import Noise, drawn_key, fresh_key, uniform
from fl.seeds import stream

SHAPES = {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.zeros(5, dtype=torch.float64)}


def test_a_key_says_it_all() -> None:
    key = drawn_key(stream(0))
    one, same, other = (Noise(k).like(SHAPES) for k in (key, key.clone(), drawn_key(stream(1))))
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


@pytest.mark.parametrize("terms", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_standard_normal(terms: int, dtype: torch.dtype) -> None:
    values = Noise(drawn_key(stream(0)), terms).like({"x": torch.zeros(200_000, dtype=dtype)})["x"]
    assert values.dtype == dtype
    assert stats.kstest(values.double().numpy(), "norm").pvalue > 1e-4
    assert stats.kstest(uniform(drawn_key(stream(0)), 100_000).numpy(), "uniform").pvalue > 1e-4


def test_it_is_the_same_inside_transforms() -> None:
    keys = torch.stack([drawn_key(stream(seed)) for seed in range(3)])
    alone = torch.stack([Noise(key).like(SHAPES)["b"] for key in keys])
    assert torch.equal(vmap(lambda key: Noise(key).like(SHAPES)["b"])(keys), alone)
    same = vmap(lambda x: x + Noise(keys[0]).like(SHAPES)["b"])(torch.zeros(2, 5, dtype=torch.float64))
    assert torch.equal(same, alone[:1].expand(2, -1))
    slopes = vmap(grad(lambda x: (x * (x + Noise(keys[0]).like(SHAPES)["b"])).sum()))(torch.zeros(2, 5).double())
    assert torch.equal(slopes, alone[:1].expand(2, -1))
