"""A script without a guard that starts processes is told so in a line; a run that ends with nothing says so."""

import subprocess
import sys
import types
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny import CONFIG, Registered
from typer.testing import CliRunner

from eval import cli
from eval.commands import terminal
from eval.run import runner
from eval.run.run_directory import RunDir
from fl.runtime.main_guard import CHILD_MAIN, EXIT_CODE, UnguardedError
from fl.runtime.workers import Workers

ROOT = Path(__file__).parents[3]
SCRIPT = """
from fl.runtime.main_guard import UnguardedError, leave_if_unguarded
{guard}leave_if_unguarded()
from fl.runtime.workers import Workers
if __name__ != "__main__":
    raise SystemExit("got on")
pool = Workers(1)
try:
    print(pool.result(pool.submit(abs, -3)))
except UnguardedError as error:
    print(error)
finally:
    pool.close()
"""


def call(*words):
    return CliRunner().invoke(cli.app, list(map(str, words)))


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.commands.system_errors.signal.signal", lambda *_: None)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    with Registered():
        yield tmp_path / "tiny.yaml"


def run(path, *words):
    return call("run", path, "--out", path.parent / "out", "--device", "cpu", *words)


def test_a_worker_of_a_script_without_a_guard_leaves_and_its_parent_says_why(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=""))
    words = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout.startswith("the script that was started has no guard"), done.stderr
    assert '`if __name__ == "__main__":`' in done.stdout
    assert not done.stderr


LIBRARY = """
from attacks.parallel import AttackPool
from fl.runtime.main_guard import UnguardedError
spread = AttackPool(2, patience=0.0)
try:
    pool = spread._ready_pool() and spread._pool
    tasks = [pool.submit(abs, -3) for _ in range(2)]
    for task in tasks:
        pool.result(task)
except UnguardedError as error:
    print(error)
finally:
    spread.close()
"""


def test_a_script_without_a_guard_that_uses_the_library_is_told_so_once(tmp_path):
    (tmp_path / "script.py").write_text(LIBRARY)
    words = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("has no guard") == 1, done.stderr
    assert not done.stderr


def test_every_thread_is_told_why_a_worker_left(monkeypatch):
    monkeypatch.setattr("fl.runtime.workers.REAP_SECONDS", 0.1)
    pool = Workers(2)
    pool._children = [SimpleNamespace(exitcode=EXIT_CODE), SimpleNamespace(exitcode=None)]
    lost = Future()
    lost.set_exception(BrokenProcessPool())
    for _ in range(3):
        with pytest.raises(UnguardedError):
            pool.result(lost)
    pool._children = [SimpleNamespace(exitcode=1)]
    with pytest.raises(RuntimeError, match="use fewer workers"):
        pool.result(lost)
    pool.close()


def test_a_command_in_such_a_worker_does_nothing(path, monkeypatch):
    monkeypatch.setitem(sys.modules, CHILD_MAIN, types.ModuleType(CHILD_MAIN))
    for done in (run(path), call("list")):
        assert (done.exit_code, done.output) == (EXIT_CODE, "")
    with pytest.raises(SystemExit, match=str(EXIT_CODE)), RunDir(path.parent / "out").locked():
        pass
    assert not (path.parent / "out").exists()


def test_a_run_for_want_of_a_guard_stops_at_once(path, monkeypatch):
    def unguarded(*_, **__):
        raise UnguardedError

    monkeypatch.setattr("eval.run.training_cell.train", unguarded)
    done = run(path)
    assert done.exit_code == terminal.USAGE
    assert done.stderr.count("has no guard") == 1
    assert done.stderr.splitlines()[-1].startswith("error: the script that was started")
    assert not list((path.parent / "out").glob("cells/*.part/traceback.txt"))


def test_an_audit_for_want_of_a_guard_is_asked_for_wrongly(monkeypatch):
    def unguarded(*_, **__):
        raise UnguardedError

    monkeypatch.setattr("eval.run.runner.run", unguarded)
    done = call("audit", "--method", "fedavg", "--dataset", "faces", "--attack", "analytic", "--device", "cpu")
    assert done.exit_code == terminal.USAGE
    assert "has no guard" in done.stderr


def test_a_run_that_ends_with_nothing_points_to_no_report(path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("rain")

    monkeypatch.setattr(runner.training_cell, "train", fail)
    done, out = run(path), path.parent / "out"
    assert done.exit_code == terminal.FAILURE
    assert "report.html" not in done.output
    assert "nothing is finished, so there is no table and no report" in done.stderr
    for command in (("report", out), ("compare", out, out)):
        told = call(*command)
        assert told.exit_code == terminal.USAGE
        assert "holds nothing to report yet: 0 of its 5 cells are finished, 2 failed, the first for " in told.stderr
        assert "RuntimeError: rain (cells/" in told.stderr
        assert "goes on with it" in told.stderr
    monkeypatch.undo()
    monkeypatch.setattr("eval.commands.system_errors.signal.signal", lambda *_: None)
    assert run(path).exit_code == 0
    assert call("report", out).exit_code == 0
