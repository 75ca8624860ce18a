"""The subsampled Gaussian mechanism by its definition: privacy losses drawn, and one integral for a single step."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import integrate, stats


def losses(sigma: float, q: float, steps: int, trials: int, seed: int) -> NDArray[np.float64]:
    """Privacy losses of `steps` steps with the record present, each with probability q."""
    draw = np.random.default_rng(seed)
    total = np.zeros(trials)
    for _ in range(steps):
        x = draw.normal(0, sigma, trials) + (draw.random(trials) < q)
        total += np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))
    return total


def epsilon_at_least(sigma: float, q: float, steps: int, delta: float, trials: int = 50_000, seed: int = 0) -> float:
    """A lower bound on epsilon: below it, delta is above the given one by four standard errors."""
    drawn = losses(sigma, q, steps, trials, seed)

    def surely(epsilon: float) -> bool:
        excess = np.maximum(0.0, -np.expm1(epsilon - drawn))
        return bool(excess.mean() - 4 * excess.std() / math.sqrt(trials) > delta)

    low, high = 0.0, max(float(drawn.max()), 0.0)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if surely(middle) else (low, middle)
    return low


def delta_of_one_gaussian(epsilon: float, mu: float) -> float:
    """Delta of one Gaussian mechanism of sensitivity `mu` and noise 1, by integrating the densities' difference."""
    meets = epsilon / mu + mu / 2

    def excess(x: float) -> float:
        return float(stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x))

    return float(integrate.quad(excess, meets, meets + 40, epsabs=1e-14, limit=500)[0])
