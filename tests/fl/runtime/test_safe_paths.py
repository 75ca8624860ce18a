"""Names from files lead nowhere but to files of their folder."""

import os
from pathlib import Path

import pytest

from fl.runtime.safe_paths import join_inside, printable_name, require_inside, require_regular_file


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc/passwd", "../../secret", "a\0b"])
def test_a_path_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        join_inside(tmp_path, name)


def test_links_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    own = tmp_path / "own"
    own.mkdir()
    (own / "real").write_text("x")
    (own / "near").symlink_to(own / "real")
    (own / "far").symlink_to("../secret")
    (own / "out").symlink_to(tmp_path)
    (own / "round").symlink_to("round")
    assert join_inside(own, "near") == require_inside(own / "near", own) == own / "near"
    for names in (("far",), ("out", "secret"), ("out",)):
        with pytest.raises(ValueError, match="leads out of"):
            join_inside(own, *names)
    with pytest.raises(ValueError, match="leads out of"):
        require_inside(own / "far", own)
    assert not join_inside(own, "round").is_file()
    (tmp_path / "other").symlink_to(own)  # the folder that is asked for may be a link
    assert join_inside(tmp_path / "other", "near").read_text() == "x"


def test_only_files_with_an_end_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "pipe", "pipe"), (tmp_path, "folder"), (Path("/dev/zero"), "device")):
        with pytest.raises(ValueError, match=said):
            require_regular_file(path)
    with pytest.raises(FileNotFoundError):
        require_regular_file(tmp_path / "nothing")


def test_names_become_text() -> None:
    assert printable_name(os.fsdecode(b"caf\xe9")) == "caf\\udce9"
    assert printable_name("x" * 300, 10) == "xxxxxxxxxx..."
