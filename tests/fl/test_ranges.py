"""What settings can be stands in their types, and is checked when what has them is built."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from benchmarks.reliability.mutants import REGISTRIES
from eval.experiment.serialization import SECTIONS
from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, Length, Limit, Positive, Range, Share
from fl.registry import Registry
from fl.settings import SettingError, declared, fit_value, format_value, type_hints

Odd = Annotated[int, Range(1, 9)]


@declared("thing")
@dataclass(frozen=True, kw_only=True)
class Thing:
    """One field of each kind."""

    count: Count = 1
    odd: Odd | None = None
    size: Positive = 1.0
    limit: Limit = math.inf
    share: Share = 0.5
    plain: float = 0.0
    sides: Annotated[tuple[Count, ...], Length(1, 3)] = (1,)
    pair: tuple[int, int] = (0, 0)
    on: bool = False
    kind: Literal["a", 2] = "a"
    word: str = ""
    each: float | dict[str, Share] = 0.0


def settings() -> Iterator[tuple[str, type, str]]:
    """All settings that there are: whose, of which class, their name."""
    for registry in REGISTRIES:
        for name in registry.names():
            kind = registry.get(name)
            if isinstance(kind, type):
                yield from ((f"{registry.kind} {name}", kind, f.name) for f in dataclasses.fields(kind) if f.init)
    for name, kind in SECTIONS.items():
        yield from ((name, kind, f.name) for f in dataclasses.fields(kind))


def test_no_setting_takes_true_or_text_for_a_number() -> None:
    """Of more than a thousand settings those that take `true` are bools, and those that take "1" are texts."""
    wrong = []
    for owner, kind, key in settings():
        hint = str(type_hints(kind)[key])
        for value, takers in ((True, "bool"), ("1", "str")):
            try:
                fit_value(kind, key, value)
            except ValueError:
                continue
            if takers not in hint:
                wrong.append(f"{owner}.{key} takes {value!r}")
    assert wrong == []
    assert len(list(settings())) > 1000


def test_no_number_takes_nan_nor_any_that_no_run_could_end_with() -> None:
    wrong = []
    for owner, kind, key in settings():
        for value in (math.nan, 10**12, -(10**30), 1e30, 10**400):
            try:
                fit_value(kind, key, value)
            except ValueError:
                continue
            legal = "infinite=True" in str(type_hints(kind)[key]) and value in (10**12, 1e30)
            seed = "seed" in key and value == 10**12
            weight = "high=1e+18" in str(type_hints(kind)[key]) and value == 10**12
            if not (legal or seed or weight):
                wrong.append(f"{owner}.{key} takes {value!r}")
    assert wrong == []


def test_every_number_says_its_range() -> None:
    lacking = {
        f"{owner}.{key}"
        for owner, kind, key in settings()
        if re.search(r"\b(int|float)\b", str(type_hints(kind)[key])) and "Range" not in str(type_hints(kind)[key])
    }
    free = {key for key in lacking if key.rpartition(".")[2] not in {"mean", "classes", "factor"}}
    assert free == set()


def test_defaults_and_examples_are_in_their_ranges() -> None:
    for registry in REGISTRIES:
        for name, built in registry.examples():
            for field in dataclasses.fields(built) if dataclasses.is_dataclass(built) else ():
                if field.init:
                    value = getattr(built, field.name)
                    assert fit_value(type(built), field.name, value) == value, (name, field.name)
                    if field.default is not dataclasses.MISSING:
                        fit_value(type(built), field.name, field.default)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "thing.count: expected a whole number >= 1, got 0"),
        ({"count": 10**12}, "thing.count: expected a whole number >= 1 and <= 10,000,000, got 1000000000000"),
        ({"count": 1.5}, "thing.count: expected a whole number >= 1, got 1.5"),
        ({"count": True}, "thing.count: expected a whole number >= 1, got True, which is no number"),
        ({"count": "1"}, "got '1', which is text: write it without quotes"),
        ({"limit": "nan"}, "thing.limit: expected a number > 0, got 'nan'"),
        ({"count": None}, "got None (null); leave the setting out for its default"),
        ({"odd": 11}, "thing.odd: expected a whole number in [1, 9] or null, got 11"),
        ({"size": 0}, "thing.size: expected a number > 0, got 0"),
        ({"size": math.inf}, "got inf"),
        ({"limit": math.nan}, "thing.limit: expected a number > 0, got nan"),
        ({"share": 1.1}, "thing.share: expected a number in [0, 1], got 1.1"),
        ({"plain": math.inf}, "thing.plain: expected a number, got inf"),
        ({"sides": []}, "thing.sides: expected a list of 1 to 3 values, each a whole number >= 1, got []"),
        ({"sides": [1, 1, 1, 1]}, "expected a list of 1 to 3 values"),
        ({"sides": [1, 0]}, "thing.sides.1: expected a whole number >= 1, got 0"),
        ({"sides": 3}, "thing.sides: expected a list"),
        ({"pair": [1]}, "thing.pair: expected a list of 2: a whole number, a whole number, got [1]"),
        ({"on": 1}, "thing.on: expected true or false, got 1"),
        ({"on": "yes"}, "thing.on: expected true or false, got 'yes'"),
        ({"kind": True}, "thing.kind: expected 'a' or 2, got True"),
        ({"kind": 2.0}, "thing.kind: expected 'a' or 2, got 2.0"),
        ({"word": 3}, "thing.word: expected text, got 3"),
        ({"each": {"x": 2}}, "thing.each.x: expected a number in [0, 1], got 2"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as error:
        Thing(**given)
    assert message in str(error.value)


def test_what_fits_is_brought_into_form() -> None:
    made = Thing(count=np.int64(3), size=2, share=np.float32(0.5), sides=[1, 2], each={"x": 1}, pair=(1.0, 2))  # type: ignore[arg-type]
    assert made == Thing(count=3, size=2.0, share=0.5, sides=(1, 2), each={"x": 1.0}, pair=(1, 2))
    assert [type(value) for value in (made.count, made.size, made.share, made.pair[0])] == [int, float, float, int]
    assert Thing(limit=math.inf).limit == math.inf


def test_python_is_told_the_same_as_a_config() -> None:
    with pytest.raises(SettingError, match=r"^fedavg\.lr: expected a number >= 0, got -1$"):
        FedAvg(lr=-1)
    with pytest.raises(SettingError, match=r"^fedavg\.lr: expected a number >= 0, got True, which is no number$"):
        dataclasses.replace(FedAvg(), lr=True)
    with pytest.raises(SettingError, match=r"^fedavg\.lr: expected a number >= 0, got -1$"):
        methods.build({"name": "fedavg", "lr": -1})


def test_a_class_of_ones_own_is_checked_by_its_annotations() -> None:
    registry: Registry[Any] = Registry("thing", "fl")
    registry._searched = True

    @registry.register("mine")
    @dataclass(frozen=True, kw_only=True)
    class Mine:
        lr: float = 0.1
        share: Share = 0.5
        other: Unknown = None  # type: ignore[name-defined]  # noqa: F821 - imported for type checkers only, say

    assert Mine(other=object(), lr=1).lr == 1.0
    for given in ({"lr": True}, {"lr": "1"}, {"lr": math.nan}, {"share": 2}):
        with pytest.raises(SettingError, match=r"^mine\."):
            Mine(**given)


def test_annotations_for_people_and_checkers_are_no_error() -> None:
    @declared("mine")
    @dataclass(frozen=True, kw_only=True)
    class Mine:
        call: callable | None = None  # type: ignore[valid-type]
        other: "an array of any size" = None  # type: ignore[valid-type, assignment]  # noqa: F722
        gone: np.NoSuchThing = None  # type: ignore[name-defined]
        pair: tuple = ()  # type: ignore[type-arg]
        share: Share = 0.5

    made = Mine(call=print, other=3, gone=4, pair=[1, "x"])  # type: ignore[arg-type]
    assert (made.call, made.other, made.gone, made.pair) == (print, 3, 4, (1, "x"))  # type: ignore[comparison-overlap]
    with pytest.raises(SettingError, match=r"^mine\.share: "):
        Mine(share=2)
    with pytest.raises(SettingError, match=r"^mine\.pair: expected a list of values"):
        Mine(pair=3)  # type: ignore[arg-type]


def test_values_in_messages_are_cut() -> None:
    assert len(format_value("x" * 10**6)) <= 100
    assert len(format_value([list(range(1000))] * 1000)) <= 100
    with pytest.raises(SettingError) as error:
        Thing(count="9" * 10**6)  # type: ignore[arg-type]
    assert len(str(error.value)) < 250


def test_numbers_that_are_equal_keep_the_type_and_sign_that_they_were_given_as():
    """What a number comes to is kept for the next time, by its type as well."""

    @dataclass(frozen=True)
    class Loose:
        value: int | float | bool
        share: float = 0.5

    found = [fit_value(Loose, "value", value) for value in (1, 1.0, True, 1)]
    assert [type(value) for value in found] == [int, float, bool, int]
    assert [math.copysign(1, fit_value(Loose, "share", value)) for value in (0.0, -0.0, 0.0)] == [1, -1, 1]
    assert type(fit_value(Loose, "share", 1)) is float
    for _ in range(2):
        with pytest.raises(SettingError, match="expected a number"):
            fit_value(Loose, "share", True)
