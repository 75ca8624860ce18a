"""Reconstruction robustness: with what probability any attack can succeed, whatever it tries, where noise is private.

An attacker who succeeds with probability kappa without looking (1/N among N equally likely candidates) succeeds with
probability gamma at most after looking (Balle, Cherubin, Hayes, 2022; Hayes, Mahloujifar, Balle, NeurIPS 2023). The
bounds hold for the record-level mechanism alone: they say nothing where private weights are trained without noise on
the same records. `q` is the sampling rate, `sigma` the noise multiplier, `steps` how many releases there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from scipy import special

from fl.privacy.accounting import Charge, delta_curve, merge_charges
from fl.seeds import stream


def full_batch_bound(kappa: float, sigma: float, steps: int = 1) -> float:
    """Return gamma where every step takes every record: Phi(Phi^-1(kappa) + sqrt(steps) / sigma), tight.

    One captured step of a client is this with `steps=1`.
    """
    _check(kappa, sigma, steps)
    return float(special.ndtr(special.ndtri(kappa) + math.sqrt(steps) / sigma))


def central_limit_estimate(kappa: float, sigma: float, q: float, steps: int) -> float:
    """Return gamma under Poisson sampling by the central limit theorem for many steps: close, and no bound.

    mu = q sqrt(steps (exp(1 / sigma^2) - 1)) (Dong, Roth, Su, 2022, Corollary 5.4).
    """
    _check(kappa, sigma, steps)
    mu = q * math.sqrt(steps * math.expm1(1 / sigma**2))
    return float(special.ndtr(special.ndtri(kappa) + mu))


@lru_cache(maxsize=1024)
def bound_from_charges(kappa: float, charges: tuple[Charge, ...]) -> float:
    """Bound gamma after all `charges`: tightly where every step takes every record, else by accountants' curves.

    Args:
        kappa: in (0, 1).
        charges: of the record in question, in everything that the attacker sees.

    Raises:
        ValueError: `kappa` is no probability between 0 and 1.
    """
    _check(kappa, 1.0, 1)
    known = merge_charges(charges)
    if any(charge.noise_multiplier == 0 for charge in known):
        return 1.0
    if all(charge.rate == 1 for charge in known):
        mu = math.sqrt(sum(charge.steps / charge.noise_multiplier**2 for charge in known))
        return float(special.ndtr(special.ndtri(kappa) + mu))
    return bound_from_curve(kappa, _curve(known))


@lru_cache(maxsize=64)
def _curve(charges: tuple[Charge, ...]) -> Callable[[float], float]:
    return delta_curve(charges)


def bound_from_curve(kappa: float, delta: Callable[[float], float], largest: float = 50.0) -> float:
    """Bound gamma from any accountant: the least of exp(epsilon) kappa + delta(epsilon), and the same for failure.

    What bounds success in terms of chance bounds chance's failure in terms of the attack's, too:
    1 - kappa <= exp(epsilon) (1 - gamma) + delta(epsilon).

    Args:
        kappa: in (0, 1).
        delta: of an epsilon >= 0, falling.
        largest: epsilon that is tried.
    """
    _check(kappa, 1.0, 1)

    def gamma(epsilon: float) -> float:
        slack = delta(epsilon)
        return min(math.exp(epsilon) * kappa + slack, 1 - math.exp(-epsilon) * (1 - kappa - slack))

    points = [largest * (i / 64) ** 2 for i in range(65)]
    best = min(range(len(points)), key=lambda i: gamma(points[i]))
    low, high = points[max(0, best - 1)], points[min(64, best + 1)]
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-6:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if gamma(left) < gamma(right) else (left, high)
    return min(1.0, gamma((low + high) / 2), gamma(points[best]))


def simulate_poisson(kappa: float, sigma: float, q: float, steps: int, *, trials: int = 20_000, seed: int = 0) -> float:
    """Simulate gamma under Poisson sampling: the best test's power at level kappa (Hayes et al., Algorithm 1).

    Args:
        kappa: in (0, 1).
        sigma: noise multiplier.
        q: sampling rate, in (0, 1].
        steps: releases.
        trials: simulated runs on each side; kappa should be well above 1 / trials.
        seed: of the simulation.
    """
    _check(kappa, sigma, steps)
    draw = stream(seed, "rero")
    ratios = []
    for with_record in (True, False):
        total = torch.zeros(trials, dtype=torch.float64)
        for _ in range(steps):
            seen = torch.randn(trials, generator=draw, dtype=torch.float64) * sigma
            if with_record:
                seen += (torch.rand(trials, generator=draw) < q).double()
            total += torch.log1p(q * torch.expm1((2 * seen - 1) / (2 * sigma**2)))
        ratios.append(total)
    taken, other = ratios
    threshold = other.sort(descending=True).values[max(0, math.ceil(kappa * trials) - 1)]
    return float((taken >= threshold).double().mean())


def _check(kappa: float, sigma: float, steps: int) -> None:
    if not 0 < kappa < 1:
        raise ValueError(f"expected kappa in (0, 1), got {kappa}")
    if not sigma > 0:
        raise ValueError(f"expected sigma > 0, got {sigma}")
    if steps < 1:
        raise ValueError(f"expected steps >= 1, got {steps}")
