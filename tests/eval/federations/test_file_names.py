"""Whatever clients are called, each has a file of its own in the folder that it belongs to."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from eval.federations.file_names import as_file_name, free_file

PLAIN = ["site-1", "7", "a_b", "unknown"]
ODD = [
    "a/b",
    "a-b/",
    "a b",
    "A-B",
    "a.b",
    "",
    ".",
    "..",
    "../../x",
    "/etc/passwd",
    "x" * 5000,
    "\0",
    "é",
    "\ud800",
    "-",
    "CON",
]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_names_stay(text: str) -> None:
    assert as_file_name(text) == text


@pytest.mark.parametrize("text", ODD)
def test_other_names_can_be_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / f"client-{as_file_name(text)}.npz"
    path.write_bytes(b"")
    assert path.parent == tmp_path
    assert path.name.isascii()


def test_no_two_names_share_a_file() -> None:
    own = [as_file_name(text) for text in ODD]
    names = [*PLAIN, *ODD, "a-b", *own]  # a client may be called what another one's file is called
    files = [as_file_name(text).casefold() for text in names]
    assert all(one != other for one, other in combinations(files, 2))


def test_a_second_file_of_a_name_has_a_number(tmp_path: Path) -> None:
    for expected in ("client-7.npz", "client-7.2.npz", "client-7.3.npz"):
        path = free_file(tmp_path / "client-7.npz")
        path.write_bytes(b"")
        assert path.name == expected
