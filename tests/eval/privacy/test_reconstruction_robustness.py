"""Reconstruction robustness: the figures of the literature's schedule, and bounds that no best test beats."""

import pytest
import torch
from reference import reconstruction_robustness as reference
from torch import Tensor

from eval.metrics.statistics import rate_lower_bound
from eval.privacy import reconstruction_robustness
from eval.privacy.canaries import Probe
from eval.privacy.epsilon_bounds import delta_of
from fl.client import Client, LossGradient
from fl.gradient import autograd_derivative
from fl.method import Step
from fl.methods.dp_fedavg import DPFedAvg
from fl.privacy.accounting import Charge
from fl.privacy.dp_sgd import Privatization, private_gradient
from fl.privacy.gaussian_noise import Noise
from fl.seeds import stream
from fl.types import Batch, Task

SCHEDULE = {"sigma": 11.62, "q": 0.1, "steps": 10_000}


@pytest.mark.parametrize(
    ("kappa", "limit", "step"),
    [(1 / 2, 0.806, 0.534), (1 / 50, 0.1167, 0.0246), (1 / 62, 0.1004, 0.0199), (1e-3, 0.0129, 0.0013)],
)
def test_the_published_schedule(kappa: float, limit: float, step: float) -> None:
    assert reference.central_limit_estimate(kappa, **SCHEDULE) == pytest.approx(limit, rel=4e-3)
    bound = reconstruction_robustness.bound_from_charges(kappa, (Charge(11.62, 1.0, 1),))
    assert bound == pytest.approx(step, rel=3e-2)


def test_a_curve_bounds_what_the_best_test_reaches() -> None:
    for kappa in (0.5, 0.02, 1e-3):
        for mu in (0.1, 0.9, 3.0):
            bound = reconstruction_robustness.bound_from_curve(kappa, lambda epsilon, mu=mu: delta_of(mu, epsilon))  # type: ignore[misc]
            # for a Gaussian mechanism the bound is tight (Kaissis et al., 2023)
            assert bound == pytest.approx(reference.full_batch_bound(kappa, 1 / mu), rel=1e-5)


def test_simulation_meets_the_closed_form_and_knows_sampling() -> None:
    found = reference.simulate_poisson(0.1, sigma=2.0, q=1.0, steps=4, trials=40_000)
    assert found == pytest.approx(reference.full_batch_bound(0.1, 2.0, 4), abs=0.01)
    rare = reference.simulate_poisson(0.1, sigma=2.0, q=0.25, steps=4, trials=40_000)
    assert 0.1 < rare < found - 0.1
    assert rare == reference.simulate_poisson(0.1, sigma=2.0, q=0.25, steps=4, trials=40_000)


def test_charges_come_to_the_bound_of_what_they_release() -> None:
    assert reconstruction_robustness.bound_from_charges(0.02, ()) == pytest.approx(0.02)
    full = (Charge(4.0, 1.0, 4), Charge(2.0, 1.0, 1))  # half a unit of signal each, squared
    assert reconstruction_robustness.bound_from_charges(0.02, full) == pytest.approx(
        reference.full_batch_bound(0.02, 2.0, 2), rel=1e-9
    )
    assert reconstruction_robustness.bound_from_charges(0.02, (Charge(0.0, 0.5, 1),)) == 1.0
    for charge in (Charge(1.0, 0.5, 4), Charge(2.0, 0.5, 4), Charge(0.7, 0.1, 10)):
        bound = reconstruction_robustness.bound_from_charges(0.1, (charge,))
        reached = reference.simulate_poisson(
            0.1, charge.noise_multiplier, charge.rate, charge.steps, trials=40_000, seed=3
        )
        assert reached - 0.01 < bound < reached + 0.03


# ---- whom the package's own noisy step gives away, at most -----------------------------------------------------------
TRIALS, CLIP = 4000, 0.5


def releases(sigma: float, candidates: Batch, seed: int) -> tuple[Tensor, Tensor]:
    """What steps on the first of the candidates release (trials, d), and the clipped gradient of each (N, d)."""
    size = candidates.inputs.shape[-1]
    client = Client(Task(Probe(size), (1, 1, size), 2, "head."), DPFedAvg(noise_multiplier=1.0))
    params = client.method.initial_parameters(client.task, stream(0, "init"))
    step = Step(client.task, params, {}, {}, {}, 0)
    grad = LossGradient(client, step, ("body.weight",), {}, client.fixed_statistics_model, None, autograd_derivative)

    def released(batch: Batch, key: Tensor | None, noise: float) -> Tensor:
        source = None if key is None else Noise(key)
        how = Privatization(clip=CLIP, noise_multiplier=noise, denominator=1)
        found = private_gradient(grad, params, batch, how, source)
        return found["body.weight"].flatten()  # type: ignore[union-attr]

    keys = torch.randint(2**62, (TRIALS, 2), generator=stream(seed, "rero", str(sigma)))
    with torch.no_grad():
        first = candidates.take(torch.tensor([0]))
        seen = torch.vmap(lambda key: released(first, key, sigma))(keys)
        each = [released(candidates.take(torch.tensor([i])), None, 0.0) for i in range(len(candidates))]
    return seen, torch.stack(each)


def named(sigma: float, n: int, seed: int = 0) -> int:
    """How often the likelihood ratio names the right one of `n`: opposites of two, else all at right angles."""
    size = 1 if n == 2 else n
    inputs = 20 * CLIP * torch.eye(size, dtype=torch.float64).view(size, 1, 1, size)
    candidates = Batch(inputs, torch.zeros(size, dtype=torch.int64))
    if n == 2:
        candidates = Batch(inputs.repeat(2, 1, 1, 1), torch.tensor([0, 1]))
    seen, gradients = releases(sigma, candidates, seed)
    likelihood = seen @ gradients.T - gradients.square().sum(1) / 2
    return int((likelihood.argmax(1) == 0).sum())


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("n", [2, 10, 50])
def test_the_best_test_on_the_noisy_step_stays_below_the_bound(sigma: float, n: int) -> None:
    hits, bound = named(sigma, n), reconstruction_robustness.bound_from_charges(1 / n, (Charge(sigma, 1.0, 1),))
    assert rate_lower_bound(hits, TRIALS, 0.025) <= bound
    if n == 2:  # where the bound is tight, half the noise is found out
        assert hits / TRIALS == pytest.approx(bound, abs=0.03)
        assert sigma == 8.0 or rate_lower_bound(named(sigma / 2, n), TRIALS, 0.025) > bound


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_chance_is_a_probability_between_zero_and_one(kappa: float) -> None:
    with pytest.raises(ValueError, match="expected kappa"):
        reconstruction_robustness.bound_from_charges(kappa, ())
