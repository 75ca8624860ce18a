"""What a dataclass is built of, checked by the types of its fields (`fl.ranges`)."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fl.ranges import Length, Range

T = TypeVar("T")
_UNRESOLVED = (AttributeError, NameError, SyntaxError, TypeError)
"""What annotations may raise that are for type checkers or for people: `callable | None`, `"an array"`."""
SHOWN = 100
"""Characters of a value that a message shows at most."""


class SettingError(ValueError):
    """A value that does not fit its setting.

    Attributes:
        keys: lead to the setting, the outermost first.
        reason: what was expected and what was got.
    """

    def __init__(self, keys: Sequence[str], reason: str) -> None:
        self.keys, self.reason = tuple(keys), reason
        super().__init__(f"{'.'.join(self.keys)}: {reason}")

    def under(self, *keys: str, instead: int = 0) -> SettingError:
        """The same further inside: `keys` before it, in place of its first `instead` keys."""
        return SettingError((*keys, *self.keys[instead:]), self.reason)


class ListError(SettingError):
    """A list for a setting that takes one value, each of which would do by itself.

    Attributes:
        values: the list.
    """

    def __init__(self, keys: Sequence[str], reason: str, values: Sequence[Any]) -> None:
        super().__init__(keys, reason)
        self.values = list(values)

    def under(self, *keys: str, instead: int = 0) -> ListError:
        """The same further inside."""
        return ListError((*keys, *self.keys[instead:]), self.reason, self.values)


def declared(owner: str) -> Callable[[type[T]], type[T]]:
    """Decorator over `@dataclass`: what is given for fields is checked by their types; errors name `owner.field`."""

    def decorate(kind: type[T]) -> type[T]:
        check(kind, owner)
        return kind

    return decorate


def check(kind: type, owner: str) -> None:
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
        for key in given:
            if key in names:
                given[key] = fitted(kind, key, given[key], owner)
        plain(self, *args, **given)

    checked.__unchecked__ = plain  # type: ignore[attr-defined]
    kind.__init__ = checked  # type: ignore[misc]


def fitted(kind: type, key: str, value: Any, owner: str = "") -> Any:
    """`value` as the field `key` of the dataclass `kind` has it.

    Raises:
        ListError: a list for a field that takes one value.
        SettingError: it does not fit; names `owner.key`.
    """
    hint = hints(kind).get(key, Any)
    where = (owner, key) if owner else (key,)
    try:
        return _fit(hint, value, where)
    except ListError:
        raise
    except SettingError as error:
        if error.keys == where and _each_would_do(hint, value):
            raise ListError(where, error.reason, value) from error
        raise


@functools.cache
def hints(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass with what they say of ranges; names that can't be resolved say nothing."""
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


def shown(value: object) -> str:
    """`value` as messages show it, cut at `SHOWN` characters, whatever its size."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = SHOWN
    text = brief.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


# ---- values ----------------------------------------------------------------------------------------------------------
def _fit(hint: Any, value: Any, where: tuple[str, ...]) -> Any:
    rules: list[Any] = []
    while typing.get_origin(hint) is Annotated:
        hint, *inner = typing.get_args(hint)
        rules += inner
    made = _of_type(hint, value, where, rules)
    for rule in rules:
        if isinstance(rule, Length) and not rule.least <= len(made) <= (rule.most or len(made)):
            raise _wrong(hint, rules, value, where)
        if isinstance(rule, Range) and not rule.holds(made):
            raise _wrong(hint, rules, value, where)
    return made


def _of_type(hint: Any, value: Any, where: tuple[str, ...], rules: Sequence[Any]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if hint in (bool, int, float, str, None, type(None)):
        return _single(hint, value, where, rules)
    if origin is Literal:
        for choice in args:
            if type(choice) is type(value) and choice == value:
                return value
        raise _wrong(hint, rules, value, where)
    if origin in {typing.Union, types.UnionType}:
        return _one_of(args, hint, value, where)
    if origin in {tuple, list, Sequence} or hint in (tuple, list):
        return _several(origin or hint, args, hint, value, where, rules)
    if origin in {dict, Mapping} or hint in (dict, Mapping):
        return _mapping(args, hint, value, where, rules)
    return _instance(hint, value, where, rules)


def _single(hint: Any, value: Any, where: tuple[str, ...], rules: Sequence[Any]) -> Any:
    if hint is None or hint is type(None):
        if value is None:
            return None
        raise _wrong(hint, rules, value, where)
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
            raise _wrong(hint, rules, value, where) from None
        ranged = any(isinstance(rule, Range) for rule in rules)
        if not math.isnan(number) and (ranged or math.isfinite(number)):
            return number
    raise _wrong(hint, rules, value, where)


def _one_of(kinds: Sequence[Any], hint: Any, value: Any, where: tuple[str, ...]) -> Any:
    deeper: SettingError | None = None
    for kind in sorted(kinds, key=lambda kind: not _is_exact(kind, value)):
        try:
            return _fit(kind, value, where)
        except SettingError as error:
            if len(error.keys) > len(where) or (_of_registry(kind) and value is not None):
                deeper = deeper or error
    raise deeper or _wrong(hint, (), value, where)


def _is_exact(hint: Any, value: Any) -> bool:
    """Whether a value of a union is of this type as it stands, so that 1 stays an int in `float | int`."""
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    return hint is type(value) or (hint is None and value is None)


def _several(origin: Any, args: Any, hint: Any, value: Any, where: tuple[str, ...], rules: Sequence[Any]) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong(hint, rules, value, where)
    if origin is tuple and args and not (len(args) == 2 and args[1] is Ellipsis):
        if len(value) != len(args):
            raise _wrong(hint, rules, value, where)
        kinds = list(args)
    else:
        kinds = [args[0] if args else Any] * len(value)
    made = [_fit(kind, item, (*where, str(i))) for i, (kind, item) in enumerate(zip(kinds, value, strict=True))]
    return made if origin is list else tuple(made)


def _mapping(args: Any, hint: Any, value: Any, where: tuple[str, ...], rules: Sequence[Any]) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(hint, rules, value, where)
    of_keys, of_values = args or (Any, Any)
    return {_fit(of_keys, k, where): _fit(of_values, v, (*where, shown(k).strip("'"))) for k, v in value.items()}


def _instance(hint: Any, value: Any, where: tuple[str, ...], rules: Sequence[Any]) -> Any:
    """A value of some class: an entry of a registry, a member of an Enum, a path, a dataclass; else any instance."""
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type) or _is_instance(value, kind):
        return value
    if _of_registry(kind):
        try:
            return kind.registry.build(value)  # type: ignore[attr-defined]
        except SettingError as error:
            raise error.under(*where, instead=1) from error
        except ValueError as error:
            raise SettingError(where, str(error)) from error
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _wrong(hint, rules, value, where) from None
    if issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _dataclass(kind, value, where)
    raise _wrong(hint, rules, value, where)


def _is_instance(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol
        return True


def _dataclass(kind: type, value: Mapping[str, Any], where: tuple[str, ...]) -> Any:
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    for key in value:
        if key not in names:
            raise SettingError(where, f"expected {', '.join(names)}, got {shown(key)}")
    made = {}
    for key, item in value.items():
        try:
            made[key] = fitted(kind, key, item)
        except SettingError as error:
            raise error.under(*where) from error
    try:
        return kind(**made)
    except (TypeError, ValueError) as error:
        raise SettingError(where, str(error)) from error


def _of_registry(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(getattr(kind, "registry", None), "build")


def _each_would_do(hint: Any, value: Any) -> bool:
    """Whether `value` is a list of plain values of which each fits the type by itself."""
    if not isinstance(value, list) or not value:
        return False
    if not all(item is None or isinstance(item, str | int | float) for item in value):
        return False
    try:
        for item in value:
            _fit(hint, item, ("",))
    except ValueError:
        return False
    return True


# ---- words -----------------------------------------------------------------------------------------------------------
def _wrong(hint: Any, rules: Sequence[Any], value: Any, where: tuple[str, ...]) -> SettingError:
    return SettingError(where, f"expected {described(hint, rules, value)}, got {shown(value)}{_slip(hint, value)}")


def described(hint: Any, rules: Sequence[Any] = (), value: object = None) -> str:
    """What fits a type, in words: "a number > 0 or null"."""
    while typing.get_origin(hint) is Annotated:
        hint, *inner = typing.get_args(hint)
        rules = [*rules, *inner]
    span = next((f" {words}" for rule in rules if isinstance(rule, Range) and (words := rule.told(value))), "")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    single = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if hint in single or hint is None:
        return single[hint or type(None)] + span
    if origin is Literal:
        return _either([repr(choice) for choice in args])
    if origin in {typing.Union, types.UnionType}:
        return _either([described(kind, (), value) for kind in args])
    if origin in {tuple, list, Sequence} or hint in (tuple, list):
        size = next((f"{rule} " for rule in rules if isinstance(rule, Length)), "")
        if origin is tuple and args and args[-1] is not Ellipsis:
            return f"a list of {len(args)}: {', '.join(described(kind, (), value) for kind in args)}"
        return f"a list of {size}values, each {described(args[0] if args else Any, (), value)}"
    if origin in {dict, Mapping} or hint in (dict, Mapping):
        return f"settings (key: value), each {described(args[1], (), value)}" if args else "settings (key: value)"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _either([repr(member.value) for member in hint])
    if hint is Any:
        return "anything"
    return f"a {getattr(origin or hint, '__name__', str(hint))}"


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _slip(hint: Any, value: Any) -> str:
    """What the value probably should have been, where that can be told."""
    kinds = set(_leaves(hint))
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


def _leaves(hint: Any) -> list[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _leaves(args[0])
    if origin in {typing.Union, types.UnionType}:
        return [leaf for kind in args for leaf in _leaves(kind)]
    return [hint]
