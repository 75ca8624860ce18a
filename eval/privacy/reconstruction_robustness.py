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

from scipy import special

from fl.privacy.accounting import Charge, delta_curve, merge_charges


@lru_cache(maxsize=1024)
def bound_from_charges(kappa: float, charges: tuple[Charge, ...]) -> float:
    """Bound gamma after all `charges`: tightly where every step takes every record, else by accountants' curves.

    Args:
        kappa: in (0, 1).
        charges: of the record in question, in everything that the attacker sees.

    Raises:
        ValueError: `kappa` is no probability between 0 and 1.
    """
    _check(kappa)
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
    _check(kappa)

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


def _check(kappa: float) -> None:
    if not 0 < kappa < 1:
        raise ValueError(f"expected kappa in (0, 1), got {kappa}")
