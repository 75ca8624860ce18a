"""What noise costs: against integrals, Monte Carlo and published figures."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from reference.subsampled_gaussian import delta_of_one_gaussian, epsilon_at_least, losses

from fl.privacy.accounting import (
    RENYI_ORDERS,
    Charge,
    calibrate_noise,
    compute_epsilon,
    delta_curve,
    gaussian_epsilon,
    merge_charges,
)


@pytest.mark.parametrize(("rate", "steps", "rdp", "prv"), [(0.1, 10_000, 11.62, 10.88), (1 / 12, 12_000, 10.62, 9.94)])
def test_published_noise(rate: float, steps: int, rdp: float, prv: float) -> None:
    assert calibrate_noise(4.0, 1e-5, rate, steps, "prv") == pytest.approx(prv, abs=0.02)
    assert calibrate_noise(4.0, 1e-5, rate, steps, "rdp") == pytest.approx(rdp, abs=0.02)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (0.5, 1), (11.62, 1000), (3.0, 7), (50.0, 2)])
@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_full_batches_are_the_analytic_gaussian(sigma: float, steps: int, delta: float) -> None:
    found = compute_epsilon([Charge(sigma, 1.0, steps)], delta)
    mu = math.sqrt(steps) / sigma
    assert found <= compute_epsilon([Charge(sigma, 1.0, steps)], delta, "rdp")
    assert delta_of_one_gaussian(found, mu) == pytest.approx(min(delta, delta_of_one_gaussian(0.0, mu)), rel=1e-6)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(2.0, 1.0, 10), (1.0, 1.0, 1), (5.0, 1.0, 30), (1.1, 0.02, 500)])
def test_what_is_called_rdp_is_the_rdp_accountants_value(sigma: float, rate: float, steps: int) -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(sigma, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = accountant.get_epsilon(delta=1e-5, alphas=[1 + x / 20 for x in range(1, 2000)])
    ours = compute_epsilon([Charge(sigma, rate, steps)], 1e-5, "rdp")
    assert ours == pytest.approx(theirs, rel=5e-3)
    assert ours > compute_epsilon([Charge(sigma, rate, steps)], 1e-5, "prv")


def test_gaussian_epsilon_is_what_the_authors_code_may_claim() -> None:
    # A2.1, shuffled batches without amplification, record zeroed out or replaced
    assert gaussian_epsilon(math.sqrt(1000) / 11.62, 1e-5) == pytest.approx(14.7, abs=0.05)
    assert gaussian_epsilon(2 * math.sqrt(1000) / 11.62, 1e-5) == pytest.approx(37.3, abs=0.1)
    assert gaussian_epsilon(math.sqrt(1000) / 10.62, 1e-5) == pytest.approx(16.5, abs=0.05)
    assert gaussian_epsilon(1e-9, 1e-5) == 0.0


def test_the_numerical_accountant_meets_the_analytic_one() -> None:
    from opacus.accountants import PRVAccountant

    prv = PRVAccountant()
    prv.history = [(5.0, 1.0, 30)]
    exact = gaussian_epsilon(math.sqrt(30) / 5, 1e-5)
    with np.errstate(divide="ignore"):
        assert exact <= prv.get_epsilon(delta=1e-5, eps_error=1e-3) <= exact * (1 + 1e-3)
    assert exact < compute_epsilon([Charge(5.0, 1.0, 30), Charge(50.0, 0.5, 1)], 1e-5) < exact * 1.02


def test_the_numerical_accountant_is_opacus_own_to_the_bit() -> None:
    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    from fl.privacy.prv_accountant import NumericalAccountant, renyi_divergences

    for history in ([(0.7, 0.3, 4)], [(3.0, 0.1, 900)], [(1.0, 0.02, 30), (2.0, 0.4, 5), (1.0, 0.02, 1)]):
        ours, theirs = NumericalAccountant(), PRVAccountant()
        ours.history = theirs.history = history
        assert ours.get_epsilon(delta=1e-5) == theirs.get_epsilon(delta=1e-5)
    for sigma, rate in ((0.7, 0.3), (20.0, 0.01), (2.0, 1.0)):
        found = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=RENYI_ORDERS)
        assert renyi_divergences(sigma, rate, RENYI_ORDERS).tolist() == np.nan_to_num(found, nan=np.inf).tolist()


def test_rdp_is_above_prv_and_prv_above_monte_carlo() -> None:
    draw = np.random.default_rng(0)
    for trial in range(20):
        sigma, rate = float(draw.uniform(0.6, 3)), float(10 ** draw.uniform(-1.5, -0.3))
        charges = [Charge(sigma, rate, int(draw.integers(1, 30)))]
        prv, rdp = compute_epsilon(charges, 1e-3), compute_epsilon(charges, 1e-3, "rdp")
        low = epsilon_at_least(sigma, rate, charges[0].steps, 1e-3, seed=trial)
        assert low <= prv <= rdp
        assert low > 0.8 * prv - 0.05


def test_the_curve_is_exact_for_full_batches_and_an_upper_bound_elsewhere() -> None:
    exact = delta_curve([Charge(4.0, 1.0, 4), Charge(2.0, 1.0, 1)])
    for epsilon in (0.0, 0.3, 2.0):
        assert exact(epsilon) == pytest.approx(delta_of_one_gaussian(epsilon, math.sqrt(0.5)), rel=1e-6)
    for charge in (Charge(1.0, 0.2, 5), Charge(2.0, 0.5, 4), Charge(0.6, 0.02, 9)):
        bound, drawn = (
            delta_curve([charge]),
            losses(charge.noise_multiplier, charge.rate, charge.steps, 400_000, seed=1),
        )
        for epsilon in (0.0, 0.5, 1.0, 3.0):
            excess = np.maximum(0.0, -np.expm1(epsilon - drawn))
            error = 4 * float(excess.std()) / math.sqrt(len(drawn))
            assert excess.mean() - error <= bound(epsilon) <= 1.05 * (excess.mean() + error) + 1e-3
        assert 0.9e-5 < bound(compute_epsilon([charge], 1e-5)) <= 1e-5  # what epsilon is found from
    assert delta_curve([])(0.0) == 0.0
    assert delta_curve([Charge(0.0, 0.5, 1)])(5.0) == 1.0


def test_where_the_numerical_accountant_fails_the_other_one_s_curve_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.accountants import PRVAccountant

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    charge = Charge(1.0, 0.2, 5)
    epsilon = compute_epsilon([charge], 1e-5, "rdp")
    monkeypatch.setattr(PRVAccountant, "_get_dprv", fail)
    assert delta_curve([charge])(epsilon) == pytest.approx(1e-5, rel=1e-9)


def test_equal_charges_are_one_whatever_their_order() -> None:
    a, b = Charge(2.0, 0.1, 3), Charge(1.0, 0.2, 4)
    assert merge_charges([a, b, a]) == (Charge(2.0, 0.1, 6), b)
    assert compute_epsilon([a, b, a], 1e-5) == pytest.approx(compute_epsilon([b, a, a], 1e-5), rel=1e-6)
    assert compute_epsilon([], 1e-5) == 0.0
    assert compute_epsilon([Charge(0.0, 0.1, 1)], 1e-5) == math.inf
    assert compute_epsilon([Charge(0.0, 0.1, 0)], 1e-5) == 0.0


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(0.5, 0.02, 300), (4.0, 0.1, 40), (2.0, 1.0, 12)])
def test_calibrated_noise_just_fits(accountant: str, epsilon: float, rate: float, steps: int) -> None:
    sigma = calibrate_noise(epsilon, 1e-5, rate, steps, accountant)  # type: ignore[arg-type]
    assert compute_epsilon([Charge(sigma, rate, steps)], 1e-5, accountant) <= epsilon  # type: ignore[arg-type]
    assert compute_epsilon([Charge(sigma * 0.998, rate, steps)], 1e-5, accountant) > epsilon  # type: ignore[arg-type]


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="expected rate in"):
        Charge(1.0, 0.0, 1)
    with pytest.raises(ValueError, match="expected steps >= 0"):
        Charge(1.0, 0.5, -1)
    with pytest.raises(ValueError, match="expected noise_multiplier >= 0"):
        Charge(-1.0, 0.5, 1)
    with pytest.raises(ValueError, match="expected delta in"):
        compute_epsilon([Charge(1.0, 0.5, 1)], 0.0)
    with pytest.raises(ValueError, match="expected epsilon > 0"):
        calibrate_noise(0.0, 1e-5, 0.1, 1)
