"""What an audit proves about epsilon: lower bounds from guesses about canaries, and what they could at most have shown.

Each of m canaries (samples of the auditor's choice) was in the training data or not by the toss of a fair coin; the
auditor scores each of them from what was released, guesses, and counts. An epsilon claimed for record-level
differential privacy (add or remove one) is refuted by a lower bound above it. Every bound here holds with probability
`1 - significance`; none is an estimate of epsilon, and a weak attack gives a low bound whatever the mechanism does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from eval.metrics.statistics import rate_lower_bound
from fl.privacy.accounting import gaussian_delta

LARGEST = 100.0
"""No lower bound on epsilon above this is looked for."""
CAUTION = 0.01
"""Factor on the significance with which a threshold is chosen: few lucky guesses at an extreme one do not win."""


@dataclass(frozen=True)
class EpsilonEstimate:
    """Lower bounds on epsilon from one set of scores.

    Attributes:
        one_run: for pure guessing by any mechanism (Steinke, Nasr, Jagielski, NeurIPS 2023).
        f_dp: if the trade-off curve is Gaussian (Mahloujifar, Melis, Chaudhuri, 2024); sharper.
        gdp: likewise, from false positives and negatives (Nasr et al., USENIX Security 2023); sharper still, but its
            threshold is chosen on one half of the canaries and tested on the other.
        ceiling_one_run: what `one_run` would be if every guess on all canaries had been right.
        ceiling_f_dp: likewise.
        canaries: m.
        delta: for which the bounds are.
        significance: probability with which a bound may be wrong.
    """

    one_run: float
    f_dp: float
    gdp: float
    ceiling_one_run: float
    ceiling_f_dp: float
    canaries: int
    delta: float
    significance: float


def estimate_epsilon(
    scores: Sequence[float] | NDArray[np.float64],
    included: Sequence[bool] | NDArray[np.bool_],
    *,
    delta: float,
    significance: float = 0.05,
    shares: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
) -> EpsilonEstimate:
    """Return all lower bounds from the canaries' scores.

    Args:
        scores: (m,) higher where the auditor believes a canary was in.
        included: (m,) whether it was.
        delta: of the claim, in (0, 1).
        significance: in (0, 1).
        shares: of canaries on which to guess, half of them those with the highest scores; each is tried at
            `significance / len(shares)` (Bonferroni).

    Raises:
        ValueError: numbers out of range, scores that are not finite, or all canaries in (or out).
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    _check(values, truth, delta, significance)
    count, level = len(values), significance / len(shares)
    order = np.argsort(values, kind="stable")
    one, sharper = 0.0, 0.0
    for share in shares:
        side = max(1, int(count * share / 2))
        right = int(truth[order[-side:]].sum() + (~truth[order[:side]]).sum())
        one = max(one, one_run(count, 2 * side, right, delta=delta, significance=level))
        sharper = max(sharper, f_dp(count, 2 * side, right, delta=delta, significance=level))
    whole = count // 2 * 2
    return EpsilonEstimate(
        one_run=one,
        f_dp=sharper,
        gdp=gaussian(values, truth, delta=delta, significance=significance),
        ceiling_one_run=one_run(count, whole, whole, delta=delta, significance=level),
        ceiling_f_dp=f_dp(count, whole, whole, delta=delta, significance=level),
        canaries=count,
        delta=delta,
        significance=significance,
    )


def one_run(canaries: int, guesses: int, right: int, *, delta: float, significance: float = 0.05) -> float:
    """Return the largest epsilon that `right` of `guesses` guesses refute (Steinke et al., 2023, Theorem 5.2).

    It uses the theorem's bound on p.

    Args:
        canaries: m; each was in by a fair coin.
        guesses: r, on how many the auditor did not abstain.
        right: v, how many of these were right.
        delta: of the claim.
        significance: of the test.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"expected 0 <= right <= guesses <= canaries, got {right}, {guesses}, {canaries}")

    def p_value(epsilon: float) -> float:
        rate = special.expit(epsilon)
        least = np.arange(right, 0, -1)
        # P[Bin(r, rate) >= v - i] for i = 0 .. v
        tails = np.append(special.betainc(least, guesses - least + 1, rate), 1.0)
        alpha = np.max((tails[1:] - tails[0]) / np.arange(1, right + 1)) if right else 0.0
        return float(tails[0] + 2 * canaries * delta * alpha)

    return _largest(lambda epsilon: p_value(epsilon) <= significance)


def f_dp(canaries: int, guesses: int, right: int, *, delta: float, significance: float = 0.05) -> float:
    """Return the largest epsilon refuted if the trade-off curve is Gaussian (Mahloujifar et al., arXiv 2410.22235).

    This is their Algorithm 3. Arguments are those of `one_run`.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"expected 0 <= right <= guesses <= canaries, got {right}, {guesses}, {canaries}")

    def refuted(epsilon: float) -> bool:
        mu = mu_of(epsilon, delta)
        r, h = significance * right / canaries, significance * (guesses - right) / canaries
        for i in range(right - 1, -1, -1):
            higher = max(h, float(special.ndtr(special.ndtri(min(r, 1.0)) - mu)))
            if higher == h:
                break  # nothing changes from here on
            h, r = higher, min(r + i / (guesses - i) * (higher - h), 1.0)
        return r + h > guesses / canaries

    return _largest(refuted)


def gaussian(
    scores: NDArray[np.float64], included: NDArray[np.bool_], *, delta: float, significance: float = 0.05
) -> float:
    """Return the largest epsilon that rates of false positives and negatives refute (Nasr et al., 2023).

    Both rates are bounded by Clopper and Pearson's intervals. The threshold is the best on every other canary and is
    tested on the rest.

    Args:
        scores: (m,), or several ways to score (k, m); the best is chosen with the threshold.
        included: (m,) whether each canary was in.
        delta: of the claim.
        significance: of the test.
    """
    rows = np.atleast_2d(scores)
    choose, test = (slice(start, None, 2) for start in (0, 1))
    found = [_best(row[choose], included[choose], CAUTION * significance) for row in rows]
    way = max(range(len(rows)), key=lambda i: found[i][0])
    (mu,) = _gdp(rows[way, test], included[test], np.array([found[way][1]]), significance)
    return epsilon_of(float(mu), delta) if mu > 0 else 0.0


def ceiling_gaussian(canaries: int, *, delta: float, significance: float = 0.05) -> float:
    """Return what `gaussian` finds where it tells all of so many canaries, half of them in, apart."""
    truth = np.arange(canaries) // 2 % 2 == 0
    return gaussian(truth.astype(np.float64), truth, delta=delta, significance=significance)


def _best(scores: NDArray[np.float64], included: NDArray[np.bool_], significance: float) -> tuple[float, float]:
    """Return the largest lower bound on mu of any threshold that is tried, and that threshold."""
    values = np.unique(scores)[::-1]
    ranks = np.concatenate([np.geomspace(1, len(values), 64), np.linspace(1, len(values), 64)])
    tried = values[np.unique(ranks.astype(np.int64)) - 1]  # dense at the top, where false positives are rare
    mu = _gdp(scores, included, tried, significance)
    return float(mu.max()), float(tried[mu.argmax()])


def _gdp(
    scores: NDArray[np.float64], included: NDArray[np.bool_], thresholds: NDArray[np.float64], significance: float
) -> NDArray[np.float64]:
    """Return the lower bounds on mu of the tests `score >= threshold` (t,); both rates of one test hold together."""
    out, inside = np.sort(scores[~included]), np.sort(scores[included])
    taken = len(out) - np.searchsorted(out, thresholds)
    fpr = _at_most(taken, len(out), significance / 2)
    fnr = _at_most(np.searchsorted(inside, thresholds), len(inside), significance / 2)
    return np.asarray(special.ndtri(1 - fpr) - special.ndtri(fnr), dtype=np.float64)


def _at_most(successes: NDArray[np.int64], trials: int, significance: float) -> NDArray[np.float64]:
    """Return Clopper and Pearson's one-sided upper bounds on rates."""
    left = np.maximum(trials - successes, 1)
    bound = special.betaincinv(successes + 1, left, 1 - significance)
    return np.where(successes >= trials, 1.0, bound)


def epsilon_from_identification(
    hits: int, trials: int, chance: float, *, delta: float, significance: float = 0.05
) -> float:
    """Return the largest epsilon refuted by naming `hits` of `trials` records among others, of any mechanism.

    Who names a record with probability `chance` without looking names it with exp(epsilon) chance + delta at most, and
    fails with exp(-epsilon) (1 - chance - delta) at least (`eval.privacy.reconstruction_robustness.bound_from_curve`).
    Records count as independent.

    Args:
        hits: how many were named.
        trials: of how many.
        chance: 1 / N among N equally likely ones, in (0, 1).
        delta: of the claim.
        significance: of the Clopper-Pearson bound on the rate.

    Raises:
        ValueError: numbers out of range.
    """
    if not 0 <= hits <= trials or trials < 1 or not 0 < chance < 1:
        raise ValueError(f"expected 0 <= hits <= trials and a chance in (0, 1), got {hits}, {trials}, {chance}")
    rate = rate_lower_bound(hits, trials, significance)
    named = math.log((rate - delta) / chance) if rate > delta else 0.0
    failed = math.log((1 - chance - delta) / (1 - rate)) if chance + delta < 1 and rate < 1 else 0.0
    return max(0.0, named, failed)


def delta_of(mu: float, epsilon: float) -> float:
    """Return delta of a mu-GDP mechanism at epsilon (Dong, Roth, Su, 2022, Corollary 1)."""
    return gaussian_delta(mu, epsilon)


def epsilon_of(mu: float, delta: float) -> float:
    """Return epsilon of a mu-GDP mechanism at delta; 0 where its delta is not above that at all."""
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(mu, high) > delta:
        high *= 2
    return float(optimize.brentq(lambda e: delta_of(mu, e) - delta, 0.0, high, xtol=1e-10))


def mu_of(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian mechanism that is just (epsilon, delta)-private."""
    high = 1.0
    while delta_of(high, epsilon) < delta:
        high *= 2
    return float(optimize.brentq(lambda mu: delta_of(mu, epsilon) - delta, 1e-12, high, xtol=1e-12))


def _largest(refuted: Callable[[float], bool]) -> float:
    """Return the largest epsilon in [0, LARGEST] that is refuted, to 1e-6; 0 where none is."""
    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        if high == LARGEST:
            return LARGEST
        low, high = high, min(2 * high, LARGEST)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _check(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, significance: float) -> None:
    if scores.shape != included.shape or scores.ndim != 1:
        raise ValueError(f"expected one score and one truth for each canary, got {scores.shape}, {included.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"expected finite scores, got {int((~np.isfinite(scores)).sum())} that are not")
    if included.all() or not included.any():
        raise ValueError("expected canaries in and out, got one kind only")
    for name, value in (("delta", delta), ("significance", significance)):
        if not 0 < value < 1:
            raise ValueError(f"expected {name} in (0, 1), got {value}")
