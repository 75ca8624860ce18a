"""The configs that come with a checkout or an installation, by name: found, listed, described."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from eval.io import yaml12
from fl.registry import closest_name

_CHECKOUT = Path(__file__).parents[2]
CONFIGS = _CHECKOUT / "configs" if (_CHECKOUT / "pyproject.toml").is_file() else Path(__file__).parent / "configs"
MAX_SUGGESTIONS = 3
"""How many names are offered in place of one that is not there."""
MIN_SIMILARITY = 0.6
"""How alike two names must be for that: twice the characters that they share, over those that they have."""
ALMOST = 0.8
"""How alike for the beginning of names to be meant, as it is less than any of them."""


class UnknownConfigError(FileNotFoundError):
    """A name that no config has.

    Attributes:
        near: names that may be meant, or the beginning of several.
    """

    def __init__(self, name: str, near: Sequence[str], count: int, beginning: tuple[str, int] = ("", 0)) -> None:
        start, number = beginning
        self.near = (start,) if start else tuple(near)
        if start:
            wanted = f"did you mean one of the {number} whose names begin with {start!r}?"
            super().__init__(f"no config {name!r}; {wanted} `hyperleak list configs {start}` shows them")
            return
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        there = f"`hyperleak list configs` shows all {count}" if count else "this installation has none to name"
        super().__init__(f"no config {name!r}; {hint}{there}")


def list_config_names() -> list[str]:
    """Return all config names, as paths below `configs` without ending."""
    return sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))


def find_config(name: str) -> Path:
    """Return the config file at a path, or of that name in `configs`, whose first folders may be left out.

    Raises:
        UnknownConfigError: there is none; says what is close.
        FileNotFoundError: several end so, or a folder is called so.
    """
    for path in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    known = list_config_names()
    ending = [other for other in known if other.endswith(f"/{name.removesuffix('.yaml')}")]
    if len(ending) == 1:
        return CONFIGS / f"{ending[0]}.yaml"
    if ending:
        raise FileNotFoundError(f"{len(ending)} configs are called {name!r}: {', '.join(ending)}")
    if any(in_folder_or_named(other, f"{name}/") for other in known):
        raise FileNotFoundError(f"{name!r} is a folder of configs; `hyperleak list configs {name}` shows them")
    raise UnknownConfigError(name, _near(name, known), len(known), _beginning(name, known))


def config_name(path: Path) -> str:
    """Return what a config is called: its name in the checkout, else its file's."""
    below = path.is_relative_to(CONFIGS)
    return path.relative_to(CONFIGS).with_suffix("").as_posix() if below else path.name


def in_folder_or_named(name: str, beginning: str) -> bool:
    """Return whether a name, or what is left of it below one of its folders, begins so."""
    return f"/{beginning}" in f"/{name}"


def read_title(name: str) -> str:
    """Return what a config calls itself, read from its own line: reading the whole of a hundred files takes seconds."""
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("title:").strip().strip("\"'") for line in lines if line.startswith("title:")), "")


def read_description(path: Path) -> str:
    """Return what the head of a config says, in a paragraph.

    Raises:
        ValueError: it is no text, or too long; says which file.
    """
    try:
        text = yaml12.read(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    found = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        found.append(line.removeprefix("#").strip())
    return " ".join(found)


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Return config names like `name`, with their first folders or without."""
    whole = name.removesuffix(".yaml")
    alike = {other: max(_similarity(whole, end) for end in _endings(other)) for other in known}
    best = sorted(known, key=lambda other: -alike[other])[:MAX_SUGGESTIONS]
    return [other for other in best if alike[other] > MIN_SIMILARITY]


def _beginning(name: str, known: Sequence[str]) -> tuple[str, int]:
    """Return how several names begin that are meant by `name`, and how many; nothing where a whole name is as close."""
    whole = name.removesuffix(".yaml")
    starts = {start for other in known for end in _endings(other) for start in _starts(end)}
    start = closest_name(whole, starts)
    if start is None or _similarity(whole, start) < ALMOST:
        return "", 0
    begun = [other for other in known if in_folder_or_named(other, start)]
    if len(begun) < 2 or max(_similarity(whole, end) for other in known for end in _endings(other)) >= _similarity(
        whole, start
    ):
        return "", 0
    return start, len(begun)


def _starts(name: str) -> list[str]:
    """Return the name up to each "-" of its last part."""
    folder, slash, last = name.rpartition("/")
    parts = last.split("-")
    return [folder + slash + "-".join(parts[:i]) for i in range(1, len(parts))]


def _endings(name: str) -> list[str]:
    """Return the name, and what is left of it below each of its folders."""
    parts = name.split("/")
    return ["/".join(parts[i:]) for i in range(len(parts))]


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
