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
from scipy import optimize, special, stats

from eval.statistics import at_most

LARGEST = 100.0
"""No lower bound on epsilon above this is looked for."""


@dataclass(frozen=True)
class Audit:
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


def audit(
    scores: Sequence[float] | NDArray[np.float64],
    included: Sequence[bool] | NDArray[np.bool_],
    *,
    delta: float,
    significance: float = 0.05,
    shares: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
) -> Audit:
    """All lower bounds from the canaries' scores.

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
    return Audit(
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
    """Largest epsilon that `right` of `guesses` guesses refute (Steinke et al., 2023, Theorem 5.2 and its bound on p).

    Args:
        canaries: m, of which each was in by a fair coin.
        guesses: r, on how many the auditor did not abstain.
        right: v, how many of these were right.
        delta: of the claim.
        significance: of the test.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"expected 0 <= right <= guesses <= canaries, got {right}, {guesses}, {canaries}")

    def p_value(epsilon: float) -> float:
        rate = special.expit(epsilon)
        # P[Bin(r, rate) >= v - i] for i = 0 .. v
        tails = stats.binom.sf(np.arange(right - 1, -2, -1), guesses, rate)
        alpha = np.max((tails[1:] - tails[0]) / np.arange(1, right + 1)) if right else 0.0
        return float(tails[0] + 2 * canaries * delta * alpha)

    return _largest(lambda epsilon: p_value(epsilon) <= significance)


def f_dp(canaries: int, guesses: int, right: int, *, delta: float, significance: float = 0.05) -> float:
    """The same for mechanisms with a Gaussian trade-off curve (Mahloujifar et al., arXiv 2410.22235, Algorithm 3).

    Arguments are those of `one_run`.
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
    """The same from rates of false positives and negatives (Nasr et al., 2023), with Clopper-Pearson intervals.

    The threshold is the best on every other canary and is tested on the rest.
    """
    choose, test = (slice(start, None, 2) for start in (0, 1))
    best = max(np.unique(scores[choose]), key=lambda t: _gdp(scores[choose], included[choose], float(t), significance))
    mu = _gdp(scores[test], included[test], float(best), significance)
    return epsilon_of(mu, delta) if mu > 0 else 0.0


def _gdp(scores: NDArray[np.float64], included: NDArray[np.bool_], threshold: float, significance: float) -> float:
    """The lower bound on mu of the test `score >= threshold`; both rates hold together."""
    taken = scores >= threshold
    out, missed = int((taken & ~included).sum()), int((~taken & included).sum())
    fpr = at_most(out, int((~included).sum()), significance / 2)
    fnr = at_most(missed, int(included.sum()), significance / 2)
    return float(special.ndtri(1 - fpr) - special.ndtri(fnr))


def delta_of(mu: float, epsilon: float) -> float:
    """Delta of a mu-GDP mechanism at epsilon (Dong, Roth, Su, 2022, Corollary 1)."""
    if mu <= 0:
        return 0.0
    # e^epsilon times a tail that may be far below the smallest number
    second = math.exp(epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2)))
    return float(special.ndtr(-epsilon / mu + mu / 2)) - second


def epsilon_of(mu: float, delta: float) -> float:
    """Epsilon of a mu-GDP mechanism at delta; 0 where its delta is not above that at all."""
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(mu, high) > delta:
        high *= 2
    return float(optimize.brentq(lambda e: delta_of(mu, e) - delta, 0.0, high, xtol=1e-10))


def mu_of(epsilon: float, delta: float) -> float:
    """The Gaussian mechanism that is just (epsilon, delta)-private."""
    high = 1.0
    while delta_of(high, epsilon) < delta:
        high *= 2
    return float(optimize.brentq(lambda mu: delta_of(mu, epsilon) - delta, 1e-12, high, xtol=1e-12))


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest epsilon in [0, LARGEST] that is refuted, to 1e-6; 0 where none is."""
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
