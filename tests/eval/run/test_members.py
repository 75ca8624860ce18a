"""Who shares a run's folder, and who has it alone."""

import fcntl
import signal
import subprocess
import sys
import time

import pytest

from eval.run.members import SHARED, WORKER, Member, Members, _process
from eval.run.run_directory import BusyError, RunDir

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, int(sys.argv[2])); print(flush=True); input()"


@pytest.fixture
def hold(tmp_path):
    """Have another process hold the folder's lock until the test ends."""
    started = []

    def begin(how):
        command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock"), str(int(how))]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"\n"

    yield begin
    for process in started:
        process.communicate()


def test_a_shared_folder_is_refused_to_who_wants_it_alone(tmp_path, hold):
    hold(fcntl.LOCK_SH)
    with RunDir(tmp_path).shared():
        pass
    with pytest.raises(BusyError, match="in use by another process"), RunDir(tmp_path).locked():
        pass


def test_a_folder_held_alone_is_refused_to_who_would_share_it(tmp_path, hold, monkeypatch):
    monkeypatch.setattr("eval.run.run_directory.SHARED_LOCK_SECONDS", 0.1)
    hold(fcntl.LOCK_EX)
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


def test_a_process_that_lives_here_is_not_dead_for_want_of_a_sign(tmp_path):
    """A computation may keep Python's lock for minutes, so that no other thread gives signs of life."""
    members = Members(tmp_path, stale_seconds=-1.0)
    one = Member(members, WORKER, "w")
    assert members.is_alive(one.name)
    one.tell({"begun": 1})  # another process has its number by now
    assert not members.is_alive(one.name)
    one.tell({"kernel": "of another machine"})
    assert not members.is_alive(one.name)


def test_a_stopped_process_is_dead_once_it_gives_no_sign_for_long(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        members = Members(tmp_path, stale_seconds=60.0)
        one = Member(members, WORKER, "w")
        _, begun = _process(sleeper.pid)
        one.tell({"pid": sleeper.pid, "begun": begun})
        assert members.is_alive(one.name)
        sleeper.send_signal(signal.SIGSTOP)
        while _process(sleeper.pid)[0] != "T":
            time.sleep(0.01)
        assert members.is_alive(one.name)
        assert not Members(tmp_path, stale_seconds=-1.0).is_alive(one.name)
    finally:
        sleeper.kill()
        sleeper.communicate()
    assert not members.is_alive(one.name)
