"""Lower bounds on epsilon: never above the truth, above a wrong claim, and never beyond what could be shown."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from eval.metrics import statistics
from eval.privacy import epsilon_bounds

DELTA, CLAIM = 1e-5, 4.0


def scores(seed: int, count: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """What an optimal auditor of a mu-GDP mechanism sees."""
    draw = np.random.default_rng(seed)
    included = draw.random(count) < 0.5
    return draw.normal(size=count) + mu * included, included


def test_the_gaussian_mechanism_there_and_back() -> None:
    for claim in (0.1, 1.0, 4.0, 16.0):
        mu = epsilon_bounds.mu_of(claim, DELTA)
        assert epsilon_bounds.epsilon_of(mu, DELTA) == pytest.approx(claim, rel=1e-8)
        grid = np.linspace(-20, 40, 400_001)
        density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
        shifted = np.exp(-((grid - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
        delta = np.trapezoid(np.maximum(shifted - math.exp(claim) * density, 0), grid)
        assert delta == pytest.approx(DELTA, rel=1e-3)
    assert epsilon_bounds.epsilon_of(1e-6, DELTA) == 0.0


def test_right_mechanisms_are_never_flagged_and_broken_ones_are() -> None:
    mu = epsilon_bounds.mu_of(CLAIM, DELTA)
    for seed in range(6):
        found = epsilon_bounds.estimate_epsilon(*scores(seed, 1000, mu), delta=DELTA)
        assert 0 < found.one_run <= found.f_dp < CLAIM
        assert found.gdp < CLAIM
        broken = epsilon_bounds.estimate_epsilon(
            *scores(seed, 1000, 2 * mu), delta=DELTA
        )  # noise halved, or clipping at twice the norm
        assert broken.gdp > CLAIM
        assert broken.f_dp > found.f_dp


def test_nothing_to_see_gives_nothing() -> None:
    found = epsilon_bounds.estimate_epsilon(*scores(1, 400, 0.0), delta=DELTA)
    assert found.one_run < 0.3
    assert found.gdp < 0.3


def test_without_noise_the_ceiling_is_reached_and_named() -> None:
    values, included = scores(0, 1000, 1e6)
    values = np.where(included, 1e6, -1e6) + values
    included[:] = np.arange(1000) % 2 == 0
    values = np.where(included, 1.0, -1.0) + np.arange(1000) * 1e-6
    found = epsilon_bounds.estimate_epsilon(values, included, delta=DELTA)
    assert found.one_run == pytest.approx(found.ceiling_one_run, rel=1e-6)
    assert found.f_dp == pytest.approx(found.ceiling_f_dp, rel=1e-6)
    # all of 1000 right, without delta: e^eps / (1 + e^eps) = .05^(1/1000)
    share = 0.05 ** (1 / 1000)
    assert epsilon_bounds.one_run(1000, 1000, 1000, delta=1e-12) == pytest.approx(
        math.log(share / (1 - share)), abs=1e-4
    )


def test_one_run_against_its_formula() -> None:
    """The p-value at the bound is the significance (Steinke et al., 2023)."""
    from scipy.stats import binom

    canaries, guesses, right = 500, 200, 150
    found = epsilon_bounds.one_run(canaries, guesses, right, delta=DELTA)
    rate = 1 / (1 + math.exp(-found))
    beta = binom.sf(right - 1, guesses, rate)
    alpha = max((binom.sf(right - i - 1, guesses, rate) - beta) / i for i in range(1, right + 1))
    assert beta + 2 * canaries * DELTA * alpha == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "included", "delta", "words"),
    [
        ([1.0, 2.0], [True], DELTA, "one score and one truth"),
        ([1.0, math.nan], [True, False], DELTA, "finite scores"),
        ([1.0, 2.0], [True, True], DELTA, "in and out"),
        ([1.0, 2.0], [True, False], 0.0, "delta in"),
    ],
)
def test_epsilon_bounds_refuse_bad_input(values: list[float], included: list[bool], delta: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        epsilon_bounds.estimate_epsilon(values, included, delta=delta)
    with pytest.raises(ValueError, match="right <= guesses"):
        epsilon_bounds.one_run(10, 5, 6, delta=DELTA)


def test_the_better_of_several_scores_is_taken_and_costs_no_validity() -> None:
    mu = epsilon_bounds.mu_of(CLAIM, DELTA)
    for seed in range(6):
        values, included = scores(seed, 2000, mu)
        noise = np.random.default_rng(100 + seed).normal(size=(20, 2000))
        alone = epsilon_bounds.gaussian(values, included, delta=DELTA)
        assert epsilon_bounds.gaussian(np.vstack([noise, values]), included, delta=DELTA) == pytest.approx(
            alone, rel=0.5
        )
        assert 0 < alone < CLAIM
        assert epsilon_bounds.gaussian(noise, included, delta=DELTA) < 0.5


def test_rates_have_clopper_and_pearson_s_bounds() -> None:
    counts = np.array([0, 1, 7, 49, 50])
    expected = [statistics.rate_upper_bound(count, 50, 0.02) for count in counts.tolist()]
    assert epsilon_bounds._at_most(counts, 50, 0.02).tolist() == pytest.approx(expected, rel=1e-9)


def test_the_gaussian_ceiling_is_what_telling_all_apart_gives() -> None:
    out = 0.025 ** (1 / 250)  # no error among 250 of either kind
    mu = float(norm.ppf(out) - norm.ppf(1 - out))
    assert epsilon_bounds.ceiling_gaussian(1000, delta=DELTA) == pytest.approx(
        epsilon_bounds.epsilon_of(mu, DELTA), rel=1e-9
    )


def test_naming_refutes_what_its_rate_contradicts_and_no_more() -> None:
    found = epsilon_bounds.epsilon_from_identification(8, 8, 1 / 50, delta=DELTA)
    assert found == pytest.approx(math.log((0.05 ** (1 / 8) - DELTA) * 50), rel=1e-9)
    assert epsilon_bounds.epsilon_from_identification(1, 50, 1 / 50, delta=DELTA) == 0.0
    assert epsilon_bounds.epsilon_from_identification(
        1000, 1000, 1 / 2, delta=DELTA
    ) == pytest.approx(  # by the rate of failures
        math.log((0.5 - DELTA) / (1 - 0.05 ** (1 / 1000))), rel=1e-9
    )
    draw = np.random.default_rng(0)
    for claim in (0.5, 2.0):  # randomized response among N, the most that pure differential privacy allows
        for n in (2, 50):
            rate = math.exp(claim) / (math.exp(claim) + n - 1)
            refuted = [
                epsilon_bounds.epsilon_from_identification(int(draw.binomial(400, rate)), 400, 1 / n, delta=DELTA)
                > claim
                for _ in range(200)
            ]
            assert sum(refuted) <= 20  # 5 % of them, at most
    with pytest.raises(ValueError, match="a chance in"):
        epsilon_bounds.epsilon_from_identification(1, 2, 1.0, delta=DELTA)


@pytest.mark.parametrize("limit", [0.0, 0.3, 30.0, 70.0, 99.0])
def test_no_bound_goes_beyond_what_was_refuted(limit: float) -> None:
    found = epsilon_bounds._largest(lambda value: value <= limit)
    assert limit - 1e-6 <= found <= limit
    assert epsilon_bounds._largest(lambda _: True) == epsilon_bounds.LARGEST
