"""How much privacy noisy steps cost: epsilon from noise, sampling rate and steps, the noise that a budget asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

if TYPE_CHECKING:
    from fl.privacy.prv_accountant import NumericalAccountant

Accountant = Literal["prv", "rdp"]
MAX_NOISE_MULTIPLIER = 2.0**20
"""Multiple of the clip above which no noise is looked for."""
RENYI_ORDERS = [1 + x / 10 for x in range(1, 20)] + [3 + x / 4 for x in range(32)] + list(range(11, 64))
RENYI_ORDERS += [2.0**k for k in range(6, 15)]
"""Of Renyi divergences; Opacus' own end at 63, which very large noise would fall off."""


@dataclass(frozen=True)
class Charge:
    """Steps alike: Gaussian noise on a sum that one record moves by at most the clip.

    Attributes:
        noise_multiplier: standard deviation of the noise, in units of the clip.
        rate: probability with which a record is in a step's batch; 1 where it is in every one.
        steps: how many.

    Raises:
        ValueError: a number out of range.
    """

    noise_multiplier: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"expected noise_multiplier >= 0, got {self.noise_multiplier}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"expected rate in (0, 1], got {self.rate}")
        if self.steps < 0:
            raise ValueError(f"expected steps >= 0, got {self.steps}")


def merge_charges(charges: Iterable[Charge]) -> tuple[Charge, ...]:
    """Merge charges of equal noise and rate: epsilon does not depend on their order, and is found many times faster."""
    steps: dict[tuple[float, float], int] = {}
    for charge in charges:
        key = (charge.noise_multiplier, charge.rate)
        steps[key] = steps.get(key, 0) + charge.steps
    return tuple(Charge(*key, count) for key, count in steps.items() if count)


def compute_epsilon(charges: Iterable[Charge], delta: float, accountant: Accountant = "prv") -> float:
    """Return the epsilon of all `charges` together at `delta`: an upper bound, infinite where a step has no noise.

    Where every record is in every batch "prv" gives the exact value for Gaussian noise. Elsewhere it is numerical, to
    0.01 (Opacus' bound), and never above what RDP proves. "rdp" is the RDP accountant's value everywhere.

    Raises:
        ValueError: `delta` is not in (0, 1).
    """
    if not 0 < delta < 1:
        raise ValueError(f"expected delta in (0, 1), got {delta}")
    known = merge_charges(charges)
    if not known:
        return 0.0
    if any(charge.noise_multiplier == 0 for charge in known):
        return math.inf
    if accountant == "rdp":
        return _rdp(known, delta)
    if all(charge.rate == 1 for charge in known):
        return gaussian_epsilon(math.sqrt(sum(c.steps / c.noise_multiplier**2 for c in known)), delta)
    return min(_prv(known, delta), _rdp(known, delta))


def costliest_charge(charges: Iterable[Charge], delta: float) -> tuple[Charge, float, float]:
    """Return the costliest of several clients' charges, one each; its epsilon by PRV, and the largest by RDP.

    Raises:
        ValueError: no charge, or `delta` out of range.
    """
    by_rdp = {charge: compute_epsilon([charge], delta, "rdp") for charge in charges}
    if not by_rdp:
        raise ValueError("expected at least 1 client's charge, got none")
    ranked = sorted(by_rdp, key=lambda charge: -by_rdp[charge])
    most, best = ranked[0], -1.0
    for charge in ranked:
        if by_rdp[charge] > best:  # PRV never says more than RDP: the others need not be asked
            found = compute_epsilon([charge], delta, "prv")
            best, most = (found, charge) if found > best else (best, most)
    return most, best, max(by_rdp.values())


@lru_cache(maxsize=1024)
def calibrate_noise(epsilon: float, delta: float, rate: float, steps: int, accountant: Accountant = "prv") -> float:
    """Return the least noise multiplier, to 1 in 2,000, with which `steps` steps cost `epsilon` at most.

    Raises:
        ValueError: a number out of range, or no noise is enough.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"expected epsilon > 0, got {epsilon}")

    if accountant == "rdp" or rate == 1:  # at rate 1 no guess is needed: the exact value is cheap
        return _smallest_sufficient(
            epsilon, lambda sigma: compute_epsilon((Charge(sigma, rate, steps),), delta, accountant), 1.0
        )
    guess = 0.93 * calibrate_noise(epsilon, delta, rate, steps, "rdp")  # PRV is slow, and asks for a little less noise
    return _smallest_sufficient(
        epsilon, lambda sigma: compute_epsilon((Charge(sigma, rate, steps),), delta, "prv"), guess
    )


def delta_curve(charges: Iterable[Charge]) -> Callable[[float], float]:
    """Return the delta of all `charges` together as a function of epsilon >= 0.

    An upper bound, 1 where a step has no noise.

    Exact where every record is in every batch; elsewhere the lower one of what PRV and RDP prove.
    """
    known = merge_charges(charges)
    if any(charge.noise_multiplier == 0 for charge in known):
        return lambda epsilon: 1.0
    if all(charge.rate == 1 for charge in known):
        mu = math.sqrt(sum(c.steps / c.noise_multiplier**2 for c in known))
        return lambda epsilon: gaussian_delta(mu, epsilon)
    by_rdp, by_prv = _rdp_curve(known), _prv_curve(known)
    return lambda epsilon: min(by_rdp(epsilon), by_prv(epsilon))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of a Gaussian mechanism of sensitivity `mu` and noise 1, exactly (Balle and Wang, ICML 2018, Eq. 6)."""
    if mu <= 0:
        return 0.0
    # e^epsilon times a tail that may be far below the smallest number
    right = math.exp(min(epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu)), 0.0))
    return float(special.ndtr(mu / 2 - epsilon / mu)) - right


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism of sensitivity `mu` and noise 1, exactly (Balle and Wang, ICML 2018, Eq. 6)."""

    def excess(epsilon: float) -> float:
        return gaussian_delta(mu, epsilon) - delta

    if excess(0.0) <= 0:
        return 0.0
    top = 1.0
    while excess(top) > 0:
        top *= 2
    return float(optimize.brentq(excess, 0.0, top, xtol=1e-12, rtol=1e-12))


def _smallest_sufficient(target: float, cost: Callable[[float], float], guess: float) -> float:
    """Return the least value at which the falling `cost` is at most `target`, to 1 in 2,000 and never below."""
    known: dict[float, float] = {}

    def gap(power: float) -> float:
        if power not in known:
            known[power] = math.log(max(min(cost(math.exp(power)), 1e9), 1e-9) / target)
        return known[power]

    start = end = math.log(guess)
    step = 0.05
    while gap(start) * gap(end) > 0:  # out from the guess in growing steps, towards the other sign
        start, end = end, end + math.copysign(step, gap(end))
        step *= 2
        if abs(end) > math.log(MAX_NOISE_MULTIPLIER):
            raise ValueError(f"expected a budget that noise of at most {MAX_NOISE_MULTIPLIER:.0f} times the clip meets")
    if start != end:
        optimize.brentq(gap, start, end, xtol=2e-4, rtol=1e-12)
    return math.exp(min(power for power, found in known.items() if found <= 0))


def _rdp_of(charges: tuple[Charge, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the orders, and the Renyi divergence of all charges at each."""
    from fl.privacy.prv_accountant import renyi_divergences  # seconds to import, so not before it is used

    total = np.sum([renyi_divergences(c.noise_multiplier, c.rate, RENYI_ORDERS) * c.steps for c in charges], axis=0)
    usable = np.isfinite(total)
    return np.asarray(RENYI_ORDERS)[usable], total[usable]


def _rdp(charges: tuple[Charge, ...], delta: float) -> float:
    alphas, values = _rdp_of(charges)
    # Canonne, Kamath, Steinke, NeurIPS 2020, Proposition 12
    bounds = values - (math.log(delta) + np.log(alphas)) / (alphas - 1) + np.log1p(-1 / alphas)
    return max(0.0, float(bounds.min())) if len(bounds) else math.inf


def _rdp_curve(charges: tuple[Charge, ...]) -> Callable[[float], float]:
    """Return delta as a function of epsilon, by the proposition that `_rdp` solves for epsilon."""
    alphas, values = _rdp_of(charges)

    def delta(epsilon: float) -> float:
        powers = (alphas - 1) * (values - epsilon + np.log1p(-1 / alphas)) - np.log(alphas)
        return math.exp(min(float(powers.min()), 0.0)) if len(powers) else 1.0

    return delta


def _prv_curve(charges: tuple[Charge, ...], error: float = 0.01, slack: float = 1e-9) -> Callable[[float], float]:
    """Return delta by the numerical accountant, whose epsilon is off by `error` at most, but for `slack` of delta."""
    accountant = _accountant(charges)
    try:
        with np.errstate(divide="ignore"):
            loss = accountant._get_dprv(eps_error=error, delta_error=slack)
    except (ValueError, RuntimeError, MemoryError):
        return lambda epsilon: 1.0
    at, mass = loss.domain.ts, np.maximum(loss.pmf, 0.0)
    at, mass = at[at >= -1], mass[at >= -1]
    above, weighted = (np.append(np.flip(np.flip(part).cumsum()), 0.0) for part in (mass, mass * np.exp(-at)))

    def delta(epsilon: float) -> float:
        i = int(np.searchsorted(at, epsilon - error))
        found = float(above[i] - math.exp(epsilon - error) * weighted[i])
        return min(max(found, 0.0) + slack, 1.0) if math.isfinite(found) else 1.0

    return delta


def _accountant(charges: tuple[Charge, ...]) -> NumericalAccountant:
    from fl.privacy.prv_accountant import NumericalAccountant  # seconds to import, so not before it is used

    accountant = NumericalAccountant()
    accountant.history = [(c.noise_multiplier, c.rate, c.steps) for c in charges]
    return accountant


@lru_cache(maxsize=256)
def _prv(charges: tuple[Charge, ...], delta: float) -> float:
    accountant = _accountant(charges)
    try:
        with np.errstate(divide="ignore"):  # a rate of 1 among others meets log 0, which is right
            found = float(accountant.get_epsilon(delta=delta))
    except (ValueError, RuntimeError, MemoryError):  # its grid fails for extreme noise; RDP's bound holds all the same
        return math.inf
    return found if math.isfinite(found) else math.inf
