"""Registries: what one file adds by name, with its settings read from and written to plain data."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fl.settings import SettingError, check_fields, current_names, format_value, oldest_name, oldest_value

T = TypeVar("T")
Entry = TypeVar("Entry", bound=Callable[..., Any])
MAX_MATCHED_LENGTH = 200
"""Characters of a name that is worth looking for among others: it takes time that grows with their number."""
OWN_PACKAGES = frozenset({"fl", "defenses", "attacks", "eval"})
"""Packages whose absence is a fault, never a missing extra."""


MAX_LISTED = 12
"""Names that a message lists; of more, the command that shows them is named."""
LIST_ARGUMENTS = {
    kind: f" {kind}s" for kind in ("method", "attack", "defense", "dataset", "model", "partition", "augmentation")
}
LIST_ARGUMENTS["name"] = ""
"""What follows `hyperleak list`, by the kind of name."""


class UnknownNameError(ValueError):
    """A name nothing is known by; the message says what is close and what there is."""

    def __init__(self, kind: str, name: object, known: Collection[str], note: str = "") -> None:
        likely = closest_names(str(name), known)
        hint = f"did you mean {' or '.join(map(repr, likely))}? " if likely else ""
        there = f"known: {', '.join(known) or 'none'}"
        if len(known) > MAX_LISTED and kind in LIST_ARGUMENTS:
            there = f"`hyperleak list{LIST_ARGUMENTS[kind]}` shows all {len(known)}"
        if kind in LIST_ARGUMENTS and kind != "name" and not likely:
            note += "; names of your own are known once imported: --import FILE, or imports: in a config"
        super().__init__(f"unknown {kind} {name!r}; {hint}{there}{note}")


def closest_names(name: str, known: Collection[str]) -> list[str]:
    """Return which of `known` may be meant by `name`, the likeliest first, at most three."""
    first = closest_name(name, known)
    if first is None:
        return []
    return [first, *(other for other in difflib.get_close_matches(name, known, n=3, cutoff=0.75) if other != first)][:3]


def closest_name(name: str, known: Collection[str]) -> str | None:
    """Return which of `known` was probably meant by `name`, or None: few slips of the finger apart, or else alike."""
    if len(name) > MAX_MATCHED_LENGTH:
        return None
    slips = {candidate: _edit_distance(name.lower(), candidate.lower()) for candidate in known}
    nearest = sorted(known, key=lambda candidate: (slips[candidate], abs(len(candidate) - len(name))))
    if nearest and slips[nearest[0]] <= max(1, len(name) // 4):
        return nearest[0]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def _edit_distance(a: str, b: str) -> int:
    """Return how many characters to insert, delete, replace or swap with a neighbor until `a` is `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and a[i - 2] == y and b[j - 2] == x:
                row[j] = min(row[j], earlier[j - 2] + 1)
    return row[-1]


class FormerHooks:
    """A base of registered classes whose hooks had other names: what defines or asks for one by these is still heard.

    Attributes:
        former_hooks: today's name of a hook (a method, a property or a class attribute) by its former one.
    """

    former_hooks: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take a hook that a subclass defines by its former name for the hook of today, with a warning."""
        super().__init_subclass__(**kwargs)
        for former in cls.former_hooks.keys() & cls.__dict__.keys():
            if "ClassVar" not in str(inspect.get_annotations(cls).get(former, "ClassVar")):
                continue  # a setting of the subclass that happens to have this name
            current = cls.former_hooks[former]
            _warn_of_hook(cls.__name__, former, current)
            if current not in cls.__dict__:  # a class for two versions has both
                setattr(cls, current, cls.__dict__[former])
            delattr(cls, former)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a hook by its former name, with a warning."""
            current = type(self).former_hooks.get(name)
            if current is None:
                return object.__getattribute__(self, name)  # raises what was raised, also within a property
            _warn_of_hook(type(self).__name__, name, current)
            return getattr(self, current)


def _warn_of_hook(owner: str, former: str, current: str) -> None:
    warnings.warn(f"{owner}.{former} is now {owner}.{current}", DeprecationWarning, stacklevel=3)


class Registry(Generic[T]):
    """The entries of one kind: frozen keyword-only dataclasses (an object is its settings) or plain functions.

    The modules of `package`, in whatever folder below it, are imported at the first lookup, so a new file there is all
    that a new entry needs. A
    field whose type has a class attribute `registry` holds an entry of that registry, given by name or settings.

    Attributes:
        kind: what an entry is, for messages: "attack".
        package: where entries are looked for: "attacks".
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self._entries: dict[str, Any] = {}
        self._skips: dict[str, str] = {}
        self._searched = False

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Decorator that enters a dataclass or a function as `name` and sets its attribute `name`.

        A dataclass then checks the values it is built of by the types of its fields (`fl.ranges`).

        Raises:
            ValueError: the name is taken, or the class is not a frozen keyword-only dataclass.
        """

        def enter(entry: Entry) -> Entry:
            owner = self._entries.get(name)
            here = (entry.__module__, entry.__qualname__)
            if owner is not None and (owner.__module__, owner.__qualname__) != here:  # the same one: a reload
                raise ValueError(f"{self.kind} {name!r} is taken by {owner.__module__}.{owner.__qualname__}")
            if isinstance(entry, type):
                _check_settings(entry)
                check_fields(entry, name)
            self._entries[name] = entry
            entry.name = name  # type: ignore[attr-defined]
            return entry

        return enter

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        self._search()
        return sorted(self._entries)

    def skipped_modules(self) -> dict[str, str]:
        """Modules left out because an optional dependency is not installed, with the reason."""
        self._search()
        return dict(self._skips)

    def get(self, name: str) -> Any:
        """Return the dataclass or function registered as `name`.

        Raises:
            UnknownNameError: there is none; says what is close.
        """
        names = self.names()
        if not isinstance(name, str) or name not in self._entries:
            raise UnknownNameError(
                self.kind, str(name), names, "".join(f"; {reason}" for reason in self._skips.values())
            )
        return self._entries[name]

    def build(self, spec: str | Mapping[str, Any] | T) -> T:
        """Return the object that `spec` describes: a name, `{"name": name, field: value, ...}`, or the object itself.

        Values are checked against the field's type (`fl.ranges`) and brought into its form (a list to a tuple).

        Raises:
            UnknownNameError: unknown name or field.
            ListError: a list for a field that takes one value.
            ValueError: a value that does not fit its field (named in the message), or a field without a value.
        """
        if self._holds(spec):
            return typing.cast(T, spec)
        settings = {"name": spec} if isinstance(spec, str) else spec
        if not isinstance(settings, Mapping) or "name" not in settings:
            got = f"{format_value(spec)}{self._way_on(spec)}"
            raise ValueError(f"expected {self.kind} as a name or a mapping with 'name', got {got}")
        name = settings["name"]
        entry = self.get(name)
        values = {key: value for key, value in settings.items() if key != "name"}
        if isinstance(entry, type):
            values = current_names(entry, values, str(name))
        what = f"{self.kind} {name!r}"
        if not isinstance(entry, type):
            if values:
                raise UnknownNameError(f"setting of {what}", next(iter(values)), [])
            return typing.cast(T, entry)
        fields = {f.name: f for f in dataclasses.fields(entry) if f.init}
        for key in values:
            if key not in fields:
                raise UnknownNameError(f"setting of {what}", key, list(fields))
        missing = dataclasses.MISSING
        lacking = [k for k, f in fields.items() if f.default is missing and f.default_factory is missing]
        if absent := [key for key in lacking if key not in values]:
            raise ValueError(f"{what}: expected a value for {', '.join(absent)}, got none")
        try:
            return typing.cast(T, entry(**values))
        except (SettingError, UnknownNameError):
            raise
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error

    def find(self, name: object) -> Any:
        """Return the dataclass or function registered as `name`, or None."""
        return self._entries.get(name) if isinstance(name, str) and name in self.names() else None

    def spec(self, instance: T, *, oldest_names: bool = False) -> dict[str, Any]:
        """Return `instance` as `{"name": name, field: value, ...}` in str, int, float, bool, None, list and dict.

        `build(spec(x)) == x`, also after a round trip through YAML or JSON.

        Args:
            instance: a registered object.
            oldest_names: whether fields and values have the first names that they ever had (`fl.settings`).

        Raises:
            ValueError: `instance` is not of this registry.
            TypeError: a field holds something that plain data can't (a tensor, a function).
        """
        if not self._holds(instance):
            raise ValueError(f"expected a registered {self.kind}, got {instance!r}{self._way_on(instance)}")
        name: str = instance.name  # type: ignore[attr-defined]
        if not dataclasses.is_dataclass(instance):
            return {"name": name}
        return {"name": name} | _fields(instance, f"{self.kind} {name!r}", oldest_names)

    def examples(self) -> Iterator[tuple[str, T]]:
        """Yield every entry's name with a tiny instance: its `example()` where it has one, its defaults otherwise."""
        for name in self.names():
            entry = self._entries[name]
            yield name, getattr(entry, "example", entry)() if isinstance(entry, type) else entry

    def _holds(self, x: object) -> bool:
        """Return whether `x` is an instance (or function) of this registry."""
        entry = self._entries.get(getattr(x, "name", ""), None) if not isinstance(x, str | Mapping) else None
        return entry is not None and not isinstance(x, type) and (x is entry or type(x) is entry)

    def _way_on(self, x: object) -> str:
        """Return how what somebody gave for an entry becomes one; empty of plain data."""
        if x is None or isinstance(x, str | bytes | int | float | complex | list | tuple | Mapping):
            return ""
        listed = f"hyperleak list{LIST_ARGUMENTS.get(self.kind, '')}"
        kind = x if isinstance(x, type) else type(x)
        names = [name for name, entry in self._entries.items() if entry is kind]
        if names:
            return f"; that is the class: give its name, {names[0]!r}, or an object of it, {kind.__name__}(...)"
        if getattr(kind, "registry", None) is not self:
            return f"; that is none of ours: `{listed}` names those there are, docs/how-to has how to write one"
        package = vars(importlib.import_module(self.package))
        table = next((name for name, value in package.items() if value is self), f"{self.kind}s")
        return (
            f"; its class is not registered: write @{self.package}.{table}.register('a-name') above "
            f"@dataclass(frozen=True, kw_only=True) of class {kind.__name__}, and make the object again"
        )

    def _search(self) -> None:
        if self._searched:
            return
        self._searched = True  # before the imports: a module may look up the registry it enters
        try:
            package = importlib.import_module(self.package)
            for module in pkgutil.walk_packages(package.__path__, f"{self.package}."):
                self._load(module.name)
        except BaseException:
            self._searched = False
            raise

    def _load(self, module: str) -> None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in OWN_PACKAGES:
                raise
            self._skips[module] = f"{module} needs {error.name}, which is not installed"


_PLAIN_KINDS = frozenset({type(None), bool, int, float, str})
"""Types that plain data has as they are."""


def _check_settings(entry: type) -> None:
    if "__dataclass_params__" not in vars(entry) or not entry.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ValueError(f"expected a frozen keyword-only dataclass, got {entry.__module__}.{entry.__qualname__}")
    fields = dataclasses.fields(entry)
    if positional := [f.name for f in fields if f.init and not f.kw_only]:
        raise ValueError(f"expected keyword-only fields in {entry.__qualname__}, got {', '.join(positional)}")
    if any(f.name == "name" for f in fields):
        raise ValueError(f"expected no field 'name' in {entry.__qualname__}: it holds the registered name")


def _fields(instance: Any, where: str, oldest_names: bool) -> dict[str, Any]:
    """Return the fields of a dataclass in plain data."""
    kind, found = type(instance), {}
    for key in _init_names(kind):  # type: ignore[arg-type]
        value = _plain(getattr(instance, key), f"{where}, {key}", oldest_names)
        if oldest_names:
            key, value = oldest_name(kind, key), oldest_value(kind, key, value)
        found[key] = value
    return found


@functools.cache
def _init_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that its constructor takes."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.init)


def _plain(value: Any, where: str, oldest_names: bool) -> Any:
    if type(value) in _PLAIN_KINDS:
        return value
    registry = getattr(type(value), "registry", None)
    if isinstance(registry, Registry):
        return registry.spec(value, oldest_names=oldest_names)
    plain = partial(_plain, where=where, oldest_names=oldest_names)
    if isinstance(value, Enum):
        return plain(value.value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _fields(value, where, oldest_names)
    raise TypeError(f"{where}: expected plain data, got {type(value).__qualname__}")
