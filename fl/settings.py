"""What a dataclass is built of, checked by the types of its fields (`fl.ranges`).

A dataclass whose fields, or whose fields' values, have been renamed says so in two class variables:

    former_names: ClassVar[Mapping[str, str]] = {"orders": "order_candidates"}
    former_values: ClassVar[Mapping[str, Mapping[Any, Any]]] = {"noise_source": {"release": "secure"}}

The former names are still read, with a `FormerNameWarning`; what is written has the names of today. Subclasses inherit
both. Of several former names of one field the first that is listed is its oldest: the one that names of finished cells
are made of (`eval.run.cache_keys`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import reprlib
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fl.ranges import Length, Range

T = TypeVar("T")
_UNRESOLVED = (AttributeError, NameError, SyntaxError, TypeError)
"""What annotations may raise that are for type checkers or for people: `callable | None`, `"an array"`."""
_PACKAGES = frozenset({"fl", "defenses", "attacks", "eval", "dataclasses"})
MAX_SHOWN_CHARACTERS = 100
"""Characters of a value that a message shows at most."""


def options_or_settings(kind: type[T], options: T | None, settings: Mapping[str, Any]) -> T:
    """Return a function's options, given as one object or as single keyword arguments.

    Args:
        kind: the dataclass of the options.
        options: the object, if it was given.
        settings: single fields of it, by name.

    Raises:
        ValueError: both were given.
        TypeError: there is no such field; says what is close. Options that are another object.
    """
    if options is not None and not isinstance(options, kind):
        hint = "; give its entries one by one: **options" if isinstance(options, Mapping) else ""
        raise TypeError(f"expected options as an object of {kind.__name__}, got {type(options).__name__}{hint}")
    if options is not None and settings:
        raise ValueError(f"expected options or single settings, got both: {', '.join(settings)}")
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(names)}"
            raise TypeError(f"unexpected setting {name!r}; {hint}")
    return kind(**settings) if options is None else options


class SettingError(ValueError):
    """A value that does not fit its setting.

    Attributes:
        path: the keys that lead to the setting, the outermost first.
        reason: what was expected and what was got.
    """

    def __init__(self, path: Sequence[str], reason: str) -> None:
        self.path, self.reason = tuple(path), reason
        super().__init__(f"{'.'.join(self.path)}: {reason}")

    def with_prefix(self, *path: str, instead: int = 0) -> SettingError:
        """Return this error with `path` put before its own path, in place of the first `instead` keys of that."""
        return SettingError((*path, *self.path[instead:]), self.reason)


class ListError(SettingError):
    """A list for a setting that takes one value; each entry would do by itself.

    Attributes:
        values: the list.
    """

    def __init__(self, path: Sequence[str], reason: str, values: Sequence[Any]) -> None:
        super().__init__(path, reason)
        self.values = list(values)

    def with_prefix(self, *path: str, instead: int = 0) -> ListError:
        """Return this error with `path` put before its own path, in place of the first `instead` keys of that."""
        return ListError((*path, *self.path[instead:]), self.reason, self.values)


class FormerNameWarning(DeprecationWarning):
    """A setting, or a value of one, was given by a name that it had before.

    Attributes:
        former: the name that was given.
        current: the name of today.
    """

    def __init__(self, former: object, current: object) -> None:
        self.former, self.current = former, current
        super().__init__(f"{former!r} is now {current!r}")


def declared(owner: str) -> Callable[[type[T]], type[T]]:
    """Decorator over `@dataclass`: what is given for fields is checked by their types; errors name `owner.field`."""

    def decorate(kind: type[T]) -> type[T]:
        check_fields(kind, owner)
        return kind

    return decorate


_PLAIN_NUMBERS = (int, float, bool)


def check_fields(kind: type, owner: str) -> None:
    """Have the dataclass `kind` check what it is built of, before its `__post_init__`.

    Values are brought into the form of the field's type: numbers of numpy become Python's, an int a float where that
    is asked for, a list a tuple, a name the entry of a registry.

    Args:
        kind: a dataclass with a constructor of its own.
        owner: what errors call it.
    """
    plain = kind.__init__  # type: ignore[misc]
    plain = getattr(plain, "__unchecked__", plain)
    names = {f.name for f in dataclasses.fields(kind) if f.init}

    @functools.wraps(plain)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        given = current_names(kind, given, owner)
        for key in given:
            if key in names:
                given[key] = fit_value(kind, key, given[key], owner)
        plain(self, *args, **given)

    checked.__unchecked__ = plain  # type: ignore[attr-defined]
    kind.__init__ = checked  # type: ignore[misc]


def fit_value(kind: type, key: str, value: Any, owner: str = "") -> Any:
    """Return `value` as the field `key` of the dataclass `kind` has it.

    Raises:
        ListError: a list for a field that takes one value.
        SettingError: it does not fit; names `owner.key`.
    """
    value = current_value(kind, key, value)
    if type(value) in _PLAIN_NUMBERS and value != 0:  # 0.0 and -0.0 would count as one
        return _fit_plain_number(kind, key, value, type(value).__name__, owner)
    return _fit_value(kind, key, value, owner)


@functools.lru_cache(maxsize=4096)
def _fit_plain_number(kind: type, key: str, value: float, number: str, owner: str) -> Any:
    """Return what `fit_value` does of a number, each time the same; its type's name tells 1 from 1.0 and true."""
    return _fit_value(kind, key, value, owner)


def _fit_value(kind: type, key: str, value: Any, owner: str) -> Any:
    hint = _hints_of(kind).get(key, _ANY)
    where = (owner, key) if owner else (key,)
    try:
        return _fit_type(hint, value, where)
    except ListError:
        raise
    except SettingError as error:
        if error.path == where and _each_item_fits(hint, value):
            raise ListError(where, error.reason, value) from error
        raise


@functools.cache
def type_hints(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass with what they say of ranges.

    Names that can't be resolved say nothing.
    """
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except _UNRESOLVED:
        pass
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        known = vars(sys.modules.get(base.__module__, types.ModuleType("")))
        for key, hint in vars(base).get("__annotations__", {}).items():
            try:
                holder = type(base.__name__, (), {"__annotations__": {key: hint}, "__module__": base.__module__})
                found[key] = typing.get_type_hints(holder, globalns=known, include_extras=True)[key]
            except _UNRESOLVED:
                found[key] = Any
    return found


def format_value(value: object) -> str:
    """Return `value` as messages show it, cut at `MAX_SHOWN_CHARACTERS` characters, whatever its size."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = MAX_SHOWN_CHARACTERS
    text = brief.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


# ---- former names ----------------------------------------------------------------------------------------------------
@functools.cache
def former_names(kind: type) -> dict[str, str]:
    """Return the fields of a dataclass by the names that they had before, the oldest first."""
    own = {f.name for f in dataclasses.fields(kind)}
    found: dict[str, str] = {}
    for base in kind.__mro__:
        found |= {former: now for former, now in vars(base).get("former_names", {}).items() if former not in found}
    return {former: now for former, now in found.items() if now in own and former not in own}


def oldest_name(kind: type, key: str) -> str:
    """Return the first name that the field `key` of a dataclass had."""
    return next((former for former, now in former_names(kind).items() if now == key), key)


def current_name(kinds: Iterable[type], key: str) -> str:
    """Return today's name of the setting `key` of one of several dataclasses; warns where `key` is a former name.

    A name that one of them has today is taken to mean that.
    """
    kinds = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if any(key == f.name for kind in kinds for f in dataclasses.fields(kind)):
        return key
    now = next((former_names(kind)[key] for kind in kinds if key in former_names(kind)), key)
    if now != key:
        _warn_of_former_name(key, now)
    return now


def current_names(kind: type, values: Mapping[str, Any], owner: str = "") -> dict[str, Any]:
    """Settings of a dataclass by the names that its fields have today; warns of former ones.

    Raises:
        SettingError: a setting is given twice, by two of its names.
    """
    former = former_names(kind)
    found: dict[str, Any] = {}
    for key, value in values.items():
        now = former.get(key, key)
        if now in found or (now != key and now in values):
            where = (owner, now) if owner else (now,)
            raise SettingError(where, f"expected it once, got it as {now} and as {key}, a name that it had before")
        if now != key:
            _warn_of_former_name(key, now)
        found[now] = value
    return found


def current_value(kind: type, key: str, value: Any) -> Any:
    """Return the value of a field as it is called today; warns of a former name."""
    for former, now in _former_values(kind, key).items():
        if type(value) is type(former) and value == former:
            _warn_of_former_name(former, now)
            return now
    return value


def oldest_value(kind: type, key: str, value: Any) -> Any:
    """Return the first name that the value of a field had."""
    for former, now in _former_values(kind, key).items():
        if type(value) is type(now) and value == now:
            return former
    return value


def current_settings(kind: Any, value: Any, owner: str = "") -> Any:
    """Return plain data for a field of type `kind`, in it every setting by its name of today; warns of former ones.

    Args:
        kind: a type hint: a dataclass, the base class of a registry's entries, or one with these in it.
        value: plain data; what is not known (an entry that is not registered) stays as it is.
        owner: what errors call it.

    Raises:
        SettingError: a setting is given twice, by two of its names.
    """
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        for choice in args:
            value = current_settings(choice, value, owner)
        return value
    if isinstance(value, list | tuple):
        return [current_settings(args[0] if args else kind, item, owner) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _registry_of(kind):
        kind = kind.registry.find(value.get("name"))
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return value
    known = type_hints(kind)
    named = current_names(kind, value, owner)
    return {
        key: current_value(kind, key, current_settings(known.get(key, Any), item, owner)) for key, item in named.items()
    }


@functools.cache
def _former_values(kind: type, key: str) -> Mapping[Any, Any]:
    found: dict[Any, Any] = {}
    for base in kind.__mro__:
        found = {**vars(base).get("former_values", {}).get(key, {}), **found}
    return found


def _warn_of_former_name(former: object, now: object) -> None:
    """Warn of a former name, in the line outside these packages that gave it."""
    frame, level = sys._getframe(1), 2
    while (caller := frame.f_back) is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = caller, level + 1
    warnings.warn(FormerNameWarning(former, now), stacklevel=level)


# ---- values ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Hint:
    """A type hint, taken apart once.

    Attributes:
        kind: what is left of it without `Annotated`.
        rules: what `Annotated` says beside it.
        origin: of `kind`, such as `tuple` of `tuple[int, ...]`; None for a plain type.
        args: of `kind`.
        parts: these, taken apart; none of a `Literal`.
    """

    kind: Any
    rules: tuple[Any, ...]
    origin: Any
    args: tuple[Any, ...]
    parts: tuple[_Hint, ...]

    @classmethod
    def read(cls, hint: Any) -> _Hint:
        """Return the parts of a type hint."""
        rules: list[Any] = []
        while typing.get_origin(hint) is Annotated:
            hint, *inner = typing.get_args(hint)
            rules += inner
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        parts = () if origin is Literal else tuple(map(cls.read, args))
        return cls(hint, tuple(rules), origin, args, parts)


_ANY = _Hint.read(Any)
_KEPT = frozenset({bool, int, str})
"""Types of single values that are kept as they are."""


@functools.cache
def _hints_of(kind: type) -> dict[str, _Hint]:
    return {key: _Hint.read(hint) for key, hint in type_hints(kind).items()}


def _fit_type(hint: _Hint, value: Any, where: tuple[str, ...]) -> Any:
    if type(value) is hint.kind and not hint.rules and (hint.kind in _KEPT or dataclasses.is_dataclass(value)):
        return value
    made = _fit_single_type(hint, value, where)
    for rule in hint.rules:
        if isinstance(rule, Length) and not rule.least <= len(made) <= (rule.most or len(made)):
            raise _mismatch_error(hint.kind, hint.rules, value, where)
        if isinstance(rule, Range) and not rule.contains(made):
            raise _mismatch_error(hint.kind, hint.rules, value, where)
    return made


def _fit_single_type(read: _Hint, value: Any, where: tuple[str, ...]) -> Any:
    hint, rules, origin, args = read.kind, read.rules, read.origin, read.args
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if hint in (bool, int, float, str, None, type(None)):
        return _fit_scalar(hint, value, where, rules)
    if origin is Literal:
        for choice in args:
            if type(choice) is type(value) and choice == value:
                return value
        raise _mismatch_error(hint, rules, value, where)
    if origin in {typing.Union, types.UnionType}:
        return _fit_union(read, value, where)
    if origin in {tuple, list, Sequence} or hint in (tuple, list):
        return _fit_sequence(read, value, where)
    if origin in {dict, Mapping} or hint in (dict, Mapping):
        return _fit_mapping(read, value, where)
    return _fit_instance(hint, value, where, rules)


def _fit_scalar(hint: Any, value: Any, where: tuple[str, ...], rules: Sequence[Any]) -> Any:
    if hint is None or hint is type(None):
        if value is None:
            return None
        raise _mismatch_error(hint, rules, value, where)
    if not isinstance(value, bool) and type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and not isinstance(value, Enum):
        return value
    if hint is int and (whole or (isinstance(value, float) and value.is_integer())):
        return int(value)
    if hint is float and (whole or isinstance(value, float)):
        try:
            number = float(value)
        except OverflowError:
            raise _mismatch_error(hint, rules, value, where) from None
        ranged = any(isinstance(rule, Range) for rule in rules)
        if not math.isnan(number) and (ranged or math.isfinite(number)):
            return number
    raise _mismatch_error(hint, rules, value, where)


def _fit_union(hint: _Hint, value: Any, where: tuple[str, ...]) -> Any:
    deeper: SettingError | None = None
    for part in sorted(hint.parts, key=lambda part: not _is_exact(part.kind, value)):
        try:
            return _fit_type(part, value, where)
        except SettingError as error:
            known = _registry_of(part.kind) or (dataclasses.is_dataclass(part.kind) and isinstance(value, Mapping))
            if len(error.path) > len(where) or (known and value is not None):
                deeper = deeper or error
    raise deeper or _mismatch_error(hint.kind, (), value, where)


def _is_exact(kind: Any, value: Any) -> bool:
    """Return whether a value of a union is of this type as it stands, so that 1 stays an int in `float | int`."""
    return kind is type(value) or (kind is None and value is None)


def _fit_sequence(hint: _Hint, value: Any, where: tuple[str, ...]) -> Any:
    origin, args = hint.origin or hint.kind, hint.args
    if not isinstance(value, list | tuple):
        raise _mismatch_error(hint.kind, hint.rules, value, where)
    if origin is tuple and args and not (len(args) == 2 and args[1] is Ellipsis):
        if len(value) != len(args):
            raise _mismatch_error(hint.kind, hint.rules, value, where)
        kinds = list(hint.parts)
    else:
        kinds = [hint.parts[0] if args else _ANY] * len(value)
    made = [_fit_type(kind, item, (*where, str(i))) for i, (kind, item) in enumerate(zip(kinds, value, strict=True))]
    return made if origin is list else tuple(made)


def _fit_mapping(hint: _Hint, value: Any, where: tuple[str, ...]) -> Any:
    if not isinstance(value, Mapping):
        raise _mismatch_error(hint.kind, hint.rules, value, where)
    of_keys, of_values = hint.parts or (_ANY, _ANY)
    return {
        _fit_type(of_keys, k, where): _fit_type(of_values, v, (*where, format_value(k).strip("'")))
        for k, v in value.items()
    }


def _fit_instance(hint: Any, value: Any, where: tuple[str, ...], rules: Sequence[Any]) -> Any:
    """Return a value of some class: an entry of a registry, a member of an Enum, a path, a dataclass.

    Else any instance.
    """
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type) or _is_instance(value, kind):
        return value
    if _registry_of(kind):
        try:
            return kind.registry.build(value)  # type: ignore[attr-defined]
        except SettingError as error:
            raise error.with_prefix(*where, instead=1) from error
        except ValueError as error:
            raise SettingError(where, str(error)) from error
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _mismatch_error(hint, rules, value, where) from None
    if issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _fit_dataclass(kind, value, where)
    raise _mismatch_error(hint, rules, value, where)


def _is_instance(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol
        return True


def _fit_dataclass(kind: type, value: Mapping[str, Any], where: tuple[str, ...]) -> Any:
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    value = current_names(kind, value, ".".join(where))
    for key in value:
        if key not in names:
            raise SettingError(where, f"expected {', '.join(names)}, got {format_value(key)}")
    made = {}
    for key, item in value.items():
        try:
            made[key] = fit_value(kind, key, item)
        except SettingError as error:
            raise error.with_prefix(*where) from error
    try:
        return kind(**made)
    except (TypeError, ValueError) as error:
        raise SettingError(where, str(error)) from error


def _registry_of(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(getattr(kind, "registry", None), "build")


def _each_item_fits(hint: _Hint, value: Any) -> bool:
    """Return whether `value` is a list of plain values that each fit the type."""
    if not isinstance(value, list) or not value:
        return False
    if not all(item is None or isinstance(item, str | int | float) for item in value):
        return False
    try:
        for item in value:
            _fit_type(hint, item, ("",))
    except ValueError:
        return False
    return True


# ---- words -----------------------------------------------------------------------------------------------------------
def _mismatch_error(hint: Any, rules: Sequence[Any], value: Any, where: tuple[str, ...]) -> SettingError:
    return SettingError(
        where,
        f"expected {describe_type(hint, rules, value)}, got {format_value(value)}{_guess_intended_value(hint, value)}",
    )


def describe_type(hint: Any, rules: Sequence[Any] = (), value: object = None) -> str:
    """Return what fits a type, in words: "a number > 0 or null"."""
    while typing.get_origin(hint) is Annotated:
        hint, *inner = typing.get_args(hint)
        rules = [*rules, *inner]
    span = next((f" {words}" for rule in rules if isinstance(rule, Range) and (words := rule.describe(value))), "")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    single = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if hint in single or hint is None:
        return single[hint or type(None)] + span
    if origin is Literal:
        return _join_alternatives([repr(choice) for choice in args])
    if origin in {typing.Union, types.UnionType}:
        return _join_alternatives([describe_type(kind, (), value) for kind in args])
    if origin in {tuple, list, Sequence} or hint in (tuple, list):
        size = next((f"{rule} " for rule in rules if isinstance(rule, Length)), "")
        if origin is tuple and args and args[-1] is not Ellipsis:
            return f"a list of {len(args)}: {', '.join(describe_type(kind, (), value) for kind in args)}"
        return f"a list of {size}values, each {describe_type(args[0] if args else Any, (), value)}"
    if origin in {dict, Mapping} or hint in (dict, Mapping):
        return f"settings (key: value), each {describe_type(args[1], (), value)}" if args else "settings (key: value)"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _join_alternatives([repr(member.value) for member in hint])
    if hint is Any:
        return "anything"
    return f"a {getattr(origin or hint, '__name__', str(hint))}"


def _join_alternatives(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _guess_intended_value(hint: Any, value: Any) -> str:
    """Return what the value probably should have been, where that can be told."""
    kinds = set(_leaf_types(hint))
    if isinstance(value, bool) and kinds & {int, float}:
        return ", which is no number"
    if isinstance(value, str) and kinds & {int, float} and str not in kinds:
        try:
            number = float(value)
        except ValueError:
            return ""
        return ", which is text: write it without quotes" if math.isfinite(number) else ""
    if value is None and kinds:
        return " (null); leave the setting out for its default"
    return ""


def _leaf_types(hint: Any) -> list[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _leaf_types(args[0])
    if origin in {typing.Union, types.UnionType}:
        return [leaf for kind in args for leaf in _leaf_types(kind)]
    return [hint]
