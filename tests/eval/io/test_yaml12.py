"""Documents made to hang or overflow whoever reads them."""

from __future__ import annotations

import itertools

import pytest

from eval.io import yaml12

LEVELS = "abcdefghij"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise(LEVELS)
)
MERGED = "a: &a {k: v}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in itertools.pairwise(LEVELS)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "with every alias written out"),
        (MERGED, "with every alias written out"),
        ("a: " + "[" * 5000, "deep in each other"),
        ("? " * 5000, "deep in each other"),
        ("- " * 5000, "deep in each other"),
        ("\n".join(" " * depth + "a:" for depth in range(900)), "deep in each other"),
        ("&a [*a]", "repeats what it is part of"),
        ("&a {b: *a}", "repeats what it is part of"),
        ("x" * (yaml12.MOST_CHARACTERS + 1), "characters"),
        ("lr: {{ lr }}", "template"),
        ("{{ lr }}: 1", "template"),
        ("[1, 2]: 3", "expected a word as a key"),
        ("!!int ''", "type that its tag"),
        ("!!bool x", "type that its tag"),
        ("!!timestamp x", "type that its tag"),
        ("!!python/object/apply:os.system ['true']", "constructor"),
        ('"\\ud800"', "half of a character"),
        ("1" * 9999, "4300 digits"),
        ("a: \0", "special characters"),
    ],
)
def test_is_refused_in_a_line(text, said):
    with pytest.raises(ValueError, match=said):
        yaml12.parse(text)


def test_aliases_within_the_limits_are_read():
    assert yaml12.parse("a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}") == {
        "a": {"x": [1, 2]},
        "b": {"x": [1, 2]},
        "c": {"x": [1, 2], "y": 3},
    }


def test_files_are_measured_before_they_are_read(tmp_path):
    path = tmp_path / "config.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="at most"):
        yaml12.read(path)
    path.write_bytes(b"title: \xff")
    with pytest.raises(ValueError, match="UTF-8"):
        yaml12.read(path)
