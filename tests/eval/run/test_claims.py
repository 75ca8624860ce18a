"""What several processes could take, one takes; what a dead one held, one takes over."""

import os
import threading

import pytest

from eval.run.claims import MOST_DEATHS, Claims, LostClaimError
from eval.run.members import SHARED, WORKER, GoneError, Member, Members


def member(folder, name="w", stale_seconds=60.0):
    return Member(Members(folder, stale_seconds), WORKER, name)


def claims(folder, name="w", stale_seconds=60.0):
    return Claims(folder, member(folder, name, stale_seconds))


def age(one: Member, seconds: float) -> None:
    """Let the last sign of life be so long ago, and the process be one of another machine."""
    one.tell({"kernel": "of another machine"})
    path = one.members.folder / f"{one.name}.json"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def at_once(number, act):
    """Call `act(i)` in so many threads at the same moment; returns what each has returned."""
    barrier, found = threading.Barrier(number), [None] * number

    def run(i):
        barrier.wait()
        found[i] = act(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_one_of_many_takes_a_claim(tmp_path):
    each = [claims(tmp_path, f"w{i}") for i in range(8)]
    for cell in ("a", "b", "c"):
        assert sum(at_once(8, lambda i, cell=cell: each[i].take(cell))) == 1


def test_a_stale_claim_is_taken_over_by_one_only(tmp_path):
    dead = claims(tmp_path, "dead")
    assert dead.take("cell")
    each = [claims(tmp_path, f"w{i}") for i in range(8)]
    assert not each[0].take("cell")
    age(dead.member, 100)
    assert sum(at_once(8, lambda i: each[i].take("cell"))) == 1
    with pytest.raises(LostClaimError, match="another process computes it"):
        dead.check("cell")


def test_who_looked_long_ago_does_not_take_what_another_has_taken_over(tmp_path, monkeypatch):
    """Between the look at a stale claim and its takeover another may have taken it over."""
    dead, second, late = (claims(tmp_path, name) for name in ("dead", "second", "late"))
    assert dead.take("cell")
    age(dead.member, 100)
    look = Claims._is_abandoned
    looks = []

    def delayed(self, path):
        found = look(self, path)
        if self is late and not looks:
            looks.append(path)
            assert second.take("cell")
        return found

    monkeypatch.setattr(Claims, "_is_abandoned", delayed)
    assert not late.take("cell")
    second.check("cell")


def test_signs_of_life_keep_a_claim(tmp_path):
    alive, other = claims(tmp_path, "alive"), claims(tmp_path, "other")
    assert alive.take("cell")
    age(alive.member, 100)
    alive.member.beat()
    assert not other.take("cell")
    alive.check("cell")


def test_a_process_that_is_no_more_is_dead_at_once(tmp_path):
    dead, other = claims(tmp_path, "dead"), claims(tmp_path, "other")
    assert dead.take("cell")
    dead.member.tell({"pid": 2**22 + 1})  # above all that Linux gives out
    assert other.take("cell")


def test_what_is_declared_gone_is_free_and_its_holder_leaves(tmp_path):
    first, second = claims(tmp_path, "first"), claims(tmp_path, "second")
    assert first.take("cell")
    second.member.members.declare_gone(first.member.name)
    assert second.take("cell")
    with pytest.raises(GoneError, match="told to leave"):
        first.member.beat()
    first.release("cell")  # too late: the number stays taken
    assert not claims(tmp_path, "third").take("cell")
    second.check("cell")


def test_who_lost_a_claim_can_take_it_again_when_the_next_has_died(tmp_path):
    first, second, third = (claims(tmp_path, name) for name in ("first", "second", "third"))
    assert first.take("cell")
    age(first.member, 100)
    assert second.take("cell")
    first.member.tell({})  # it was only away
    first.release("cell")
    assert not first.take("cell")
    assert not third.take("cell")
    second.member.leave()
    assert first.take("cell")
    first.check("cell")


def test_what_is_released_can_be_taken_again(tmp_path):
    first, second = claims(tmp_path, "first"), claims(tmp_path, "second")
    assert first.take("cell")
    first.release("cell")
    assert second.is_free("cell")
    assert second.take("cell")
    second.finish("cell")
    assert not list((tmp_path / SHARED / "claims").iterdir())


def test_what_kills_its_workers_is_left_alone_in_the_end(tmp_path):
    for number in range(MOST_DEATHS):
        one = claims(tmp_path, f"w{number}")
        assert not one.is_exhausted("cell")
        assert one.take("cell")
        age(one.member, 100)
    last = claims(tmp_path, "last")
    assert not last.take("cell")
    assert last.is_exhausted("cell")
    assert not last.is_free("cell")


def test_deaths_before_progress_count_no_more(tmp_path):
    """What takes days may lose as many workers as it will, as long as each gets further."""
    for number in range(3 * MOST_DEATHS):
        one = claims(tmp_path, f"w{number}")
        assert one.take("cell")
        one.progress("cell")
        assert not one.is_exhausted("cell")
        age(one.member, 100)
    for number in range(MOST_DEATHS - 1):  # these die without: with the last of the former as many as may
        one = claims(tmp_path, f"idle{number}")
        assert one.is_free("cell")
        assert one.take("cell")
        age(one.member, 100)
    last = claims(tmp_path, "last")
    assert not last.take("cell")
    assert last.is_exhausted("cell")


def test_progress_that_cannot_be_written_down_is_no_error(tmp_path, monkeypatch):
    """A full disk, after what was done has been kept: the cell goes on."""
    first, second = claims(tmp_path, "first"), claims(tmp_path, "second")
    assert first.take("cell")
    age(first.member, 100)
    assert second.take("cell")

    def full(path, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eval.run.claims.atomic_write", full)
    second.progress("cell")
    second.check("cell")


def test_what_is_finished_after_deaths_leaves_no_file(tmp_path):
    first, second = claims(tmp_path, "first"), claims(tmp_path, "second")
    assert first.take("cell")
    first.progress("cell")
    assert [path.name for path in first.folder.iterdir()] == ["cell.1"]  # nobody has died: nothing to forget
    age(first.member, 100)
    assert second.take("cell")
    second.progress("cell")
    second.finish("cell")
    assert not list(second.folder.iterdir())


def test_ages_are_told_by_the_file_system_and_not_by_the_host(tmp_path, monkeypatch):
    first, second = claims(tmp_path, "first"), claims(tmp_path, "second")
    assert first.take("cell")
    monkeypatch.setattr("time.time", lambda: 4e9)  # a host whose clock is years ahead
    assert not second.take("cell")
