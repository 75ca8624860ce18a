"""The registered names and their settings as the source states them: for commands that compute nothing.

Importing what registers itself takes seconds, most of them torch's. The source of this package says the same: which
class stands under which name, its docstring, its fields and their defaults. What can't be read off with certainty
raises `UnclearSourceError`; whoever asks then imports (`eval.experiment.plugins.REGISTRIES`).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl.registry import UnknownNameError
from fl.settings import SettingError

ROOT = Path(__file__).parents[2]
OURS = frozenset({"fl", "defenses", "attacks", "eval"})
SEARCHED = ("fl", "defenses", "attacks")
"""Packages that register something."""
KINDS = ("methods", "attacks", "defenses", "datasets", "models", "partitions", "augmentations")
"""The registries by their plurals, by which they go in the source as well."""
NAMED_IN_CONFIGS = {
    ("task", "dataset"): "datasets",
    ("task", "model"): "models",
    ("federation", "partition"): "partitions",
    ("federation", "augment"): "augmentations",
    ("method",): "methods",
    ("defense",): "defenses",
    ("attack",): "attacks",
}
"""Where configs name what is registered."""
SECTIONS = ("eval.experiment.serialization", "SECTIONS")
"""Where a config's sections are listed: the module, and the name in it."""
_ENTRY = re.compile(r"^@(\w+)\.register\(\"([^\"]+)\"\)$", flags=re.MULTILINE)
_IMPORT = re.compile(r"^(?:from (?=[\w.]+ import )|import )(\w+)", flags=re.MULTILINE)
_MARK = re.compile(r"(\w+)\.register\('([^']+)'\)$")
_FILLS_IN = re.compile(r"setattr|\b(?:self|super\(\))\.\w+\(")
"""What `__post_init__` holds where an object's fields may be others than those it was given."""
_BUILTIN: dict[str, Callable[[], Any]] = {"dict": dict, "list": list, "tuple": tuple}
_NO_BASES = frozenset({"ABC", "Generic", "Protocol", "object"})
"""Bases without fields or words of their own."""
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
}
_SHOWN = frozenset({"plain", "presets", "name"})
"""Class variables that are shown."""


class UnclearSourceError(Exception):
    """What an entry is can't be read off the source with certainty."""


_UNCLEAR = object()
"""A class variable whose value is not known."""


def certain() -> bool:
    """Return whether the source says all that there is to know in this process.

    It does not once the registries may be imported, which may hold names of the user's own, nor where a module of ours
    needs a package that is not installed. All that registers something needs torch, so without that none is.
    """
    if "torch" in sys.modules:
        return False
    roots = {root for text in _sources().values() for root in _IMPORT.findall(text)} - OURS
    return all(root in sys.modules or find_spec(root) is not None for root in roots)


def names(kind: str) -> list[str]:
    """Return the names that a registry has, sorted.

    Args:
        kind: the registry's plural, one of `KINDS`.
    """
    return sorted(_modules(kind))


def entry(kind: str, name: str) -> type:
    """Return a class with the docstrings, fields, defaults and bases of the one that is registered as `name`.

    Raises:
        UnclearSourceError: the source is not enough for that.
        KeyError: there is no such name.
    """
    module = _Module.read(_modules(kind)[name])
    for node in module.definitions.values():
        if isinstance(node, ast.ClassDef) and any(_registers(mark, kind, name) for mark in node.decorator_list):
            found = _outline(module, node)
            found.name = name  # type: ignore[attr-defined]
            if _UNCLEAR in (getattr(found, key, None) for key in _SHOWN):
                raise UnclearSourceError(f"{node.name}: what it is in plain words")
            return found
    raise UnclearSourceError(f"{kind} {name!r} is no class")


def sections() -> list[str]:
    """Return the names of a config's sections."""
    return list(_sections())


def section(name: str) -> type:
    """Return a class with the docstrings, fields, defaults and bases of the one that a section of a config is read as.

    Raises:
        UnclearSourceError: the source is not enough for that.
        KeyError: there is no such section.
    """
    return _outlined(*_Module.read(SECTIONS[0]).find(_sections()[name]))


@functools.cache
def _sections() -> dict[str, str]:
    """Return the name of every section's class."""
    _, node = _Module.read(SECTIONS[0]).find(SECTIONS[1])
    if not isinstance(node, ast.Dict):
        raise UnclearSourceError(".".join(SECTIONS))
    return {ast.literal_eval(key): ast.unparse(kind) for key, kind in zip(node.keys, node.values, strict=True) if key}


def check_names(kind: str, spec: object) -> None:
    """Refuse settings whose name the source knows nothing by; whatever else is wrong is left to who reads them.

    Args:
        kind: the registry's plural, one of `KINDS`.
        spec: a name or settings with one, or several; `first+then` for a chain of attacks.

    Raises:
        UnknownNameError: says what is close.
    """
    if isinstance(spec, list):
        for part in spec:
            check_names(kind, part)
        return
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    if not isinstance(name, str) or (kind == "models" and ":" in name):
        return
    for part in name.split("+") if kind == "attacks" else [name]:
        if part not in _modules(kind):
            raise UnknownNameError(kind.removesuffix("s"), part, names(kind))


def check_config_names(config: object) -> None:
    """Refuse names in a config that the source knows nothing by; whatever else is wrong is left to who reads it.

    Raises:
        SettingError: says what is close.
    """
    for path, kind in NAMED_IN_CONFIGS.items():
        spec = config
        for key in path:
            spec = spec.get(key) if isinstance(spec, Mapping) else None
        try:
            check_names(kind, spec)
        except UnknownNameError as error:
            raise SettingError(path, str(error)) from error


@functools.cache
def _sources() -> dict[str, str]:
    """Return by name the text of every module of ours that may register something, or be needed for it."""
    found = {}
    for path in sorted(path for package in SEARCHED for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def _modules(kind: str) -> dict[str, str]:
    """Return the module that registers each name of a kind."""
    found = ((*mark, module) for module, text in _sources().items() for mark in _ENTRY.findall(text))
    return {name: module for registry, name, module in found if registry == kind}


def _registers(mark: ast.expr, kind: str, name: str) -> bool:
    """Return whether a decorator is `kind.register(name)`."""
    return ast.unparse(mark) == f"{kind}.register({name!r})"


@dataclasses.dataclass(frozen=True)
class _Module:
    """What a module defines at its top, and from where it imports what.

    Attributes:
        name: of the module.
        definitions: classes and values of constants, by name.
        imports: (module, name there), by name.
    """

    name: str
    definitions: Mapping[str, ast.AST]
    imports: Mapping[str, tuple[str, str]]

    @staticmethod
    @functools.cache
    def read(name: str) -> _Module:
        """Parse a module of ours."""
        place = ROOT.joinpath(*name.split("."))
        path = next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
        if path is None:
            raise UnclearSourceError(f"no source of {name}")
        definitions: dict[str, ast.AST] = {}
        imports: dict[str, tuple[str, str]] = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                imports |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                definitions[node.name] = node
            else:
                definitions |= _assigned(node)
        return _Module(name, definitions, imports)

    def find(self, name: str) -> tuple[_Module, ast.AST]:
        """Find where a name is defined, and as what."""
        if name in self.definitions:
            return self, self.definitions[name]
        module, there = self.imports.get(name, ("", ""))
        if there and module.partition(".")[0] in OURS:
            return _Module.read(module).find(there)
        raise UnclearSourceError(f"{name} in {self.name}")


def _assigned(node: ast.stmt) -> dict[str, ast.expr]:
    """Return the values that a statement gives to names."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return {node.target.id: node.value}
    found: dict[str, ast.expr] = {}
    if not isinstance(node, ast.Assign):
        return found
    value = node.value
    for target in node.targets:
        if isinstance(target, ast.Name):
            found[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=True)
            found |= {name.id: part for name, part in pairs if isinstance(name, ast.Name)}
    return found


def _outline(module: _Module, node: ast.ClassDef) -> type:
    """Return a class that has what a class of the source states, but for its methods."""
    bases = [_base(module, base) for base in node.bases]
    within: dict[str, Any] = {"__doc__": ast.get_docstring(node, clean=False), "__annotations__": {}}
    within["__module__"] = module.name
    for statement in node.body:
        field = _field_name(statement)
        if field:
            within["__annotations__"][field] = Any
        for name, value in _assigned(statement).items():
            try:
                within[name] = _value(module, value, within)
            except UnclearSourceError:
                if field:
                    raise
                within[name] = _UNCLEAR
        if isinstance(statement, ast.FunctionDef) and statement.name == "__post_init__":
            within["_fills_in"] = _FILLS_IN.search(ast.unparse(statement)) is not None
    found: type = type(node.name, tuple(filter(None, bases)), within)
    for mark in node.decorator_list:
        call = mark if isinstance(mark, ast.Call) else None
        if ast.unparse(call.func if call else mark) == "dataclass":
            options = [(option.arg, ast.literal_eval(option.value)) for option in call.keywords] if call else []
            found = dataclasses.dataclass(**{key: value for key, value in options if key})(found)
    return found


def _field_name(statement: ast.stmt) -> str:
    """Return the name of the field that a statement of a class defines, or nothing."""
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        return ""
    annotation = ast.unparse(statement.annotation)
    if "InitVar" in annotation:
        raise UnclearSourceError(f"{statement.target.id}: an InitVar")
    return "" if annotation.startswith("ClassVar") else statement.target.id


def _base(module: _Module, base: ast.expr) -> type | None:
    """Return the outline of a base, or None for one that adds nothing."""
    name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
    if name in _NO_BASES:
        return None
    return _outlined(*module.find(name))


def _outlined(module: _Module, node: ast.AST) -> type:
    if not isinstance(node, ast.ClassDef):
        raise UnclearSourceError(f"a base in {module.name}")
    return _cached(module.name, node.name)


@functools.cache
def _cached(module: str, name: str) -> type:
    """Return one outline for each class, so that Python finds the order of bases."""
    found = _Module.read(module)
    node = found.definitions[name]
    assert isinstance(node, ast.ClassDef)
    return _outline(found, node)


def _value(module: _Module, node: ast.expr, within: Mapping[str, Any]) -> Any:
    """Return what an expression comes to.

    Args:
        module: that it stands in.
        node: the expression.
        within: names that are defined before it in its class.

    Raises:
        UnclearSourceError: it takes more than literals, arithmetic, constants and dataclasses of ours.
    """
    value = functools.partial(_value, module, within=within)
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(map(value, node.elts))
        case ast.List():
            return list(map(value, node.elts))
        case ast.Dict() if None not in node.keys:
            return {value(key): value(item) for key, item in zip(node.keys, node.values, strict=True) if key}
        case ast.UnaryOp(op=ast.USub()):
            return -value(node.operand)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        case ast.Attribute(value=ast.Name(id="math")):
            return getattr(math, node.attr)
        case ast.Name() if node.id in within:
            if within[node.id] is _UNCLEAR:
                raise UnclearSourceError(node.id)
            return within[node.id]
        case ast.Name():
            there, found = module.find(node.id)
            if isinstance(found, ast.expr):
                return _value(there, found, {})
        case ast.Call(func=ast.Name(id="field")) if module.imports.get("field") == ("dataclasses", "field"):
            return _field(module, node, value)
        case ast.Call(func=ast.Name(id=called)) if not any(isinstance(argument, ast.Starred) for argument in node.args):
            given = [value(argument) for argument in node.args]
            named = {option.arg: value(option.value) for option in node.keywords if option.arg}
            if len(named) == len(node.keywords):
                return _built(module, called, given, named)
    raise UnclearSourceError(f"{ast.unparse(node)[:80]} in {module.name}")


def _field(module: _Module, call: ast.Call, value: Callable[[ast.expr], Any]) -> Any:
    """Return what a call of `dataclasses.field` comes to; a default that is a registered object is its settings."""
    options: dict[str, Any] = {}
    for option in call.keywords:
        if option.arg == "default_factory":
            made = _made(module, option.value, value)
            options[option.arg] = functools.partial(copy.deepcopy, made)
        elif option.arg:
            options[option.arg] = value(option.value)
    return dataclasses.field(**options)


def _made(module: _Module, factory: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    """Return what a factory of defaults makes."""
    if isinstance(factory, ast.Lambda):
        return value(factory.body)
    if not isinstance(factory, ast.Name):
        raise UnclearSourceError(f"{ast.unparse(factory)} in {module.name}")
    if factory.id in _BUILTIN:
        return _BUILTIN[factory.id]()
    there, node = module.find(factory.id)
    kind = _outlined(there, node)
    registered = [found[2] for mark in getattr(node, "decorator_list", ()) if (found := _MARK.match(ast.unparse(mark)))]
    if len(registered) != 1 or not dataclasses.is_dataclass(kind) or getattr(kind, "_fills_in", False):
        raise UnclearSourceError(f"{factory.id} in {module.name}")
    fields = {f.name: getattr(kind, f.name, _UNCLEAR) for f in dataclasses.fields(kind) if f.init}
    if _UNCLEAR in fields.values():
        raise UnclearSourceError(f"{factory.id} in {module.name}")
    return {"name": registered[0]} | {
        key: [*value] if isinstance(value, tuple) else value for key, value in fields.items()
    }


def _built(module: _Module, name: str, given: list[Any], named: dict[str, Any]) -> Any:
    """Return what a call of a dataclass of ours comes to."""
    kind = _outlined(*module.find(name))
    if not dataclasses.is_dataclass(kind) or getattr(kind, "_fills_in", False) or hasattr(kind, "registry"):
        raise UnclearSourceError(f"{name} in {module.name}")
    return kind(*given, **named)
