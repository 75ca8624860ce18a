from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats

from fl.local.sampling import PoissonPhase, batch_sizes, plan_batches, sequential_order
from fl.seeds import stream
from fl.types import Group, Phase


def phase(**settings: Any) -> Phase:
    return Phase(groups=(Group(lr=0.1),), **settings)


def sizes(phase: Phase, n: int) -> list[int]:
    (steps,) = plan_batches([phase], n, stream(0))
    return [len(index) for step in steps for index in step]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"epochs": 2, "batch_size": 4}, [4, 4, 2, 4, 4, 2]),
        ({"epochs": 1}, [10]),
        ({"epochs": 1, "batch_size": 50}, [10]),
        ({"steps": 4, "batch_size": 4}, [4, 4, 2, 4]),
        ({"steps": 3}, [10, 10, 10]),
        ({"epochs": 1, "batch_size": 4, "batches_per_step": 2}, [4, 4]),
        ({"steps": 2, "batch_size": 4, "batches_per_step": 2}, [4, 4, 2, 4]),
        ({"epochs": 0}, []),
    ],
)
def test_batch_sizes_follow_from_the_phase(settings: dict[str, Any], expected: list[int]) -> None:
    assert sizes(phase(**settings), 10) == expected


def test_an_epoch_sees_every_image_once_and_shuffles_anew() -> None:
    (steps,) = plan_batches([phase(epochs=3, batch_size=4)], 10, stream(0))
    epochs = torch.cat([index for (index,) in steps]).split(10)
    assert all(torch.equal(epoch.sort().values, torch.arange(10)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3


def test_sequential_goes_in_order() -> None:
    (steps,) = plan_batches([phase(steps=3, batch_size=4, sampler="sequential")], 10, stream(0))
    assert torch.equal(torch.cat([index for (index,) in steps]), torch.arange(10))


def test_poisson_takes_each_image_at_its_own_rate() -> None:
    (steps,) = plan_batches([phase(steps=2000, batch_size=3, sampler="poisson")], 10, stream(0))
    counts = torch.bincount(torch.cat([index for (index,) in steps]), minlength=10)
    assert len(steps) == 2000
    assert (counts / 2000 - 0.3).abs().max() < 0.04  # four standard deviations
    drawn = torch.tensor([len(index) for (index,) in steps])
    assert float(drawn.float().mean()) == pytest.approx(3, abs=0.15)
    assert float(drawn.float().var()) == pytest.approx(10 * 0.3 * 0.7, rel=0.15)
    assert int(drawn.min()) == 0


def test_the_same_stream_gives_the_same_plan() -> None:
    phases = [phase(epochs=2, batch_size=3), phase(steps=5, batch_size=2, sampler="poisson")]
    one, same, other = (plan_batches(phases, 7, stream(seed)) for seed in (1, 1, 2))
    assert str(one) == str(same)
    assert str(one) != str(other)


def test_no_image_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 image"):
        plan_batches([phase(epochs=1)], 0, stream(0))


def test_the_guess_of_an_unknown_order_has_the_same_schedule() -> None:
    order = plan_batches(
        [phase(epochs=2, batch_size=4), phase(steps=2, batches_per_step=2, batch_size=3)], 10, stream(0)
    )
    guess = sequential_order(batch_sizes(order), 10)
    assert batch_sizes(guess) == batch_sizes(order)
    assert guess[0][0][0].tolist() == [0, 1, 2, 3]
    assert guess[0][2][0].tolist() == [8, 9]
    assert guess[1][0][1].tolist() == [3, 4, 5]


def test_in_turn_wraps_around() -> None:
    ((((first,), (second,))),) = sequential_order((((4,), (4,)),), 5)
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 0, 1, 2]


@pytest.mark.parametrize(
    "settings",
    [{}, {"epochs": 1, "steps": 1}, {"epochs": 1, "optimizer": "lamb"}, {"epochs": 1, "sampler": "random"}],
)
def test_a_phase_checks_its_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        phase(**settings)


# ---- Poisson sampling at a public rate -------------------------------------------------------------------------------
def poisson(**settings: Any) -> PoissonPhase:
    return PoissonPhase(**{"groups": (Group(lr=0.1),), "epochs": 1, **settings})


@pytest.mark.parametrize("length", [93, 99, 105, 7, 100])
def test_an_epoch_has_as_many_steps_as_batches_fit(length: int) -> None:
    phase = poisson(batch_size=3, images=3 * length, rate=1 / length)
    for n in (3 * length, 5, 3 * length + 40):  # what the client really holds does not show
        assert len(plan_batches([phase], n, stream(0, n))[0]) == length


def test_every_image_enters_at_the_public_rate() -> None:
    n, rate, steps, batch = 150, 0.08, 400, 8
    counts, sizes = torch.zeros(n), []
    for client in range(20):
        (steps_taken,) = plan_batches(
            [poisson(batch_size=batch, rate=rate, images=100, epochs=None, steps=steps)], n, stream(client)
        )
        for (index,) in steps_taken:
            counts[index] += 1
            sizes.append(len(index))
    trials = 20 * steps
    spread = ((counts - trials * rate).square() / (trials * rate * (1 - rate))).sum()
    assert 1e-6 < stats.chi2.sf(float(spread), n) < 1 - 1e-6
    found = torch.tensor(sizes, dtype=torch.float64)
    expected = n * rate * (1 - rate)
    assert float(found.mean()) == pytest.approx(n * rate, abs=5 * (expected / trials) ** 0.5)
    assert float(found.var()) == pytest.approx(expected, rel=5 * (2 / trials) ** 0.5)


def test_a_client_of_one_batch_feeds_all_it_has() -> None:
    (steps,) = plan_batches([poisson(batch_size=50, rate=0.01, images=600, epochs=None, steps=3)], 4, stream(0))
    assert [index.tolist() for (index,) in steps] == [[0, 1, 2, 3]] * 3


def test_secret_batches_do_not_follow_from_the_seed() -> None:
    phase = poisson(batch_size=5, images=50, epochs=None, steps=20, secret=True)
    one, other = (str(plan_batches([phase], 50, stream(0))) for _ in range(2))
    assert one != other


def test_rates_are_probabilities() -> None:
    with pytest.raises(ValueError, match=r"expected rate in \(0, 1\]"):
        poisson(rate=0.0)
    with pytest.raises(ValueError, match="expected images >= 1"):
        poisson(images=0)
