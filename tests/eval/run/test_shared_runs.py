"""Several workers on one run: the same bytes, no cell twice, and none lost with a worker that dies."""

import json
import math
import shutil
import sys
import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.grid import counted, whole
from support.paced import CLOCK, Paced
from support.runs import tiny
from support.shared_runs import Killed, do, in_threads, plan_and_run
from support.tiny import Guess, Registered

from attacks.base import attacks
from attacks.search_control import SearchControl
from eval.io.jsonl import read_rows
from eval.run.attack_cell import AttackedUpdates
from eval.run.attack_checkpoint import AttackCheckpoint
from eval.run.claims import MOST_DEATHS, Claims
from eval.run.execute import run_and_publish
from eval.run.executors.choice import ExecutorChoice
from eval.run.members import CALLER, SHARED, Member, Members
from eval.run.plan import prepare
from eval.run.run_directory import RunDir
from eval.run.run_options import Options
from eval.run.shared import caller, notes, portions
from eval.run.shared.caller import WorkersError
from eval.run.shared.job import DEATH, REFUSAL, WorkerJob
from eval.run.shared.worker import SharedRun, is_dismissed
from fl.federation import Federation


@pytest.fixture(autouse=True, scope="module")
def _guesses():
    with Registered():
        yield


@pytest.fixture(scope="module")
def grid(_guesses):
    return tiny("observe.rounds=[0,2]")


@pytest.fixture(scope="module")
def alone(grid, tmp_path_factory):
    """The files of the same run by one process."""
    folder = tmp_path_factory.mktemp("alone")
    plan_and_run(grid, folder, None)
    return whole(folder)


def unless_killed(act):
    """Do something, but not on the way out of a process that is killed."""

    def wrapped(*given):
        if sys.exc_info()[0] is not Killed:
            act(*given)

    return wrapped


def names(outcome):
    return [name for name, _ in outcome.plan.cells()]


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_leaves_the_same_files_and_computes_no_cell_twice(
    grid, alone, tmp_path, monkeypatch, workers
):
    started = in_threads(monkeypatch)
    stages = {}
    outcome = plan_and_run(grid, tmp_path, workers, lambda stage, done, total: stages.update({stage: (done, total)}))
    assert whole(tmp_path) == alone
    assert len(started) == workers
    found = counted(tmp_path)
    assert len(found) == len(names(outcome))
    assert set(found.values()) == {1}
    assert not (tmp_path / SHARED).exists()
    assert set(stages) == set(found)
    assert all(done == total for done, total in stages.values())


def test_a_worker_that_dies_in_a_training_and_one_in_an_attack_lose_nothing(grid, alone, tmp_path, monkeypatch):
    died = []
    step, attack = Federation.step, Guess.attack_view

    def dying(when, act):
        def wrapped(self, *given, **named):
            if when not in died:
                died.append(when)
                raise Killed
            return act(self, *given, **named)

        return wrapped

    monkeypatch.setattr(Federation, "step", dying("training", step))
    monkeypatch.setattr(Guess, "attack_view", dying("attack", attack))
    for owner, name in ((Claims, "release_all"), (Claims, "release"), (Member, "leave")):
        monkeypatch.setattr(owner, name, unless_killed(getattr(owner, name)))
    monkeypatch.setattr("eval.run.shared.worker.kept_alive", lambda member: nullcontext())

    def turn(job):
        try:
            return do(job)
        except Killed:
            return DEATH, "signal 9"

    started = in_threads(monkeypatch, turn)
    plan_and_run(grid, tmp_path, 2)
    assert whole(tmp_path) == alone
    assert sorted(died) == ["attack", "training"]
    assert len(started) == 4
    assert set(counted(tmp_path).values()) == {1}
    assert (tmp_path / "log.txt").read_text().count("has died (signal 9); what it had claimed is free") == 2


def looking(plan, folder, looked):
    """Return a worker whose looks at finished cells are written down."""
    run = RunDir(folder)
    finished = run.finished
    run.finished = lambda cell: looked.append(cell.id) or finished(cell)
    claims = Claims(folder, Member(Members(folder), "worker", "looking"))
    return SharedRun(plan, run, Options(), lambda *told: None, None, claims=claims, workers=1)


def test_a_worker_looks_at_a_finished_cell_once_and_again_before_it_leaves(grid, tmp_path):
    """A look at each of thousands before each that is computed would be millions of calls of the file system."""
    plan = plan_and_run(grid, tmp_path, None).plan
    (last,) = [task.cell for task in plan.attacks][-1:]
    shutil.rmtree(tmp_path / "cells" / last.id)
    looked = []
    worker = looking(plan, tmp_path, looked)
    for _ in range(3):
        assert worker._has_open()
    others = [cell for cell in looked if cell != last.id]
    assert len(others) == len(set(others)) == len(list(plan.cells())) - 1
    damaged = plan.trainings[0].cell  # while the worker is at work, and after it has looked
    (tmp_path / "cells" / damaged.id / "rounds.jsonl").write_text("")
    worker.failures[last.id] = None
    assert worker._has_open()
    assert worker.is_open(damaged)


def test_an_attack_on_a_state_that_kills_its_workers_fails_in_the_end(grid, tmp_path, monkeypatch):
    """Nobody makes that state again: whoever waited for it would wait for ever."""
    plan = plan_and_run(grid, tmp_path, None).plan
    one, watch = plan.trainings[0], plan.trainings[0].attack_tasks[0]
    shutil.rmtree(tmp_path / "cells" / watch.cell.id)
    monkeypatch.setattr(SharedRun, "missing_rounds", lambda *_: [1])
    for number in range(MOST_DEATHS):
        dead = Claims(tmp_path, Member(Members(tmp_path), "worker", f"dead{number}"))
        assert dead.take(f"{one.cell.id}+states")
        dead.member.members.declare_gone(dead.member.name)
    worker, pauses = looking(plan, tmp_path, []), iter([None])
    worker.pause = lambda _seconds: next(pauses)  # once, until it looks again whether something is left
    (failure,) = worker.run()
    assert failure.id == watch.cell.id
    assert "died while they computed the state that it looks at" in failure.reason


@pytest.mark.slow  # so do processes, in tests/executors
def test_two_callers_share_a_run(grid, alone, tmp_path, monkeypatch):
    in_threads(monkeypatch)
    outcomes = []
    callers = [threading.Thread(target=lambda: outcomes.append(plan_and_run(grid, tmp_path, 2))) for _ in range(2)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert [outcome.failures for outcome in outcomes] == [[], []]
    assert whole(tmp_path) == alone


def test_what_workers_of_another_caller_log_is_left_to_it(tmp_path, caplog):
    logs = tmp_path / SHARED / notes.LOGS
    logs.mkdir(parents=True)
    for name in ("local-01-mine-a", "local-01-other-b"):
        (logs / name).write_text(json.dumps({"level": 20, "name": "x", "message": "training: 1 s"}) + "\n")
    reader = notes.LogReader(tmp_path)
    with caplog.at_level("INFO"):
        reader.repeat({"other"})
        reader.repeat()  # the other has left, and has said all of this
    assert caplog.messages == ["local-01-mine-a: training: 1 s"]


def test_a_caller_knows_the_workers_of_others_by_their_names(tmp_path, monkeypatch):
    with RunDir(tmp_path).shared() as first, RunDir(tmp_path).shared() as second:
        shared = caller._SharedWork.__new__(caller._SharedWork)
        shared.caller, told = first, []
        shared.logs = SimpleNamespace(repeat=told.append)
        shared.repeat_logs()
        second.leave()
        shared.repeat_logs()
    assert told == [{second.name.rpartition("-")[2]}, set()]


def test_a_cell_that_fails_is_tried_once_and_stops_no_other(tmp_path, monkeypatch):
    in_threads(monkeypatch)
    outcome = plan_and_run(tiny("attack=[guess,crash]"), tmp_path, 3)
    assert sorted(failure.name for failure in outcome.failures) == ["fedavg: crash", "hyperfl: crash"]
    assert all("got rain" in (tmp_path / failure.traceback).read_text() for failure in outcome.failures)
    assert len(read_rows(tmp_path / "images.jsonl")) == 8
    assert (tmp_path / "log.txt").read_text().count("crash failed") == 2


def test_what_no_worker_can_do_ends_the_run_with_the_reason(tmp_path, monkeypatch):
    in_threads(monkeypatch, lambda job: (REFUSAL, "there are other data"))
    with pytest.raises(WorkersError, match="can't compute this run: there are other data"):
        plan_and_run(tiny("attack=guess"), tmp_path, 2)


def test_workers_that_die_without_getting_anything_done_are_not_replaced_for_ever(tmp_path, monkeypatch):
    started = in_threads(monkeypatch, lambda job: (DEATH, "signal 9"))
    with pytest.raises(WorkersError, match="4 workers ended one after the other and got nothing done: signal 9"):
        plan_and_run(tiny("attack=guess"), tmp_path, 1)
    assert len(started) == caller.MOST_REPLACED + 1


def test_portions_of_an_attack_are_shared_and_none_is_attacked_twice(tmp_path, monkeypatch):
    """The first worker alone would attack all views of the cell."""
    experiment = tiny("attack=[{name: guess, against: hyperfl}]", "observe.batch_size=1")
    plan_and_run(experiment, tmp_path / "alone", None)
    seen, together = [], threading.Barrier(2, timeout=20)
    attack = Guess.attack_view

    def watched(self, view, seed):
        seen.append((seed, threading.get_ident()))
        if len(seen) <= 2:  # the first two views wait for each other: each has a worker of its own
            together.wait()
        return attack(self, view, seed)

    monkeypatch.setattr(Guess, "attack_view", watched)
    monkeypatch.setattr(portions, "PATIENCE_SECONDS", 0.0)
    in_threads(monkeypatch)
    plan_and_run(experiment, tmp_path / "shared", 2)
    assert whole(tmp_path / "shared") == whole(tmp_path / "alone")
    assert len({seed for seed, _ in seen}) == len(seen) == 4
    assert len({thread for _, thread in seen}) == 2


@pytest.mark.parametrize(("device", "limit"), [("cuda", math.inf), ("cpu", 60.0)])
def test_an_attack_stays_with_one_worker_on_a_gpu_and_before_a_time_limit(tmp_path, device, limit):
    claims = Claims(tmp_path, Member(Members(tmp_path), "worker", "w"))
    alone = SimpleNamespace(run=lambda *given, **named: ["by one process"])
    control = SearchControl(time_limit=limit)
    execution = portions.SharedAttackExecution(alone, control=control, cell="c", claims=claims, folder=tmp_path)
    updates = AttackedUpdates([SimpleNamespace(device=torch.device(device))] * 2, [0, 1])
    assert execution.attack(Guess(), updates, AttackCheckpoint(tmp_path / "found", ())) == ["by one process"]
    assert not list(claims.folder.iterdir())


def test_a_search_that_is_cut_short_is_taken_up_by_no_other_worker(tmp_path, monkeypatch):
    attacks.register("paced")(Paced)
    clock, ahead = time.monotonic, defaultdict(float)

    def tick():  # an iteration takes ten seconds of the time of its own worker
        ahead[threading.get_ident()] += 10

    monkeypatch.setattr(CLOCK, "tick", tick, raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[threading.get_ident()])
    try:
        experiment = tiny("attack=[guess, {name: paced, iterations: 400}]", "federation.rounds=0")
        in_threads(monkeypatch)
        outcome = plan_and_run(experiment, tmp_path, 2, control=SearchControl(time_limit=1000))
        assert outcome.unfinished == {f"{name}: paced after round 0": True for name in ("fedavg", "hyperfl")}
        assert len(outcome.rows) == 2 * 2 * 4
        cut = [row for row in outcome.rows if row.get("cut_short")]
        assert {row["attack"] for row in cut} == {"paced"}
        assert len(cut) == 8
        assert (tmp_path / "log.txt").read_text().count("cut short") == 2
        monkeypatch.setattr(CLOCK, "tick", lambda: None)
        assert not plan_and_run(experiment, tmp_path, 2).unfinished
    finally:
        del attacks._entries["paced"]


def test_a_time_limit_ends_workers_and_the_same_command_goes_on(tmp_path, monkeypatch, grid, alone):
    in_threads(monkeypatch)
    outcome = plan_and_run(grid, tmp_path, 2, control=SearchControl(time_limit=0.0))
    assert len(outcome.unfinished) == len([name for name in names(outcome) if " after round " in name])
    plan_and_run(grid, tmp_path, 2)
    assert whole(tmp_path) == alone


def test_a_worker_whose_caller_has_left_does_not_begin(tmp_path):
    members = Members(tmp_path)
    caller = Member(members, CALLER, "caller")
    job = WorkerJob(**{field: None for field in WorkerJob.__dataclass_fields__} | {"folder": str(tmp_path)})
    one = replace(job, caller=caller.name, worker="local-01-0")
    assert not is_dismissed(one)
    members.declare_gone("local-01-0")
    assert is_dismissed(one)
    assert not is_dismissed(replace(one, worker="local-02-0"))
    caller.leave()
    assert is_dismissed(replace(one, worker="local-02-0"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU, which starts workers on others")
def test_every_worker_gets_a_gpu_of_its_own_and_the_caller_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    given = []

    def turn(job):
        given.append((job["device"], job["gpu"]))
        time.sleep(0.3)  # so that each worker is begun
        return REFUSAL, "there is no GPU"

    in_threads(monkeypatch, turn)
    experiment, folder = tiny("attack=guess"), RunDir(tmp_path)
    plan = prepare(experiment, device="cuda", elsewhere=True)
    options = Options(executor=ExecutorChoice(name="local"))
    with folder.shared(), pytest.raises(WorkersError, match="there is no GPU"):
        run_and_publish(plan, folder, options)
    assert sorted(given) == [("cuda", "4"), ("cuda", "7")]
    assert {one.cell.settings["device"] for one in plan.trainings} == {"cuda"}
    assert folder.about_run()["status"] == "failed"
    with pytest.raises(ValueError, match="expected a CUDA device, found none"):
        prepare(experiment, device="cuda")


def test_who_has_lost_a_cell_neither_finishes_nor_fails_it(tmp_path, monkeypatch):
    """It was away for long, and another has computed the cell meanwhile."""
    attack = Guess.attack_view
    lost = []

    def losing(self, view, seed):
        if not lost:
            lost.append(True)
            claims = Claims(tmp_path, Member(Members(tmp_path), "worker", "other"))
            (mine,) = [path for path in claims.folder.glob("*.1") if path.read_text().startswith("local-")]
            (claims.folder / mine.with_suffix(".2").name).write_text(claims.member.name)
            claims.member.leave()  # so that it is free again
            raise OSError("the folder is gone")
        return attack(self, view, seed)

    experiment = tiny("attack=guess")
    plan_and_run(experiment, tmp_path / "alone", None)
    tmp_path = tmp_path / "shared"
    monkeypatch.setattr(Guess, "attack_view", losing)
    in_threads(monkeypatch)
    assert not plan_and_run(experiment, tmp_path, 1).failures
    assert "no longer claimed by local-01" in (tmp_path / "log.txt").read_text()
    assert whole(tmp_path) == whole(tmp_path.with_name("alone"))
