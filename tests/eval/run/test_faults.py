"""A full disk, missing memory or a stop at every step of the file layer: gone on with, all files are the same."""

import pytest
from support.faults import go, left, outcome, steps


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The kinds of a small run's steps, and the files that it leaves."""
    folder = tmp_path_factory.mktemp("calm")
    taken = steps(folder / "run")
    return taken, left(folder / "run")


def test_the_same_run_leaves_the_same_files(calm, tmp_path):
    go(tmp_path / "run")
    assert left(tmp_path / "run") == calm[1]
    assert set(calm[0]) >= {"open", "write", "fsync", "rename", "mkdir", "allocate"}


@pytest.mark.parametrize("stopped", [False, True])
def test_faults_of_every_kind_leave_nothing_in_between(calm, tmp_path, stopped):
    kinds, files = calm
    for kind in sorted(set(kinds)):
        taken = [number for number, found in enumerate(kinds) if found == kind]
        at = taken[len(taken) // 2]
        assert outcome(tmp_path / f"{kind}", files, at, stopped=stopped) == "same", kind


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_a_fault_at_every_step_leaves_nothing_in_between(calm, tmp_path, stopped):
    kinds, files = calm
    found = [outcome(tmp_path / str(at), files, at, stopped=stopped) for at in range(len(kinds))]
    assert [words for words in found if words != "same"] == []
