"""What a run will cost and how far it is: by what finished cells took, or the gradients it takes; else unknown."""

import json

import pytest
from support.runs import run, tiny
from support.tiny import Registered

from eval.run import estimate, runner
from eval.run.federation_data import FederationData
from eval.run.run_directory import RunDir
from eval.run.run_options import RunProgress
from eval.run.shared.progress import RunPace, seconds_of_work
from eval.run.unit_costs import ATTACK_SECONDS, ITERATION_SECONDS, UPDATE_SECONDS
from fl.methods.fedavg import FedAvg


@pytest.fixture(autouse=True, scope="module")
def _guesses():
    with Registered():
        yield


def costs(experiment, path):
    found = estimate.estimate(runner.prepare(experiment, device="cpu"), RunDir(path))
    return found, {cell.name: (cell.is_finished, cell.basis) for cell in found.cells}


def test_nothing_is_computed_for_an_estimate_and_what_nobody_can_tell_is_unknown(tmp_path):
    found, by_name = costs(tiny("attack=[{name: ig, iterations: 100}, guess]"), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert by_name["fedavg"] == by_name["fedavg: ig after round 2"] == (False, "counts, timed here")
    assert by_name["fedavg: guess after round 2"] == (False, "unknown")
    assert found.unknown == 2
    seconds = {cell.name: cell.seconds for cell in found.cells}
    assert seconds["fedavg"] > 0
    assert found.seconds() == sum(filter(None, seconds.values())) == 2 * found.seconds(2)


def test_a_search_costs_its_iterations(tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "_measured", lambda one, task, size: None)
    short, long = (
        {c.name: c.seconds for c in costs(tiny(f"attack=[{{name: ig, iterations: {n}}}]"), tmp_path / "a")[0].cells}
        for n in (100, 200)
    )
    once = ATTACK_SECONDS
    assert long["fedavg: ig after round 2"] - once == pytest.approx(2 * (short["fedavg: ig after round 2"] - once))
    # two updates of one step, each of two images, through a network of three layers
    assert short["fedavg: ig after round 2"] - once == pytest.approx(
        100 * (2 * UPDATE_SECONDS + 3 * ITERATION_SECONDS), rel=0.05
    )


def test_counts_are_taken_at_the_pace_of_a_gradient_timed_here(tmp_path, monkeypatch):
    seconds = {}
    for pace in (1.0, 3.0):
        monkeypatch.setattr(estimate, "gradient_seconds", lambda network, images, pace=pace: 1 / pace)
        monkeypatch.setattr(estimate, "_measured", lambda one, task, size: 1.0)
        seconds[pace] = costs(tiny("attack=ig"), tmp_path / "a")[0].seconds()
    assert seconds[3.0] == pytest.approx(3 * seconds[1.0])


def test_a_network_is_made_once_and_clients_alike_count_together(tmp_path, monkeypatch):
    """Of 10,000 clients and a network that takes seconds to make, a plan would take hours otherwise."""
    monkeypatch.setattr(estimate, "_measured", lambda one, task, size: 0.001)
    experiment = tiny("attack=[{name: ig, iterations: 100}, {name: ig, as: long, iterations: 200}]", "seeds=[0,1]")
    plan = runner.prepare(experiment, device="cpu")
    made, phases = [], []
    build, own = FederationData.task, FedAvg.phases
    monkeypatch.setattr(FederationData, "task", lambda self, seed: made.append(seed) or build(self, seed))
    monkeypatch.setattr(FedAvg, "phases", lambda self, task, round: phases.append(round) or own(self, task, round))
    found = estimate.estimate(plan, RunDir(tmp_path / "a"))
    assert found.unknown == 0
    assert made == [0]
    fedavg = [one for one in plan.trainings if one.method.label == "fedavg"]
    assert len(fedavg[0].data.partition) == 3
    # of all clients, and of all updates of an attack, together
    assert len(phases) == len(fedavg) + sum(len(one.attack_tasks) for one in fedavg)


def test_finished_cells_tell_what_others_of_their_kind_cost(tmp_path):
    run(tiny(), tmp_path / "a")
    cells = tmp_path / "a" / "cells"
    for path in cells.glob("*/cell.json"):
        about = json.loads(path.read_text())
        about["seconds"] = 10.0 if about["settings"]["kind"] == "training" else 3.0
        path.write_text(json.dumps({key: value for key, value in about.items() if key != "sha256"}))
    found, by_name = costs(tiny("seeds=[0,1]", "federation.rounds=4"), tmp_path / "b")  # beside the other
    assert by_name["fedavg (seed 1)"] == (False, "1 finished cell of its kind")
    assert {cell.seconds for cell in found.cells if cell.kind == "training"} == {20.0}  # twice as many rounds
    assert {cell.seconds for cell in found.cells if cell.kind == "attack"} == {3.0}
    _, again = costs(tiny(), tmp_path / "a")
    assert set(again.values()) == {(True, "finished")}


def cell(name, status, seconds=None):
    about = {"name": name, "kind": "attack" if ":" in name else "training", "status": status}
    return about if seconds is None else {**about, "seconds": seconds}


def test_the_time_left_is_told_by_cells_of_other_seeds_then_by_all_of_a_kind():
    done = [cell("a (seed 0)", "finished", 4.0), cell("a (seed 0): x", "finished", 1.0), cell("b", "finished", 8.0)]
    assert seconds_of_work(done) == 0
    assert seconds_of_work([*done, cell("a (seed 1)", "waiting"), cell("a (seed 1): x", "waiting")]) == 5.0
    assert seconds_of_work([*done, cell("c", "waiting"), cell("d", "failed")]) == 6.0
    assert seconds_of_work([cell("a", "finished", 4.0), cell("a: x", "waiting")]) is None


def test_workers_share_the_time_left(monkeypatch):
    told = []
    pace = RunPace(told.append)
    about = {"cells": [cell("a (seed 0)", "finished", 4.0), *(cell(f"a (seed {i})", "waiting") for i in range(1, 5))]}
    now = iter([100.0, 103.0])
    monkeypatch.setattr("eval.run.shared.progress.time.monotonic", lambda: next(now))
    pace.tell(lambda: about, 2)
    pace.tell(lambda: about, 2)
    assert told == [RunProgress(1, 5, 2, 8.0), RunProgress(1, 5, 2, 5.0)]
