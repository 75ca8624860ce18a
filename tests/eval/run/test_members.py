"""Who shares a run's folder, and who has it alone."""

import subprocess
import sys

import pytest

from eval.run.members import SHARED, WORKER, Member, Members
from eval.run.run_directory import BusyError, RunDir

HOLD = (
    "import sys; from pathlib import Path; from eval.run.run_directory import RunDir\n"
    "with getattr(RunDir(Path(sys.argv[1])), sys.argv[2])(): print('in', flush=True); sys.stdin.read()"
)


@pytest.fixture
def hold(tmp_path):
    """Have another process hold the folder, alone or shared, until the test ends."""
    started = []

    def begin(how):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"in\n"
        return process

    yield begin
    for process in started:
        process.communicate()


def test_a_shared_folder_is_refused_to_who_wants_it_alone(tmp_path, hold):
    hold("shared")
    with RunDir(tmp_path).shared():
        pass
    with pytest.raises(BusyError, match="in use by a run with --executor"), RunDir(tmp_path).locked():
        pass


def test_a_folder_held_alone_is_refused_to_who_would_share_it(tmp_path, hold, monkeypatch):
    monkeypatch.setattr("eval.run.run_directory.SHARED_LOCK_SECONDS", 0.1)
    hold("locked")
    with pytest.raises(BusyError, match="does not share it"), RunDir(tmp_path).shared():
        pass


def test_workers_elsewhere_keep_a_folder_where_locks_do_not_reach_them(tmp_path):
    Member(Members(tmp_path), WORKER, "w").tell({"kernel": "of another machine", "host": "node7", "pid": 12})
    joined = r"worker on node7, process 12.*another with --executor could join"
    with pytest.raises(BusyError, match=joined), RunDir(tmp_path).locked():
        pass
    with RunDir(tmp_path).shared():
        assert (tmp_path / SHARED).is_dir()
    assert (tmp_path / SHARED).is_dir()  # it is at work still


def test_the_last_to_leave_clears_up(tmp_path):
    with RunDir(tmp_path).shared() as one:
        assert [(state.name, state.is_alive) for state in Members(tmp_path).states()] == [(one.name, True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]


def test_what_dead_processes_left_is_no_hindrance(tmp_path):
    Member(Members(tmp_path), WORKER, "w").tell({"pid": 2**22 + 1})
    with RunDir(tmp_path).locked():
        assert not (tmp_path / SHARED).exists()
