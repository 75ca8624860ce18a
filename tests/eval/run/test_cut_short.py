"""A run within a time: searches share it and keep their best, and what is cut short is never taken for the whole."""

import json

import pytest
from support.paced import paced
from support.runs import reader_files, run, tiny
from support.tiny import Registered

from attacks.search_control import SearchControl, SearchProgress
from eval.audit.attack_selection import leave_out_settled
from eval.io.jsonl import read_rows
from eval.report.load import load
from eval.run import results, run_status, runner
from eval.run.folder_integrity import check_folder
from eval.run.run_directory import RunDir
from fl.federation import Federation

ONE = ("observe.method={steps: 1}", "method=[{name: fedavg, lr: 0.1, batch_size: 6}]")
SEARCHES = (
    *ONE,
    "attack=[{name: paced, as: first}, {name: paced, iterations: 12, as: second}, guess]",
)


@pytest.fixture
def clock(monkeypatch):
    with Registered(), paced(monkeypatch) as clock:
        yield clock


def rows_of(found, attack):
    return [row for row in found if row["attack"] == attack]


def statuses(path):
    return [cell["status"] for cell in json.loads((path / "run.json").read_text())["cells"]]


def test_searches_share_the_time_and_the_next_run_computes_the_whole(clock, tmp_path):
    heard = []
    whole = run(tiny(*SEARCHES), tmp_path / "whole", on_search=lambda *told: heard.append(told))
    assert clock.now == 2 * 10 + 2 * 12  # two updates
    assert {stage for stage, _ in heard} == {"fedavg: first", "fedavg: second"}
    assert {(progress.iterations) for _, progress in heard} == {20, 24}
    assert all(isinstance(progress, SearchProgress) for _, progress in heard)
    begun = clock.now
    rows = run(tiny(*SEARCHES), tmp_path / "cut", control=SearchControl(time_limit=30))
    assert clock.now - begun == 30
    first, second = rows_of(rows, "first"), rows_of(rows, "second")
    # 15 of 30 s for the first search: 7 for its first update, and what is left of it for the other
    assert [row["cut_short"] for row in first] == [
        f"the search was cut short by the time limit after {n} of 10 iterations" for n in (8, 8, 7, 7)
    ]
    assert [row["cut_short"].split(" after ")[1] for row in second] == [f"{n} of 12 iterations" for n in (8, 8, 7, 7)]
    assert rows_of(rows, "guess") == []  # nothing begins after the time limit
    assert statuses(tmp_path / "cut") == ["finished", "cut short", "cut short", "waiting"]
    cells = json.loads((tmp_path / "cut" / "run.json").read_text())["cells"]
    assert cells[3]["reason"] == run_status.NOT_BEGUN
    begun = clock.now
    assert run(tiny(*SEARCHES), tmp_path / "cut") == whole
    assert clock.now - begun == 44
    assert statuses(tmp_path / "cut") == ["finished"] * 4
    assert reader_files(tmp_path / "cut") == reader_files(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "cut" / "cells").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole" / "cells").iterdir()
    )


def test_updates_that_were_searched_to_the_end_are_not_searched_again(clock, tmp_path):
    experiment = tiny(*ONE, "attack=paced", "observe.images=8")  # four updates
    rows = run(experiment, tmp_path / "a", control=SearchControl(time_limit=50))
    assert not any("cut_short" in row for row in rows)
    rows = run(experiment, tmp_path / "b", control=SearchControl(time_limit=36))
    # 9 s each: all are cut short
    assert len({row["update"] for row in rows if "cut_short" in row}) == 4
    experiment = tiny(*ONE, "attack={name: paced, iterations: 4}", "observe.images=8")

    def interrupt(stage, progress):
        if progress.iteration >= 10:
            control.interrupt()

    control = SearchControl(interval=0.0)
    folder = RunDir(tmp_path / "c")
    with folder.locked():
        plan = runner.prepare(experiment, device="cpu")
        with pytest.raises(runner.RunStopped):
            runner.run(plan, folder, runner.Options(control=control, on_search=interrupt))
        rows = results.assemble(plan, folder)
        assert runner.unfinished_attacks(plan, folder) == {"fedavg: paced after round 2": True}
    assert ["cut_short" in row for row in rows] == [False] * 4 + [True] * 3
    assert rows[4]["cut_short"] == "the search was cut short by an interrupt after 2 of 4 iterations"
    assert rows[6]["not_applicable"] == "not attacked before an interrupt"
    begun = clock.now
    again = run(experiment, tmp_path / "c")
    assert clock.now - begun == 8  # the two that were not searched to the end
    assert again[:4] == rows[:4]


def test_what_was_cut_short_is_marked_for_readers(clock, tmp_path):
    folder = RunDir(tmp_path / "a")
    with folder.locked():
        plan = runner.prepare(tiny(*SEARCHES), device="cpu")
        failures = runner.run(plan, folder, runner.Options(control=SearchControl(time_limit=15)))
        rows = results.assemble(plan, folder)
        table = results.write_table_and_report(rows, failures, plan, folder)
    assert any(
        words.startswith("Cut short by a time limit or an interrupt, with the best found by then: fedavg: first after")
        and "Not begun: fedavg: guess after round 2." in words
        for words in table.legend
    )
    assert "cut-short" in table.rows[0][-1]
    report = (tmp_path / "a" / "report.md").read_text()
    assert "cut short by a time limit or an interrupt; figures are of what it had found by then" in report.lower()
    assert check_folder(tmp_path / "a").damaged == []
    assert load(tmp_path / "a").metadata["status"] == "cut short"


def test_an_attack_behind_one_that_was_cut_short_is_computed_again(clock, tmp_path):
    """What the one before it leaves open may be settled by a whole search."""
    experiment = tiny(*ONE, "attack=[paced, guess]")
    folder = RunDir(tmp_path / "a")
    with folder.locked():
        plan = leave_out_settled(runner.prepare(experiment, device="cpu"))
        before, behind = plan.attacks
        runner.run(plan, folder, runner.Options(control=SearchControl(time_limit=12)))
        assert folder.latest(behind.cell) is None  # no time was left for it
        control = SearchControl(time_limit=1000)
        control.share = lambda *_: SearchControl(time_limit=12)
        runner.run(plan, folder, runner.Options(control=control))
        assert not folder.finished(before.cell)
        assert not folder.finished(behind.cell)
        assert folder.latest(behind.cell) is not None
        runner.run(plan, folder)
        assert folder.finished(before.cell)
        assert folder.finished(behind.cell)


def test_a_training_ends_at_the_time_limit_and_goes_on_there(clock, tmp_path, rounds, monkeypatch):
    step = Federation.step

    def slow(self, **settings):
        clock.now += 10
        return step(self, **settings)

    monkeypatch.setattr(Federation, "step", slow)
    experiment = tiny("federation.rounds=4", *ONE, "attack=guess")
    assert run(experiment, tmp_path / "a", control=SearchControl(time_limit=15)) == []
    assert rounds == [0, 1]
    assert statuses(tmp_path / "a") == ["waiting", "waiting"]
    again = run(experiment, tmp_path / "a")
    assert rounds == [0, 1, 2, 3]
    assert again == run(experiment, tmp_path / "b")
    assert read_rows(tmp_path / "a" / "images.jsonl") == read_rows(tmp_path / "b" / "images.jsonl")


def test_the_status_of_a_run_that_a_key_ended_has_all_that_is_finished(tmp_path, monkeypatch):
    """It is written now and then alone while a run goes on, and an audit that was stopped reports by it."""
    monkeypatch.setattr(runner, "SHARE_OF_TIME", 1e9)
    own, calls = runner.attack_cell.run_attack_cell, iter([False, True])

    def interrupted(*given):
        if next(calls):
            raise KeyboardInterrupt
        return own(*given)

    monkeypatch.setattr(runner.attack_cell, "run_attack_cell", interrupted)
    folder = RunDir(tmp_path / "a")
    with Registered(), folder.locked(), pytest.raises(runner.RunStopped):
        runner.run(runner.prepare(tiny(*ONE, "attack=guess", "seeds=[0, 1]"), device="cpu"), folder)
    assert statuses(tmp_path / "a") == ["finished", "finished", "finished", "waiting"]
