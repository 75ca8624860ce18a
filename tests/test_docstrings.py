"""What docstrings name is there: a renamed field whose description keeps the old name misleads its reader."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator

import pytest

SECTION = re.compile(r"^Attributes:\n((?:    .*(?:\n|\Z)|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+):", re.MULTILINE)


def strangers(kind: type) -> list[str]:
    """The attributes that the docstring of a dataclass describes, and that the class does not have."""
    section = SECTION.search(inspect.getdoc(kind) or "")
    known = {field.name for field in dataclasses.fields(kind)} | {*dir(kind)}  # type: ignore[arg-type]
    return [name for name in ENTRY.findall(section[1] if section else "") if name not in known]


def dataclasses_of(package: str) -> Iterator[type]:
    """The dataclasses that the modules of a package define."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of modules that stand for a former name
            space = vars(importlib.import_module(module.name))
        yield from (
            kind
            for kind in space.values()
            if isinstance(kind, type) and kind.__module__ == module.name and dataclasses.is_dataclass(kind)
        )


@pytest.mark.parametrize("package", ["fl", "defenses", "attacks"])
def test_described_attributes_exist(package: str) -> None:
    found = {f"{kind.__module__}.{kind.__name__}": strangers(kind) for kind in dataclasses_of(package)}
    assert len(found) >= 5
    assert not {name: names for name, names in found.items() if names}


def test_strangers_are_found() -> None:
    @dataclasses.dataclass
    class Described:
        """Something.

        Attributes:
            size: there is one.
            length: a former name of it.
        """

        size: int

    assert strangers(Described) == ["length"]
