"""Options of an executor, checked against what its engine takes, before anything is started or written."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin

from fl.registry import closest_names

SIMPLE: Mapping[str, type] = {one.__name__: one for one in (bool, int, float, str, list, dict)}
"""Types that an option can be checked for."""
Kinds = tuple[type, ...]
"""Types that an option may have; empty where that is not known."""


def parameters(*functions: Callable[..., Any]) -> dict[str, Kinds]:
    """Return the named parameters of functions with the types that they are annotated with, where these are simple.

    Of several functions that have a parameter of the same name the first one counts.
    """
    found: dict[str, Kinds] = {}
    for function in functions:
        for one in inspect.signature(function).parameters.values():
            if one.name != "self" and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                found.setdefault(one.name, _kinds(one.annotation))
    return found


def check_options(executor: str, options: Mapping[str, Any], known: Mapping[str, Kinds]) -> None:
    """Check names and types of options.

    Args:
        executor: its name.
        options: as they are asked for; None is an engine's own default.
        known: types by name.

    Raises:
        ValueError: an option that there is not, or one of another type; says which, and what is close.
    """
    for name, value in options.items():
        if name not in known:
            near = closest_names(name, known)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(sorted(known))}"
            raise ValueError(f"--executor {executor} has no option {name!r}; {hint}")
        if value is not None and known[name] and not _fits(value, known[name]):
            wanted = " or ".join(kind.__name__ for kind in known[name])
            raise ValueError(f"--executor {executor}: expected {wanted} for the option {name}, got {value!r}")


def _fits(value: object, kinds: Kinds) -> bool:
    """Return whether a value read from YAML stands for one of these types: an account may be a number, say."""
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int):
        return bool({int, float, str} & set(kinds))
    return isinstance(value, (*kinds, float) if str in kinds else kinds)


def _kinds(annotation: Any) -> Kinds:
    """Return the types of an annotation, `int | None` or `Optional[int]`; none where one of them is not simple."""
    if isinstance(annotation, str):
        parts: list[Any] = [part.strip() for part in annotation.split("|")]
    elif get_origin(annotation) in (Union, types.UnionType):
        parts = list(get_args(annotation))
    else:
        parts = [annotation]
    names = [part if isinstance(part, str) else _name(part) for part in parts]
    kinds = [SIMPLE.get(name) for name in names if name not in ("None", "NoneType")]
    return () if None in kinds else tuple(kind for kind in kinds if kind is not None)


def _name(part: Any) -> str:
    """Return the name of a type without what it holds: that of `Dict[str, float]` is `dict`."""
    return str(getattr(get_origin(part) or part, "__name__", ""))
