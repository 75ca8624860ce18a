"""Files are there whole or not at all, and nothing is written through a link."""

import os
import resource
import threading

import pytest

from fl.runtime import atomic_files
from fl.runtime.atomic_files import atomic_folder, atomic_write, remove_leftovers, scratch_folder


def test_a_link_in_a_files_place_is_replaced_and_its_target_left_alone(tmp_path):
    target, link = tmp_path / "target", tmp_path / "report.html"
    target.write_text("mine")
    link.symlink_to(target)
    with atomic_write(link) as file:
        file.write(b"page")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("mine", "page", False)


def test_names_of_temporary_files_cannot_be_guessed(tmp_path):
    """Links under every fixed name that was ever in use do no harm."""
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / ".report.html.part").symlink_to(target)
    names = set()
    for _ in range(3):
        with atomic_write(tmp_path / "report.html") as file:
            names |= {name for name in os.listdir(tmp_path) if atomic_files.TEMPORARY_NAME.fullmatch(name)}
            file.write(b"page")
    assert len(names) == 3
    assert target.read_text() == "mine"


def test_a_guessed_name_is_refused(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("mine")
    monkeypatch.setattr(atomic_files.secrets, "token_hex", lambda _: "0" * 16)
    (tmp_path / f".a.{'0' * 16}.part").symlink_to(target)
    with pytest.raises(FileExistsError), atomic_write(tmp_path / "a") as file:
        file.write(b"page")
    assert target.read_text() == "mine"


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"), atomic_folder(tmp_path / "images"):
        pass
    assert not os.listdir(tmp_path / "elsewhere")


def test_what_a_dead_writer_left_goes_away_and_what_a_living_one_writes_stays(tmp_path):
    (tmp_path / f".a.{'1' * 16}.part").write_text("cut o")
    (tmp_path / f".images.{'2' * 16}.part").mkdir()
    with atomic_write(tmp_path / "a") as file, scratch_folder(tmp_path / "images") as new:
        (new / "b").touch()
        file.write(b"half")
        remove_leftovers(tmp_path)
        assert len(os.listdir(tmp_path)) == 2
        file.write(b" and half")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "half and half"


def test_an_error_leaves_file_and_folder_as_they_were(tmp_path):
    with atomic_write(tmp_path / "a") as file:
        file.write(b"old")
    with atomic_folder(tmp_path / "f") as new:
        (new / "old").touch()

    def interrupted(path):
        with atomic_write(path) as file:
            file.write(b"new")
            raise KeyError

    def interrupted_folder(path):
        with atomic_folder(path) as new:
            (new / "new").touch()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted(tmp_path / "a")
    with pytest.raises(KeyError):
        interrupted_folder(tmp_path / "f")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path / "f") == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["a", "f"]


def test_a_folder_whose_swap_fails_stays(tmp_path, monkeypatch):
    with atomic_folder(tmp_path / "f") as new:
        (new / "old").touch()
    seen = []

    def fail(kind, path):
        seen.append(kind)
        if seen.count("rename") == 2:
            raise OSError("no space left on device")

    monkeypatch.setattr(atomic_files, "before_disk_change", fail)
    with pytest.raises(OSError, match="no space"), atomic_folder(tmp_path / "f") as new:
        (new / "new").touch()
    assert os.listdir(tmp_path / "f") == ["old"]
    assert os.listdir(tmp_path) == ["f"]


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    def write(number):
        for _ in range(20):
            with atomic_write(tmp_path / "a") as file:
                file.write(str(number).encode() * 1000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = (tmp_path / "a").read_text()
    assert len(text) == 1000
    assert len(set(text)) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_in_a_new_folder_nothing_is_looked_for(tmp_path, monkeypatch):
    """A look at every file for each of thousands that are written would come to minutes."""
    looked = []
    monkeypatch.setattr(atomic_files, "remove_leftovers", lambda folder, name=None: looked.append(name))
    for name, is_new in (("a", True), ("b", False)):
        with atomic_write(tmp_path / name, into_new_folder=is_new) as file:
            file.write(b"x")
    assert looked == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_full_disk_is_told_by_the_file_that_did_not_fit(tmp_path):
    """Errors of files that are open have no name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as told, atomic_write(tmp_path / "large") as file:
            file.write(bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.value.filename == str(tmp_path / "large")
