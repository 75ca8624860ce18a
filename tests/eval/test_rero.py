"""Reconstruction robustness: the figures of the literature's schedule, and bounds that no best test beats."""

import pytest

from eval import rero
from eval.epsilon import delta_of

SCHEDULE = {"sigma": 11.62, "q": 0.1, "steps": 10_000}


@pytest.mark.parametrize(
    ("kappa", "limit", "step"),
    [(1 / 2, 0.806, 0.534), (1 / 50, 0.1167, 0.0246), (1 / 62, 0.1004, 0.0199), (1e-3, 0.0129, 0.0013)],
)
def test_the_published_schedule(kappa: float, limit: float, step: float) -> None:
    assert rero.limit(kappa, **SCHEDULE) == pytest.approx(limit, rel=4e-3)
    assert rero.full_batch(kappa, 11.62) == pytest.approx(step, rel=3e-2)


def test_a_curve_bounds_what_the_best_test_reaches() -> None:
    for kappa in (0.5, 0.02, 1e-3):
        for mu in (0.1, 0.9, 3.0):
            bound = rero.from_curve(kappa, lambda epsilon, mu=mu: delta_of(mu, epsilon))  # type: ignore[misc]
            # for a Gaussian mechanism the bound is tight (Kaissis et al., 2023)
            assert bound == pytest.approx(rero.full_batch(kappa, 1 / mu), rel=1e-5)


def test_simulation_meets_the_closed_form_and_knows_sampling() -> None:
    found = rero.sampled(0.1, sigma=2.0, q=1.0, steps=4, trials=40_000)
    assert found == pytest.approx(rero.full_batch(0.1, 2.0, 4), abs=0.01)
    rare = rero.sampled(0.1, sigma=2.0, q=0.25, steps=4, trials=40_000)
    assert 0.1 < rare < found - 0.1
    assert rare == rero.sampled(0.1, sigma=2.0, q=0.25, steps=4, trials=40_000)


@pytest.mark.parametrize("settings", [(0.0, 1.0, 1), (1.0, 1.0, 1), (0.5, 0.0, 1), (0.5, 1.0, 0)])
def test_bad_settings(settings: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        rero.full_batch(*settings)
