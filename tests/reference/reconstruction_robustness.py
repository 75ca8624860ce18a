"""Reconstruction robustness by closed forms of the literature and by simulation."""

import math

import torch
from scipy import special

from fl.seeds import stream


def full_batch_bound(kappa: float, sigma: float, steps: int = 1) -> float:
    """Return gamma where every step takes every record: Phi(Phi^-1(kappa) + sqrt(steps) / sigma), tight.

    One captured step of a client is this with `steps=1`.
    """
    return float(special.ndtr(special.ndtri(kappa) + math.sqrt(steps) / sigma))


def central_limit_estimate(kappa: float, sigma: float, q: float, steps: int) -> float:
    """Return gamma under Poisson sampling by the central limit theorem for many steps: close, and no bound.

    mu = q sqrt(steps (exp(1 / sigma^2) - 1)) (Dong, Roth, Su, 2022, Corollary 5.4).
    """
    mu = q * math.sqrt(steps * math.expm1(1 / sigma**2))
    return float(special.ndtr(special.ndtri(kappa) + mu))


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
