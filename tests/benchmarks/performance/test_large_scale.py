"""`benchmarks.performance.large_scale`: the simulation by hand-made cases, what is counted, the smallest measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from benchmarks.performance.large_scale import __main__ as command
from benchmarks.performance.large_scale import check, federation_costs, folder_costs, operation_counts, page, workload
from benchmarks.performance.large_scale.simulation import Conditions, simulate
from eval.run.claims import MOST_DEATHS
from eval.run.plan import Plan, prepare


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Three trainings, with two attacks on each."""
    return prepare(folder_costs.experiment(3, 2), device="cpu")


def lengths(plan: Plan, training: float, *attacks: float) -> Mapping[str, float]:
    found = {one.cell.id: training for one in plan.trainings}
    for one in plan.trainings:
        found |= {watch.cell.id: attacks[i] for i, watch in enumerate(one.attack_tasks)}
    return found


def test_one_worker_takes_as_long_as_all_cells(plan: Plan) -> None:
    found = simulate(plan, lengths(plan, 10, 2, 3), Conditions(workers=1, start=5, claim=0.5, finish=0.25))
    assert found.makespan == pytest.approx(5 + 3 * 15 + 9 * 0.75)
    assert found.work == 45
    assert found.lost == found.deaths == 0
    assert found.idle == pytest.approx(5 / found.makespan)
    assert [cell for cell, _ in found.order] == [cell.id for _, cell in plan.cells()]


def test_workers_take_trainings_first_and_then_attacks_that_nobody_has(plan: Plan) -> None:
    found = simulate(plan, lengths(plan, 10, 4, 4), Conditions(workers=2))
    first, second, third = plan.trainings
    own = {one: [watch.cell.id for watch in one.attack_tasks] for one in plan.trainings}
    ended = dict(found.order)
    # each of two does a training and both attacks on it; then one trains, while the other waits for what comes of it
    assert [ended[cell] for cell in (*own[first], *own[second])] == [14, 18, 14, 18]
    assert ended[third.cell.id] == 28
    assert sorted(ended[cell] for cell in own[third]) == pytest.approx([32, 32], abs=2.1)
    assert len(found.order) == 9


@pytest.mark.parametrize(("checkpoint", "lost"), [({}, 7), ({"training": 3}, 1)])
def test_who_is_killed_loses_what_came_since_the_last_checkpoint(
    plan: Plan, checkpoint: Mapping[str, float], lost: float
) -> None:
    found = simulate(plan, lengths(plan, 10, 2, 3), Conditions(workers=1, start=2, deaths=[9], checkpoint=checkpoint))
    assert (found.deaths, found.lost) == (1, lost)
    assert found.makespan == pytest.approx(45 + 2 + 2 + lost)


def test_a_cell_that_never_gets_further_is_given_up_and_one_that_does_is_not(plan: Plan) -> None:
    """Claims are the real ones: so many deaths in a row without anything kept."""
    given = Conditions(workers=1, mean_life=4.0, checkpoint={"training": 0.5, "attack": 0.5})
    found = simulate(plan, lengths(plan, 40, 1, 1), given)
    assert (found.deaths > 3 * MOST_DEATHS, found.given_up) == (True, 0)
    given_up = simulate(plan, lengths(plan, 40, 1, 1), Conditions(workers=1, mean_life=4.0))
    assert (given_up.deaths, given_up.given_up) == (3 * MOST_DEATHS, 9)  # three trainings, and the attacks on them


def test_the_same_seed_gives_the_same_deaths(plan: Plan) -> None:
    each = [
        simulate(plan, lengths(plan, 10, 2, 3), Conditions(workers=3, mean_life=60, seed=seed)) for seed in (0, 0, 1)
    ]
    assert each[0] == each[1] != each[2]


def test_a_shape_has_the_same_work_however_it_is_spread() -> None:
    gpu = workload.GpuSeconds(step=0.1, client=0.01, scoring=0.001, iteration=0.01)
    whole, spread = (workload.Shape("", 2, (1.0, 0.5), parts, 0.01) for parts in (1, 4))
    sums = []
    for shape in (whole, spread):
        plan = shape.plan()
        seconds = shape.seconds(plan, gpu)
        assert set(seconds) == {cell.id for _, cell in plan.cells()}
        sums.append(sum(seconds.values()))
    assert len(spread.plan().attacks) == 2 * 2 * 4
    assert sums[0] == pytest.approx(sums[1])
    assert sums[0] == pytest.approx(2 * (gpu.training(0.01) + 1.5 * gpu.search(workload.UPDATES)))


def test_seconds_of_a_gpu_are_bound_by_bytes_or_by_operations() -> None:
    counts = {name: {"operations": 10.0, "bytes": 100.0} for name in ("step", "client", "iteration")}
    tiny = {"method": "fedavg", "clients": 10, "seconds_round": 0.0, "seconds_scored": 0.0}
    known = {"counts": counts, "gpu": {"copy_bytes_per_second": 1e12}, "clients": [tiny]}
    assert workload.gpu_seconds(known, 1).step == pytest.approx(100 * 1e8 / 1e12)
    computed = 10 * 1000 * 1e8 / (workload.SHARE_OF_PEAK * workload.PEAK)
    assert workload.gpu_seconds(known, 1000).step == pytest.approx(computed)


def test_bytes_are_those_that_operators_read_and_write() -> None:
    one, other = torch.zeros(100), torch.zeros(100)
    assert operation_counts.moved_bytes(lambda: one + other) == 3 * 400
    assert operation_counts.moved_bytes(lambda: one.view(10, 10).t()) == 0
    assert operation_counts.moved_bytes(lambda: other.add_(one)) == 3 * 400


def test_memory_that_several_hold_counts_once() -> None:
    one = torch.zeros(100)
    assert federation_costs.distinct_bytes({"a": one, "b": [one, one[:10]]}) == 400
    assert federation_costs.distinct_bytes([one, torch.zeros(5)], without={"x": one}) == 20


def test_what_a_client_keeps_is_told_in_networks() -> None:
    ditto, fedavg, amp = (federation_costs.state(name) for name in ("ditto", "fedavg", "fedamp"))
    assert (ditto["client"], ditto["server"]) == (1, 0)
    assert (fedavg["client"], fedavg["server"], fedavg["kept_apart"]) == (0, 0, False)
    assert (amp["client"], amp["kept_apart"]) == (0, True)
    assert amp["server"] == pytest.approx(1, abs=1e-3)


def test_uploads_are_joined_where_the_server_takes_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl.simulation.uploads.MAX_SEPARATE_BYTES", 2**16)
    joined, apart = (federation_costs.aggregation(name, 6, 16) for name in ("fedavg", "scaffold"))
    assert joined["mib_held"] < joined["mib_sent"] / 2
    assert apart["mib_held"] == apart["mib_sent"] > 0


def test_the_time_to_start_is_from_a_death_to_the_next_word() -> None:
    calm = {"killed": False, "starts": [0.0, 0.1], "killed_at": -1.0}
    killed = {"killed": True, "starts": [0.0, 0.1, 12.5], "killed_at": 8.0}
    assert check.seconds_to_start({"runs": [calm, killed]}) == 4.5


def test_numbers_in_words() -> None:
    assert [page.time_words(s) for s in (3e-6, 0.02, 90, 600, 8_000, 3e5)] == [
        "3 µs", "20 ms", "90 s", "10 min", "2.22 h", "3.47 days",
    ]  # fmt: skip
    assert [page.byte_words(n) for n in (12, 4e8, 4e12)] == ["12 B", "400 MB", "4 TB"]


def test_simulations_are_made_again_where_what_they_rest_on_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr(workload, "scenarios", lambda known: made.append(known["start"]) or [])
    killed = {"killed": True, "starts": [0.0, 0.0, 5.0], "killed_at": 3.0}
    known: dict[str, Any] = dict.fromkeys(command.PARTS)
    known |= {"check": {"runs": [killed]}, "planned": {"seconds_prepare": 1.0}}
    assert command.with_simulation(dict(list(known.items())[1:]), ["folder"]).get("scenarios") is None
    known = command.with_simulation(known, ["folder"])  # the first time
    known = command.with_simulation(command.known_parts(known), ["folder"])
    assert made == [3.0]
    command.with_simulation(known, ["disk"])
    assert made == [3.0, 3.0]


@pytest.mark.slow
def test_every_part_measures(tmp_path: Any) -> None:
    folder = folder_costs.folder(2, 2)
    assert folder["cells"] == 6
    assert all(value > 0 for value in folder.values())
    assert folder_costs.disk(4, 4)["seconds_claim"] > 0
    many = federation_costs.clients("fedper", 6, 2)
    assert many["bytes_checkpoint"] > 0
    assert federation_costs.network(8)["parameters"] == 8 * 785 + 8 * 9 + 10 * 9
    assert federation_costs.views(3)["networks"] == pytest.approx(2, abs=0.01)
