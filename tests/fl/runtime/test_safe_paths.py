"""Names from files lead nowhere but to files of their folder."""

import os
from pathlib import Path

import pytest

from fl.runtime.safe_paths import inside, linked_inside, readable, regular


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc/passwd", "../../secret", "a\0b"])
def test_a_path_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        inside(tmp_path, name)


def test_links_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    own = tmp_path / "own"
    own.mkdir()
    (own / "real").write_text("x")
    (own / "near").symlink_to(own / "real")
    (own / "far").symlink_to("../secret")
    (own / "out").symlink_to(tmp_path)
    (own / "round").symlink_to("round")
    assert inside(own, "near") == linked_inside(own / "near", own) == own / "near"
    for names in (("far",), ("out", "secret"), ("out",)):
        with pytest.raises(ValueError, match="leads out of"):
            inside(own, *names)
    with pytest.raises(ValueError, match="leads out of"):
        linked_inside(own / "far", own)
    assert not inside(own, "round").is_file()
    (tmp_path / "other").symlink_to(own)  # the folder that is asked for may be a link
    assert inside(tmp_path / "other", "near").read_text() == "x"


def test_only_files_with_an_end_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "pipe", "pipe"), (tmp_path, "folder"), (Path("/dev/zero"), "device")):
        with pytest.raises(ValueError, match=said):
            regular(path)
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "nothing")


def test_names_become_text() -> None:
    assert readable(os.fsdecode(b"caf\xe9")) == "caf\\udce9"
    assert readable("x" * 300, 10) == "xxxxxxxxxx..."
